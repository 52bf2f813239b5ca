"""Answers that must be JSON: a schema becomes a grammar, which says before each token which ones may come."""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt32

from sparda_jax.adjusting import all_allowed
from sparda_jax.serve.errors import ApiError
from sparda_jax.serve.requests import EngineError
from sparda_jax.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

# Between the parts of a value: enough for a line's end and its indentation. Without a limit a small model may never
# write anything else.
_BETWEEN = r"[ \n\t]{0,16}"


class Grammars:
    """Makes grammars for one tokenizer.

    Args:
        tokenizer: of the model that is served.
        vocab_size: token ids that the model has; the tokenizer may know fewer, and the others never come.
        eos_token_ids: any of them may come where an answer may end; none: the tokenizer's own.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, sorted(eos_token_ids)

    def compile(self, schema: Mapping[str, Any], field: str) -> "Grammar":
        """The grammar of the values that a JSON schema allows; takes milliseconds, the first time more.

        Raises:
            ApiError: 400 for ``field``: the schema is wrong, or says what can't be enforced.
        """
        import llguidance

        options: Any = {"whitespace_pattern": _BETWEEN}
        source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        matcher = llguidance.LLMatcher(self._tokens, source, log_level=0)
        if matcher.is_error():
            raise ApiError.bad_field(field, f"{field}: {_reason(matcher)}", code="invalid_value")
        return Grammar(matcher, vocab_size=self._vocab_size)

    @functools.cached_property
    def _tokens(self) -> "llguidance.LLTokenizer":
        import llguidance

        return llguidance.LLTokenizer(self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=self._eos or None)


class Grammar:
    """Follows one answer, token by token."""

    def __init__(self, matcher: "llguidance.LLMatcher", *, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def copy(self) -> "Grammar":
        """Another one in the same place, for an answer of its own."""
        return Grammar(self._matcher.deep_copy(), vocab_size=self._vocab_size)

    def allowed(self) -> UInt32[np.ndarray, "words"]:
        """Which tokens may come next, as bits; see `adjusting.all_allowed`.

        Raises:
            EngineError: the grammar has become too large.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        self._check()
        # The library has a place for one token more.
        return mask[: all_allowed(1, self._vocab_size).shape[1]]

    def accept(self, token: int) -> bool:
        """Takes the next token; whether the answer ends with it, since no other one could follow.

        Raises:
            EngineError: it is not one of those that were allowed, or the grammar has become too large.
        """
        self._matcher.consume_token(token)
        self._check()
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineError(f"response_format could not be kept to: {_reason(self._matcher)}")


def _reason(matcher: "llguidance.LLMatcher") -> str:
    """What is wrong, without the state of the parser that follows."""
    return matcher.get_error().partition("\n<state>")[0]

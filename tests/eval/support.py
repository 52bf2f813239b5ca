"""Two tokenizers that count very differently, and a subject that knows the answers."""

import functools
from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from sparda_jax.assets import BUNDLED_MODEL
from sparda_jax.eval.prompting import Prompt, Prompter, Template
from sparda_jax.eval.subjects import Answer
from sparda_jax.tokenizer import Tokenizer


@functools.cache
def bundled() -> Prompter:
    """The bundled model's tokenizer, in its chat template."""
    return Prompter(tokenizer=Tokenizer.from_pretrained(BUNDLED_MODEL))


@functools.cache
def bytewise() -> Prompter:
    """A token for each byte, without a template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Prompter(tokenizer=Tokenizer(backend), template=Template.PLAIN)


class Known:
    """Answers the first ``right`` prompts with all their references, the others with nothing."""

    def __init__(self, right: int, width: float | None = None) -> None:
        self.right, self.width, self.asked = right, width, 0

    def answers(self, prompts: Sequence[Prompt]) -> list[Answer]:
        self.asked += 1
        texts = [" and ".join(p.question.references) if i < self.right else "" for i, p in enumerate(prompts)]
        return [Answer(text=text, width=self.width) for text in texts]

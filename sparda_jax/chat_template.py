"""Chat templates, rendered as transformers does: jinja2's sandbox with the same options, filters and functions."""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Arguments that the renderer itself supplies; a caller's extra arguments must not replace them.
RESERVED_ARGUMENTS = frozenset({"messages", "add_generation_prompt", "tools", "documents"})


class ChatTemplateError(ValueError):
    """The template refuses these messages, or is itself broken; the message says which."""


class ReservedArgumentError(ChatTemplateError):
    """An extra argument has a name that the renderer itself sets."""


class _GenerationBlocks(Extension):
    """``{% generation %}`` marks assistant text for training masks; rendering passes its body through."""

    tags = {"generation"}  # noqa: RUF012 - the type that jinja2 declares

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # jinja2's own filter escapes HTML characters, which a model has never seen escaped.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the jinja2 text.
        special_tokens: name to text (``bos_token``, ``eos_token``, ...), visible to the template.

    Raises:
        ChatTemplateError: the text is not valid jinja2.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        functions: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        environment.globals.update(functions)
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template is not valid jinja2: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: ``{"role": ..., "content": ...}`` in order.
            add_generation_prompt: end with the opening of the assistant's next turn.
            arguments: further names that the template knows, such as ``enable_thinking``.

        Raises:
            ChatTemplateError: the template refused the messages, or an argument is reserved.
        """
        arguments = arguments or {}
        clash = sorted((RESERVED_ARGUMENTS | set(self._special_tokens)) & set(arguments))
        if clash:
            raise ReservedArgumentError(
                f"{clash[0]!r} is set by the renderer and can't be given as a template argument"
            )
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **arguments,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error

"""From a question to token ids: the templates of models, and the beginning of the answer."""

import dataclasses
import enum
import hashlib
from collections.abc import Sequence

from sparda_jax.config import ConfigError
from sparda_jax.tokenizer import Tokenizer


class Template(enum.StrEnum):
    """How a question becomes a prompt."""

    CHAT = "chat"  # the tokenizer's own chat template; the answer's first words begin the assistant's turn
    MINICPM4 = "minicpm4"  # the same, and " /no_think" ends the user's turn, as the published evaluation has it
    PLAIN = "plain"  # no template: the question and the answer's first words


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked.

    Attributes:
        text: the user's turn.
        prefix: the answer's first words, which the model goes on from.
        references: what a right answer holds.
    """

    text: str
    prefix: str
    references: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """A question as a model gets it.

    Attributes:
        ids: token ids, the beginning of the answer included.
        question: what they say.
        new_tokens: length of the longest answer, in tokens.
    """

    ids: list[int]
    question: Question
    new_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompter:
    """Writes prompts with one tokenizer in one template.

    Raises:
        ConfigError: the template needs the tokenizer's chat template, and there is none.
    """

    tokenizer: Tokenizer
    template: Template = Template.CHAT

    def __post_init__(self) -> None:
        if self.template is not Template.PLAIN and self.tokenizer.chat_template is None:
            raise ConfigError(
                f"template={self.template.value} needs the tokenizer's chat template, and it has none: "
                f"use {Template.PLAIN.value}"
            )

    def messages(self, question: Question) -> list[dict[str, str]]:
        """The conversation, without the beginning of the answer."""
        ending = " /no_think" if self.template is Template.MINICPM4 else ""
        return [{"role": "user", "content": question.text + ending}]

    def encode(self, question: Question) -> list[int]:
        """Token ids of the question and of the beginning of its answer."""
        if self.template is Template.PLAIN:
            return self.tokenizer.encode(question.text + question.prefix)
        return self.tokenizer.encode_chat(self.messages(question)) + self.tokenizer.encode(
            question.prefix, add_bos=False
        )


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Twelve hexadecimal digits that tell sets of prompts apart."""
    found = hashlib.sha256()
    for prompt in prompts:
        found.update(repr((prompt.ids, prompt.new_tokens, prompt.question.references)).encode())
    return found.hexdigest()[:12]

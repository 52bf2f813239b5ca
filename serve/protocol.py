"""The requests: OpenAI's fields, checked before any work, each error naming its field."""

import abc
import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from sparda_jax.adjusting import MAX_BIASES, MAX_STOP_IDS
from sparda_jax.logprobs import MAX_LOGPROBS
from sparda_jax.serve.errors import ApiError

MAX_STOPS = 4
MAX_STOP_LENGTH = 1000
MAX_CHOICES = 128
# Levels inside a free-form field; code that walks it by recursion must not run out of stack.
MAX_DEPTH = 64

# Fields that change nothing in the answer's tokens: accepted and ignored. Routers add the ones about reasoning.
IGNORED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "parallel_tool_calls prediction separate_reasoning stream_reasoning include_reasoning".split()
)
# Fields that would change the answer and are not built: only the value that means "off" is accepted.
_OFF: Mapping[str, Callable[[Any], bool]] = {
    "tools": lambda v: v == [],
    "tool_choice": lambda v: v in ("none", "auto"),
    "functions": lambda v: v == [],
    "function_call": lambda v: v in ("none", "auto"),
    "modalities": lambda v: v == ["text"],
    "audio": lambda v: False,
    "suffix": lambda v: v == "",
    "reasoning_effort": lambda v: False,
    "verbosity": lambda v: False,
    "web_search_options": lambda v: False,
    "continue_final_message": lambda v: v is False,
    "skip_special_tokens": lambda v: v is True,
    "no_stop_trim": lambda v: v is False,
    "return_hidden_states": lambda v: v is False,
}


def _fail(message: str) -> PydanticCustomError:
    return PydanticCustomError("bad_value", "{message}", {"message": message})


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _fail("it holds half of a surrogate pair, which is not text") from None
    return text


def _plain_inside(value: dict[str, Any]) -> dict[str, Any]:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [x for item in level if isinstance(item, dict | list) for x in _children(item)]
    if level:
        raise _fail(f"it is nested deeper than {MAX_DEPTH} levels")
    _utf8(json.dumps(value, ensure_ascii=False))
    return value


def _children(item: dict[str, Any] | list[Any]) -> list[Any]:
    return list(item.values()) if isinstance(item, dict) else item


Text = Annotated[str, AfterValidator(_utf8)]
FreeObject = Annotated[dict[str, Any], AfterValidator(_plain_inside)]


def _join_parts(value: Any) -> Any:
    """Content may be a list of text parts; they are joined by newlines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _fail("it must be a string or a list of text parts")
    texts = []
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _fail(f'part {i} must be {{"type": "text", "text": "..."}}; other kinds are not supported')
        texts.append(part["text"])
    return "\n".join(texts)


def _stop_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else [] if value is None else value


def _biases(value: Any) -> Any:
    """OpenAI's names are token ids as text, since JSON has no others."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASES:
        raise _fail(f"it has {len(value)} entries; at most {MAX_BIASES} are allowed")
    if not all(re.fullmatch("0|[1-9][0-9]{0,9}", name) for name in value):
        raise _fail('its names must be token ids, such as {"5": -100}')
    for name, bias in value.items():
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise _fail(f"the bias of token {name} must be a number from -100 to 100")
    return {int(name): float(bias) for name, bias in value.items()}


def _prompt_list(value: Any) -> Any:
    """``str | list[str] | list[int] | list[list[int]]`` to a list of prompts."""
    wrong = _fail("it must be a string, a list of strings, a list of token ids or a list of such lists, and not empty")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise wrong
    if _is_ids(value):
        return [value]
    if all(isinstance(item, str) for item in value) or all(isinstance(item, list) and _is_ids(item) for item in value):
        return value
    raise wrong


def _is_ids(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    """``include_usage`` adds a last chunk with the usage; the other field is accepted and ignored."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(_Strict):
    """A JSON schema, which is kept to whatever ``strict`` says; name and description are for the client."""

    name: Text
    description: Text | None = None
    schema_: FreeObject = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """What an answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Request(_Strict):
    """What every endpoint takes."""

    model: str | None = None


class GenerationRequest(Request, abc.ABC):
    """What both generating endpoints take.

    Extensions of OpenAI's: top_k, min_p, repetition_penalty, min_tokens, stop_token_ids, ignore_eos, return_stats.
    """

    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_biases)] = None
    min_tokens: int | None = Field(default=None, ge=0)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stop: Annotated[
        list[Annotated[Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
        BeforeValidator(_stop_list),
        Field(max_length=MAX_STOPS),
    ] = []
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    return_stats: bool = False

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    @property
    def answer_schema(self) -> tuple[str, dict[str, Any]] | None:
        """The field that gives the JSON schema of the answers, and the schema; None: they are any text."""
        asked = self.response_format
        if asked is None or asked.type == "text":
            return None
        if asked.json_schema is None:
            return "response_format", {"type": "object"}
        return "response_format.json_schema.schema", asked.json_schema.schema_

    @property
    def max_tokens_field(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the new tokens."""
        return "max_tokens", self.max_tokens

    @property
    @abc.abstractmethod
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens are reported beside each token; None: no log probabilities."""

    @property
    def repeats_prompt(self) -> bool:
        """Whether an answer begins with its prompt."""
        return False


class Message(_Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text, BeforeValidator(_join_parts)]
    name: Text | None = None
    refusal: None = None

    def for_template(self) -> dict[str, str]:
        # Templates know OpenAI's newer name of the system role by the older one only.
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content} | ({"name": self.name} if self.name is not None else {})


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    chat_template_kwargs: FreeObject | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_tokens_field(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().max_tokens_field


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``."""

    prompt: Annotated[
        list[Text] | list[list[int]],
        BeforeValidator(_prompt_list, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    max_tokens: int | None = Field(default=None, ge=0)
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(default=None, ge=1)

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def repeats_prompt(self) -> bool:
        return bool(self.echo)


class TokenizeRequest(Request):
    """``POST /tokenize``: a prompt, as for completions, or messages, as for chat."""

    prompt: Text | None = None
    add_special_tokens: bool | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: FreeObject | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Request):
    """``POST /detokenize``."""

    tokens: list[int]


def parse_request[RequestType: Request](kind: type[RequestType], body: bytes) -> RequestType:
    """The request in a body.

    Raises:
        ApiError: 400 with the field at fault, for anything that is not a valid request.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError too
        raise ApiError.bad_field(None, f"the request body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError.bad_field(None, "the request body must be a JSON object", code="invalid_json")
    data = {name: value for name, value in data.items() if name not in IGNORED}
    for name in _OFF.keys() & data.keys():
        value = data.pop(name)
        if value is not None and not _OFF[name](value):
            raise ApiError.bad_field(name, f"{name} is not supported by this server", code="unsupported")
    try:
        request = kind.model_validate(data)
    except pydantic.ValidationError as error:
        raise _field_error(error) from error
    _check_combinations(request)
    return request


def _check_combinations(request: Request) -> None:
    if isinstance(request, GenerationRequest) and request.stream_options is not None and not request.stream:
        raise ApiError.bad_field("stream_options", "stream_options is allowed only with stream=true")
    if isinstance(request, CompletionRequest) and (request.best_of or 1) > request.choices_per_prompt:
        raise ApiError.bad_field("best_of", f"best_of={request.best_of} is not supported; it may not exceed n")
    if isinstance(request, ChatRequest) and None not in (request.max_tokens, request.max_completion_tokens):
        raise ApiError.bad_field("max_tokens", "give max_completion_tokens or max_tokens, not both")
    if isinstance(request, CompletionRequest) and request.max_tokens == 0 and not request.echo:
        raise ApiError.bad_field("max_tokens", "max_tokens=0 is allowed only with echo=true")
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise ApiError.bad_field("top_logprobs", "top_logprobs is allowed only with logprobs=true")
    if isinstance(request, GenerationRequest) and request.min_tokens:
        # The model's own ends of a sequence are held back, too.
        count, most = len(set(request.stop_token_ids or ())), MAX_STOP_IDS // 2
        if count > most:
            message = f"stop_token_ids has {count} ids; with min_tokens at most {most} are allowed"
            raise ApiError.bad_field("stop_token_ids", message)
    if isinstance(request, GenerationRequest) and request.response_format is not None:
        _check_response_format(request)
    if isinstance(request, TokenizeRequest):
        _check_tokenize(request)


def _check_response_format(request: GenerationRequest) -> None:
    asked, field = request.response_format, "response_format.json_schema"
    assert asked is not None
    if asked.type == "json_schema" and asked.json_schema is None:
        raise ApiError.bad_field(field, f"{field} is required with type=json_schema", code="missing_field")
    if asked.type != "json_schema" and asked.json_schema is not None:
        raise ApiError.bad_field(field, f"{field} is allowed only with type=json_schema")
    if asked.type != "text" and request.min_tokens:
        message = "min_tokens is not allowed with a response_format of JSON, which says itself where an answer ends"
        raise ApiError.bad_field("min_tokens", message)


def _check_tokenize(request: TokenizeRequest) -> None:
    if request.messages is None:
        if request.prompt is None:
            raise ApiError.bad_field("prompt", "give a prompt or messages", code="missing_field")
        for field in ("add_generation_prompt", "chat_template_kwargs"):
            if getattr(request, field) is not None:
                raise ApiError.bad_field(field, f"{field} is allowed only with messages")
    elif request.prompt is not None:
        raise ApiError.bad_field("prompt", "give a prompt or messages, not both")
    elif request.add_special_tokens:
        message = "add_special_tokens=true is allowed only with a prompt; the chat template has its own"
        raise ApiError.bad_field("add_special_tokens", message)


def _field_error(error: pydantic.ValidationError) -> ApiError:
    """The first problem, with its field as ``messages[0].role``."""
    first = error.errors(include_url=False, include_input=False)[0]
    # These are turned into something else first, so what stands behind their names may mean nothing to the client.
    if not first["loc"]:  # an object key that is no text
        return ApiError.bad_field(None, "the names of the request's fields must be text", code="invalid_json")
    location = first["loc"][:1] if first["loc"][0] in ("prompt", "stop", "logit_bias") else first["loc"]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    if first["type"] == "extra_forbidden":
        return ApiError.bad_field(param, f"{param} is not a field that this server knows", code="unknown_field")
    if first["type"] == "missing":
        return ApiError.bad_field(param, f"{param} is required", code="missing_field")
    message = first["msg"]
    return ApiError.bad_field(param, f"{param}: {message[:1].lower()}{message[1:]}", code="invalid_value")

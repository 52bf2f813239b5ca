"""From a checked request to its response: prompts, limits, sampling, the answers, whole or streamed."""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from sparda_jax.sampling import SamplingParams
from sparda_jax.serve.answers import SILENCE, Answer, Limits, merge
from sparda_jax.serve.engine import Engine
from sparda_jax.serve.errors import ApiError
from sparda_jax.serve.grammar import Grammar, Grammars
from sparda_jax.serve.metrics import Metrics
from sparda_jax.serve.prompts import Prompts
from sparda_jax.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest
from sparda_jax.serve.requests import EngineError
from sparda_jax.serve.responses import ChatShape, CompletionShape, Envelope, Json, Shape, usage
from sparda_jax.serve.scored_tokens import ScoredToken, TokenScorer
from sparda_jax.tokenizer import Tokenizer

# What nginx made the usual code for "the client went away"; nobody receives it.
CLIENT_GONE = 499
# A stream says something at least so often, or proxies and clients take a long prefill for a dead connection.
KEEP_ALIVE_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """What the HTTP layer tells about the model, and the sampling of a request that does not say.

    Attributes:
        model: the name that requests use.
        mode: how blocks are selected.
        vocab_size: token ids that the model has.
        temperature, top_p, top_k: defaults, from the model's ``generation_config.json`` or OpenAI's.
        created: when the server started, in seconds since 1970.
    """

    model: str
    mode: str
    vocab_size: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Prompt:
    """Token ids, and the text that ``echo`` repeats."""

    ids: list[int]
    echo: str = ""


class Handler:
    """Answers the two generating endpoints."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, info: ServerInfo, metrics: Metrics) -> None:
        self._engine, self._tokenizer, self._info, self._metrics = engine, tokenizer, info, metrics
        self._prompts = Prompts(tokenizer, max_model_len=engine.max_model_len, vocab_size=info.vocab_size)
        self._grammars = Grammars(tokenizer, vocab_size=info.vocab_size, eos_token_ids=sorted(engine.eos_token_ids))

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        """``POST /v1/chat/completions``."""
        ids = await self._prompts.chat(body.messages, body.chat_template_kwargs)
        return await self._respond(request, body, ChatShape(), [_Prompt(ids=ids)])

    async def completion(self, request: Request, body: CompletionRequest) -> Response:
        """``POST /v1/completions``."""
        prompts = []
        for prompt in body.prompt:
            if isinstance(prompt, str):
                ids = await self._prompts.text(prompt)
                prompts.append(_Prompt(ids=ids, echo=prompt if body.echo else ""))
            else:
                self._prompts.check_ids("prompt", prompt)
                prompts.append(_Prompt(ids=prompt, echo=self._tokenizer.decode(prompt) if body.echo else ""))
        return await self._respond(request, body, CompletionShape(), prompts)

    async def _respond(
        self, request: Request, body: GenerationRequest, shape: Shape, prompts: Sequence[_Prompt]
    ) -> Response:
        arrived: float = request.state.arrived
        self._check_count(body, shape, len(prompts))
        self._prompts.check_ids("stop_token_ids", body.stop_token_ids or ())
        self._prompts.check_ids("logit_bias", list(body.logit_bias or ()))
        params = [self._sampling(body, shape, prompt.ids) for prompt in prompts]
        grammar = await self._grammar(body)
        answers: list[Answer] = []
        scorer = TokenScorer(self._tokenizer)
        try:
            for prompt, variants in zip(prompts, params, strict=True):
                for variant in variants:
                    tokens = await self._engine.submit(
                        prompt.ids,
                        variant,
                        ignore_eos=body.ignore_eos,
                        with_stats=body.return_stats,
                        grammar=None if grammar is None else grammar.copy(),
                    )
                    limits = Limits(
                        echo=prompt.echo,
                        stops=body.stop,
                        stop_ids=body.stop_token_ids or (),
                        min_tokens=variant.min_tokens,
                        empty=body.max_tokens_field[1] == 0,
                    )
                    answers.append(
                        Answer(
                            len(answers),
                            tokens,
                            self._tokenizer.detokenizer(),
                            limits,
                            self._metrics.clock(arrived),
                            prompt=() if variant.prompt_logprobs is None else prompt.ids,
                            scorer=scorer,
                        )
                    )
        except EngineError as error:
            _cancel(answers)
            raise ApiError.of(error) from error
        # Only now: a request that is refused takes no prompt in.
        for prompt in prompts:
            self._metrics.prompt(len(prompt.ids))
        response = _Responder(
            request=request,
            envelope=Envelope(shape, self._info.model),
            shape=shape,
            body=body,
            answers=answers,
            prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
            mode=self._info.mode,
            count=lambda status: self._metrics.answered(shape.endpoint, status),
        )
        return response.stream() if body.stream else await response.whole()

    async def _grammar(self, body: GenerationRequest) -> Grammar | None:
        """Made in a thread, so that a large schema does not keep the other requests waiting."""
        if body.answer_schema is None:
            return None
        field, schema = body.answer_schema
        return await run_in_threadpool(self._grammars.compile, schema, field)

    def _check_count(self, body: GenerationRequest, shape: Shape, prompts: int) -> None:
        count, capacity = prompts * body.choices_per_prompt, self._engine.capacity
        if count > capacity:
            field = "n" if body.choices_per_prompt > 1 else shape.prompt_field
            message = (
                f"{field}: the request asks for {count} answers; at most {capacity} fit (--max-active + --max-queue)"
            )
            raise ApiError.bad_field(field, message)

    def _sampling(self, body: GenerationRequest, shape: Shape, ids: Sequence[int]) -> list[SamplingParams]:
        """The parameters of each of the ``n`` answers to one prompt; their seeds follow one another."""
        limit, used = self._engine.max_model_len, len(ids)
        field, wanted = body.max_tokens_field
        if not used:
            raise ApiError.bad_field(shape.prompt_field, "the prompt is empty")
        if used >= limit:
            message = f"the prompt has {used} tokens; the context holds {limit}, answer included (--max-model-len)"
            raise ApiError.bad_field(shape.prompt_field, message, code="context_length_exceeded")
        if wanted is not None and used + wanted > limit:
            message = (
                f"the prompt has {used} tokens, and {field}={wanted} more make {used + wanted}; the context holds "
                f"{limit} (--max-model-len), so at most {limit - used} are left for the answer"
            )
            raise ApiError.bad_field(field, message, code="context_length_exceeded")
        # One token more than none is computed, and left out.
        max_tokens = limit - used if wanted is None else max(wanted, 1)
        info = self._info
        if (body.min_tokens or 0) > max_tokens:
            message = f"min_tokens={body.min_tokens} is more than the {max_tokens} tokens that the answer may have"
            raise ApiError.bad_field("min_tokens", message)
        top_k = info.top_k if body.top_k is None else max(body.top_k, 0)  # -1 is vLLM's way to say "all"
        return [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=info.temperature if body.temperature is None else body.temperature,
                top_p=info.top_p if body.top_p is None else body.top_p,
                top_k=top_k,
                seed=None if body.seed is None else (body.seed + i) % 2**64,
                min_p=body.min_p or 0.0,
                presence_penalty=body.presence_penalty or 0.0,
                frequency_penalty=body.frequency_penalty or 0.0,
                repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
                logit_bias=tuple((body.logit_bias or {}).items()),
                min_tokens=body.min_tokens or 0,
                stop_token_ids=tuple(body.stop_token_ids or ()) if body.min_tokens else (),
                logprobs=body.likeliest,
                prompt_logprobs=body.likeliest if body.repeats_prompt else None,
            )
            for i in range(body.choices_per_prompt)
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Responder:
    """Writes one response's answers."""

    request: Request
    envelope: Envelope
    shape: Shape
    body: GenerationRequest
    answers: Sequence[Answer]
    prompt_tokens: int
    mode: str
    count: Callable[[int], None]

    async def whole(self) -> Response:
        collecting = asyncio.create_task(self._collect())
        leaving = asyncio.create_task(_disconnected(self.request))
        try:
            await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                self.count(CLIENT_GONE)
                return Response(status_code=CLIENT_GONE)
            choices = collecting.result()
        except EngineError as error:
            raise ApiError.of(error) from error
        finally:
            _cancel(self.answers)
            collecting.cancel()
            leaving.cancel()
        self.count(200)
        return JSONResponse(self.envelope.whole(choices, usage=self._usage(), **self._stats()))

    def stream(self) -> Response:
        return _EventStream(self._events(), on_end=lambda: _cancel(self.answers))

    async def _collect(self) -> list[Json]:
        texts: list[list[str]] = [[] for _ in self.answers]
        tokens: list[list[ScoredToken]] = [[] for _ in self.answers]
        choices: list[Json] = [{} for _ in self.answers]
        async with contextlib.aclosing(merge(self.answers)) as pieces:
            async for piece in pieces:
                texts[piece.index].append(piece.text)
                tokens[piece.index] += piece.tokens
                if piece.finish_reason is not None:
                    text, logprobs = "".join(texts[piece.index]), None
                    if self.body.likeliest is not None:
                        logprobs = self.shape.logprobs(tokens[piece.index])
                    choices[piece.index] = self.shape.choice(piece.index, text, piece.finish_reason, logprobs)
        return choices

    async def _events(self) -> AsyncGenerator[str]:
        options = self.body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        empty: Json = {"usage": None} if with_usage else {}
        status = CLIENT_GONE
        try:
            for answer in self.answers:
                if (opening := self.shape.opening(answer.index)) is not None:
                    yield _event(self.envelope.chunk([opening], **empty))
            async with contextlib.aclosing(merge(self.answers, silence_seconds=KEEP_ALIVE_SECONDS)) as pieces:
                async for piece in pieces:
                    if piece is SILENCE:
                        yield ": keep-alive\n\n"
                    if piece.text or piece.tokens:
                        logprobs = self.shape.logprobs(piece.tokens) if piece.tokens else None
                        yield _event(
                            self.envelope.chunk([self.shape.piece(piece.index, piece.text, logprobs)], **empty)
                        )
                    if piece.finish_reason is not None:
                        closing = self.shape.closing(piece.index, piece.finish_reason)
                        yield _event(self.envelope.chunk([closing], **empty))
            if with_usage or self.body.return_stats:
                last = {"usage": self._usage()} if with_usage else {}
                yield _event(self.envelope.chunk([], **last, **self._stats()))
            status = 200
            yield "data: [DONE]\n\n"
        except EngineError as error:
            failure = ApiError.of(error)
            status = failure.status
            failure.log(self.request.scope)
            yield _event(failure.body())
        finally:
            self.count(status)

    def _usage(self) -> Json:
        return usage(self.prompt_tokens, sum(answer.completion_tokens for answer in self.answers))

    def _stats(self) -> Json:
        if not self.body.return_stats:
            return {}
        choices = [{"index": answer.index} | (answer.stats or {}) for answer in self.answers]
        for choice in choices:
            choice.pop("mode", None)  # the same for all of them
        return {"sparda": {"mode": self.mode, "choices": choices}}


class _EventStream(StreamingResponse):
    """Server-sent events; ``on_end`` runs however the connection ends, even before the first event."""

    def __init__(self, events: AsyncGenerator[str], on_end: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def _disconnected(request: Request) -> None:
    """Returns when the client has gone away; the body has been read, so nothing else can arrive."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _cancel(answers: Sequence[Answer]) -> None:
    for answer in answers:
        answer.cancel()


def _event(data: Json | dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"

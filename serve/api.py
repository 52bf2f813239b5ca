"""The HTTP application: OpenAI's paths over an engine and a tokenizer."""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

import sparda_jax
from sparda_jax.profiling import ProfileLostError, Profiler, ProfilingError
from sparda_jax.serve import protocol
from sparda_jax.serve.access import OPEN, Access, install
from sparda_jax.serve.body import read_body
from sparda_jax.serve.engine import Engine
from sparda_jax.serve.errors import ApiError, install_handlers
from sparda_jax.serve.handler import CLIENT_GONE, Handler, ServerInfo
from sparda_jax.serve.metrics import Metrics
from sparda_jax.serve.page import HEADERS, PAGE, Placement, Stats
from sparda_jax.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from sparda_jax.serve.tokenization import Tokenization
from sparda_jax.tokenizer import Tokenizer

__all__ = ["ServerInfo", "create_app"]


def create_app(
    engine: Engine,
    tokenizer: Tokenizer,
    info: ServerInfo,
    access: Access = OPEN,
    placement: Placement | None = None,
    profiler: Profiler | None = None,
) -> FastAPI:
    """The application. The caller starts and closes the engine.

    Args:
        engine: where the sequences run.
        tokenizer: of the same model.
        info: names, limits and defaults.
        access: who may ask, and how much.
        placement: where keys and values lie, for the page.
        profiler: what starts and stops profiles; None: the application has no such paths.
    """
    app = FastAPI(title="sparda-jax", version=sparda_jax.__version__)
    metrics = Metrics(engine)
    handler = Handler(engine, tokenizer, info, metrics)
    tokenization = Tokenization(tokenizer, max_model_len=engine.max_model_len, vocab_size=info.vocab_size)
    chat, needs_key = tokenizer.chat_template is not None, access.api_key is not None
    stats = Stats(engine, metrics, info, chat=chat, needs_key=needs_key, placement=placement)
    install_handlers(app)
    install(app, access)

    async def answer[RequestType: protocol.Request](
        request: Request,
        endpoint: str,
        kind: type[RequestType],
        handle: Callable[[RequestType], Awaitable[Response]],
    ) -> Response:
        request.state.arrived = time.monotonic()
        try:
            body = protocol.parse_request(kind, await read_body(request, access))
            if body.model is not None and body.model != info.model:
                message = f"the model {body.model!r} does not exist here; this server has {info.model!r}"
                raise ApiError(404, message, param="model", code="model_not_found")
            return await handle(body)
        except ApiError as error:
            metrics.answered(endpoint, error.status)
            raise
        except ClientDisconnect:
            metrics.answered(endpoint, CLIENT_GONE)
            return Response(status_code=CLIENT_GONE)

    @app.post("/v1/chat/completions", openapi_extra=_body_schema(ChatRequest, info.model))
    async def chat_completions(request: Request) -> Response:
        """Continues a conversation."""
        return await answer(request, "chat.completions", ChatRequest, lambda body: handler.chat(request, body))

    @app.post("/v1/completions", openapi_extra=_body_schema(CompletionRequest, info.model))
    async def completions(request: Request) -> Response:
        """Continues a text."""
        return await answer(request, "completions", CompletionRequest, lambda body: handler.completion(request, body))

    @app.post("/tokenize", openapi_extra=_body_schema(TokenizeRequest, info.model))
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt or a conversation."""

        async def handle(body: TokenizeRequest) -> Response:
            content = await tokenization.tokenize(body)
            metrics.answered("tokenize", 200)
            return JSONResponse(content)

        return await answer(request, "tokenize", TokenizeRequest, handle)

    @app.post("/detokenize", openapi_extra=_body_schema(DetokenizeRequest, info.model))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""

        async def handle(body: DetokenizeRequest) -> Response:
            content = await tokenization.detokenize(body)
            metrics.answered("detokenize", 200)
            return JSONResponse(content)

        return await answer(request, "detokenize", DetokenizeRequest, handle)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The server's version."""
        return {"version": sparda_jax.__version__}

    card = {
        "id": info.model,
        "object": "model",
        "created": info.created,
        "owned_by": "sparda-jax",
        "max_model_len": engine.max_model_len,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model of this server."""
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """The model by name."""
        if model != info.model:
            raise ApiError(404, f"the model {model!r} does not exist here", param="model", code="model_not_found")
        return card

    @app.get("/health")
    async def health() -> Response:
        """200 when the engine itself answers, else 503 with the reason."""
        state, counts = await engine.health(), engine.stats()
        content = {"status": state.status, "detail": state.detail, "running": counts.running, "waiting": counts.waiting}
        return JSONResponse(content, status_code=200 if state.ok else 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
        """Prometheus metrics."""
        return PlainTextResponse(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/stats")
    async def live_stats() -> Response:
        """The same numbers as JSON, with what the server is."""
        return JSONResponse(await stats.read())

    if profiler is not None:
        _add_profiles(app, profiler)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(PAGE, headers=HEADERS)

    return app


def _add_profiles(app: FastAPI, profiler: Profiler) -> None:
    """vLLM's two paths. Starting and writing take a while, so the loop goes on beside them."""

    async def answer(action: Callable[[], Path]) -> dict[str, Any]:
        try:
            path = await run_in_threadpool(action)
        except ProfilingError as error:
            status = 500 if isinstance(error, ProfileLostError) else 409
            raise ApiError(status, str(error), code="profile") from error
        return {"profile": str(path), "max_seconds": profiler.max_seconds}

    @app.post("/start_profile")
    async def start_profile() -> dict[str, Any]:
        """Begins a JAX profile, in a folder that the answer names; 409 while one is running. With `--profile` only."""
        return await answer(profiler.start)

    @app.post("/stop_profile")
    async def stop_profile() -> dict[str, Any]:
        """Ends the profile and answers when it is written; 409 if none is running. With `--profile` only."""
        return await answer(profiler.stop)


def _body_schema(kind: type[protocol.Request], model: str) -> dict[str, Any]:
    """The request's schema for the API documentation; the body itself is parsed by `parse_request`."""
    schema = _resolved(kind.model_json_schema())
    schema["properties"]["model"] |= {"enum": [model, None]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with its definitions, none of which is recursive, where they are referred to.

    A reference to ``#/$defs`` would be looked up in the whole document, where there are none.
    """
    definitions = schema.pop("$defs", {})

    def walk(part: Any) -> Any:
        if isinstance(part, list):
            return [walk(item) for item in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return walk(definitions[part["$ref"].rsplit("/", 1)[1]])
        return {name: walk(value) for name, value in part.items()}

    return walk(schema)

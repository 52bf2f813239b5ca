"""Errors in OpenAI's envelope: ``{"error": {"message", "type", "param", "code"}}``."""

import logging

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparda_jax.serve.request_id import request_id
from sparda_jax.serve.requests import EngineError, EngineUnavailable, QueueFull, RequestRejected

logger = logging.getLogger(__name__)

MAX_MESSAGE, MAX_PARAM = 2000, 200


class ApiError(Exception):
    """An answer other than 200.

    Attributes:
        status: HTTP status.
        message: a sentence for the client.
        param: the request's field at fault, or None.
        code: a word for programs, or None.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        # Both may quote the request, where a field's name can be of any length or half of a surrogate pair.
        self.status, self.message, self.code = status, _shown(message, MAX_MESSAGE), code
        self.param = None if param is None else _shown(param, MAX_PARAM)
        super().__init__(self.message)

    @classmethod
    def bad_field(cls, param: str | None, message: str, *, code: str | None = None) -> "ApiError":
        """400 for a field of the request."""
        return cls(400, message, param=param, code=code)

    @classmethod
    def of(cls, error: EngineError) -> "ApiError":
        """The answer to a request that the engine refused or could not finish."""
        match error:
            case RequestRejected():
                # The runner's messages begin with the field's name.
                return cls.bad_field(str(error).split("=")[0].split(" ")[0], str(error))
            case QueueFull():
                return cls(429, str(error), code="queue_full")
            case EngineUnavailable():
                return cls(503, str(error), code="unavailable")
            case _:
                return cls(500, str(error), code="engine_error")

    def body(self) -> dict[str, object]:
        """The envelope; also what a stream sends when it fails midway."""
        kinds = {429: "rate_limit_error", 503: "service_unavailable_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def log(self, scope: Scope) -> None:
        """One line, by which a client's report can be found: an error where the server is at fault, else information.

        What a client chose is quoted, so that it can't begin a line of its own.
        """
        level = logging.ERROR if self.status == 500 else logging.INFO
        text = "request %s: %s %r answered with %d: %r"
        logger.log(level, text, request_id(scope), scope["method"], scope["path"], self.status, self.message)

    def response(self, scope: Scope) -> JSONResponse:
        """The envelope with the headers that belong to the status; it is logged as an answer to ``scope``."""
        self.log(scope)
        retry = {"Retry-After": "1"}
        # The rest of a body that is late has no end.
        headers = {401: {"WWW-Authenticate": "Bearer"}, 408: {"Connection": "close"}, 429: retry, 503: retry}
        return JSONResponse(self.body(), status_code=self.status, headers=headers.get(self.status))


def _shown(text: str, limit: int) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= limit else text[:limit] + "..."


def install_handlers(app: FastAPI) -> None:
    """Every error that the application raises leaves in the envelope, unknown paths included."""

    @app.exception_handler(ApiError)
    async def _api_error(request: Request, error: ApiError) -> JSONResponse:
        return error.response(request.scope)

    @app.exception_handler(EngineError)
    async def _engine_error(request: Request, error: EngineError) -> JSONResponse:
        return ApiError.of(error).response(request.scope)

    @app.exception_handler(HTTPException)
    async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        code = "not_found" if error.status_code == 404 else None
        response = ApiError(error.status_code, message, code=code).response(request.scope)
        response.headers.update(error.headers or {})
        return response


class UnforeseenErrors:
    """Turns any other exception into 500 in the envelope, and logs it.

    Starlette's own handler of these stands outside of all middleware, where the answer would get none of their headers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            if started or scope["type"] != "http":
                raise  # uvicorn logs it and cuts the connection, so that the client sees an answer that is not whole
            logger.exception("request %s failed", request_id(scope))
            message = "the server failed on this request; its log says why"
            await ApiError(500, message, code="internal_error").response(scope)(scope, receive, watched)

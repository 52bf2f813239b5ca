"""Who may ask the server: an API key, and the web pages whose scripts may read the answers; and how much."""

import dataclasses
import hashlib
import hmac

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from sparda_jax.serve.errors import ApiError, UnforeseenErrors
from sparda_jax.serve.logs import AccessLog
from sparda_jax.serve.request_id import HEADER, RequestIds

# Paths that need the key, and all below them; probes, metrics and the version need none.
GUARDED = ("/v1", "/tokenize", "/detokenize", "/start_profile", "/stop_profile")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Access:
    """What is asked of a client, and what is taken from it.

    Attributes:
        api_key: the token that the paths in `GUARDED` want as ``Authorization: Bearer``; None: they are open.
        cors_origins: origins of web pages, or ``*``.
        max_body_mib: the largest request body. The default is a million tokens of text or ids with room to spare.
        upload_seconds: how long a body may take to arrive.
    """

    api_key: str | None = dataclasses.field(default=None, repr=False)
    cors_origins: tuple[str, ...] = ()
    max_body_mib: int = 32
    upload_seconds: float = 60.0


OPEN = Access()
"""Everyone may ask, except scripts of web pages."""


class ApiKeyCheck:
    """Answers 401 to a request of a guarded path without the key, before its body is read."""

    def __init__(self, app: ASGIApp, digest: bytes) -> None:
        """
        Args:
            app: what the requests with the key go on to.
            digest: of the key, so that the key itself stays out of whatever shows the middleware.
        """
        self._app, self._digest = app, digest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _is_guarded(scope["path"]) and not self._has_key(Headers(scope=scope)):
            message = "the API key is missing or wrong; send it as the header Authorization: Bearer KEY"
            await ApiError(401, message, code="invalid_api_key").response(scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # Digests are of one length, so the time of the comparison tells nothing of the key, its length included.
        return scheme.lower() == "bearer" and hmac.compare_digest(_digest(token.strip()), self._digest)


def install(app: FastAPI, access: Access) -> None:
    """Adds the checks, and the access log.

    What is added last is outermost: every error passes through CORS, or pages could not read it, and all has an id.
    """
    if access.api_key is not None:
        app.add_middleware(ApiKeyCheck, digest=_digest(access.api_key))
    app.add_middleware(UnforeseenErrors)
    if access.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's client sends a dozen of its own
            expose_headers=["Retry-After", HEADER],
        )
    app.add_middleware(AccessLog)
    app.add_middleware(RequestIds)


def _is_guarded(path: str) -> bool:
    return any(path == guarded or path.startswith(f"{guarded}/") for guarded in GUARDED)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()

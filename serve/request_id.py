"""A name for every request, on its answer and in the log lines about it."""

import re
import uuid
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
# What a client may choose: short, and nothing that could break a log line or a header.
_ALLOWED = re.compile(r"[!-~]{1,128}")
# Of the request that this code runs for; `None` outside of one.
CURRENT: ContextVar[str | None] = ContextVar("request_id", default=None)


class RequestIds:
    """Takes the id from the request's header, or makes one; every response carries it.

    An id that is too long or not of printable ASCII characters is replaced, so the client sees that it was not used.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _ALLOWED.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        CURRENT.set(request_id)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, named)


def request_id(scope: Scope) -> str:
    """The id of a request that has passed through `RequestIds`."""
    return scope["state"]["request_id"]

"""What the server logs: lines for people, or one JSON object a line for programs (``--log-format json``)."""

import datetime
import io
import json
import logging
import logging.config
import time
import urllib.parse
from typing import Any, Literal

from rich.console import Console
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import LOGGING_CONFIG

from sparda_jax.serve.request_id import CURRENT, request_id

LogFormat = Literal["text", "json"]
# A level of its own: what the server says when it starts is wanted also where single requests are not.
_start = logging.getLogger(f"{__name__}.start")
_access = logging.getLogger(f"{__name__}.access")


class JsonFormatter(logging.Formatter):
    """A record as a JSON object on one line: time, level, logger and message, and where there are: ``request_id``,
    ``exception``, and what the caller gave as ``extra={"fields": {...}}``.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (current := CURRENT.get()) is not None:
            line["request_id"] = current
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # In ASCII, so that half of a surrogate pair or an odd locale can't lose the line.
        return json.dumps(line, default=str)


class AccessLog:
    """A line for every request when it is over: with its id, and how long the whole answer took."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _access.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        began, status, whole = time.monotonic(), None, False

        async def watched(message: Message) -> None:
            nonlocal status, whole
            status = message.get("status", status)
            await send(message)
            whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, watched)
        finally:
            # Without the query, and quoted, so that it can't begin a line of its own.
            method, path = scope["method"], urllib.parse.quote(scope["path"])
            client = scope["client"][0] if scope.get("client") else None
            taken = 1000 * (time.monotonic() - began)
            fields = {"method": method, "path": path, "status": status, "duration_ms": round(taken, 1)}
            _access.info(
                '%s "%s %s" %s in %.1f ms, request %s%s',
                *(client, method, path, status, taken, request_id(scope), "" if whole else ", cut short"),
                extra={"fields": fields | {"client": client, "whole": whole}},
            )


class _LogLines(io.StringIO):
    """A file whose lines become records."""

    def write(self, text: str, /) -> int:
        for line in text.splitlines():
            if words := line.split():
                _start.info("%s", " ".join(words))
        return len(text)


def start_console(log_format: LogFormat) -> Console:
    """Where the server says what it will run: the terminal, or the log."""
    return Console() if log_format == "text" else Console(file=_LogLines(), width=10_000)


def configure(log_format: LogFormat, *, access_log: bool) -> None:
    """Sets up the process's logging: this package's, uvicorn's, and warnings of everything else.

    Args:
        log_format: for people or for programs.
        access_log: a line for every request, on standard output, and information beside warnings on standard error.
    """
    logging.config.dictConfig(_config(log_format, access_log=access_log))
    logging.captureWarnings(log_format == "json")


def _config(log_format: LogFormat, *, access_log: bool) -> dict[str, Any]:
    lines = LOGGING_CONFIG["formatters"]["default"] if log_format == "text" else {"()": JsonFormatter}
    handlers = {
        name: {"class": "logging.StreamHandler", "formatter": "lines", "stream": f"ext://sys.{name}"}
        for name in ("stderr", "stdout")
    }
    level = "INFO" if access_log else "WARNING"
    errors = {"handlers": ["stderr"], "level": level, "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"lines": lines},
        "handlers": handlers,
        "root": {"handlers": ["stderr"], "level": "WARNING"},
        "loggers": {
            "uvicorn": errors,
            "sparda_jax.serve": errors,
            _access.name: {"handlers": ["stdout"], "level": level, "propagate": False},
            _start.name: {"handlers": ["stdout"], "level": "INFO", "propagate": False},
        },
    }

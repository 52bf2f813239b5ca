"""The listening side: a socket bound before anything is loaded, and a server that drains when it is told to end."""

import os
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from sparda_jax.serve.engine import Engine
from sparda_jax.serve.settings import Settings, SettingsError

# What the last answers may take on their way to the clients, once the engine has nothing left.
_GRACE_SECONDS = 5
# Longer than clients and proxies keep an idle connection (5 s in httpx, 60 s in load balancers): the side that sends
# must be the one that closes, or a request meets a connection that is being closed.
_KEEP_ALIVE_SECONDS = 75


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet.

    Raises:
        SettingsError: the address is in use, or not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise SettingsError(f"--host {host} is not an address: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"--host {host} --port {port} can't be used: {error.strerror}; choose another --port"
        ) from error
    return listener


def url_of(listener: socket.socket, host: str) -> str:
    """The URL of a bound socket; a wildcard address is shown as the loopback one."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}"


class Server(uvicorn.Server):
    """uvicorn that lets the engine finish what is in flight, up to a limit, on SIGTERM or Ctrl-C."""

    def __init__(self, app: FastAPI, engine: Engine, settings: Settings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,  # `logs.configure` has done it
                access_log=False,  # `AccessLog` knows more
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )
        self._engine = engine
        self._drain_seconds = settings.drain_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drains the engine, then closes the connections and ends the engine.

        The server listens until the engine is drained: whoever asks for something new gets 503, and /health says why.
        """
        await self._engine.drain(self._drain_seconds)
        await super().shutdown(sockets)
        self._engine.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the shutdown; a second one ends the process, whatever is in flight."""
        if self.should_exit:
            os._exit(128 + sig)
        super().handle_exit(sig, frame)

    def run_until_signal(self, listener: socket.socket) -> None:
        """Serves; returns after a drained shutdown instead of dying of the signal that asked for it."""
        # uvicorn raises the signal again, for the handlers that it found, when it has shut down.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self.run(sockets=[listener])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def leave(code: int, engine: Engine) -> None:
    """Ends the process; at once when the engine is inside a step that can't be interrupted."""
    if engine.is_running:
        os._exit(code)
    raise SystemExit(code)

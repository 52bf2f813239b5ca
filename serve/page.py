"""The page at ``/`` and the numbers that it asks for, which are those of ``/metrics``."""

import base64
import dataclasses
import hashlib
import re
import time
from pathlib import Path
from typing import Any

import sparda_jax
from sparda_jax.serve.engine import Engine
from sparda_jax.serve.handler import ServerInfo
from sparda_jax.serve.metrics import Metrics

PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def _hashes(tag: str) -> str:
    """The page's own scripts or styles; the browser runs no other, wherever it came from."""
    parts = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" for part in parts)


HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where keys and values lie.

    Attributes:
        device: what computes, by its name.
        slots_per_lane: blocks of a lane in device memory, per layer and KV head.
        blocks_per_lane: blocks of the longest sequence.
        kv_host_dtype: of keys and values on the host.
    """

    device: str
    slots_per_lane: int
    blocks_per_lane: int
    kv_host_dtype: str


class Stats:
    """Answers ``GET /stats``."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        info: ServerInfo,
        *,
        chat: bool,
        needs_key: bool,
        placement: Placement | None,
    ) -> None:
        """
        Args:
            engine: asked for its health and its limits.
            metrics: of the same server.
            info: the model's name and mode.
            chat: the model has a chat template.
            needs_key: the paths that generate want an API key.
            placement: None where there is no device.
        """
        self._engine, self._metrics = engine, metrics
        self._fixed: dict[str, Any] = {
            "model": info.model,
            "mode": info.mode,
            "version": sparda_jax.__version__,
            "max_model_len": engine.max_model_len,
            "chat": chat,
            "needs_key": needs_key,
            "started": info.created,
        } | (dataclasses.asdict(placement) if placement else dict.fromkeys(_PLACEMENT))

    async def read(self) -> dict[str, Any]:
        """``time``, in seconds of some clock; ``server``, what it is and how it is; ``metrics``, under their names."""
        health, stats = await self._engine.health(), self._engine.stats()
        server = self._fixed | {
            "status": health.status,
            "detail": health.detail,
            "lanes": stats.max_active,
            "max_queue": stats.max_queue,
            "uptime_seconds": round(time.time()) - self._fixed["started"],
        }
        return {"time": time.monotonic(), "server": server, "metrics": self._metrics.numbers()}


_PLACEMENT = [field.name for field in dataclasses.fields(Placement)]

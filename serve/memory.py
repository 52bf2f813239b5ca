"""How many sequences fit: sizes of the KV cache against the memory that is free."""

import dataclasses
import re
from pathlib import Path

import jax

from sparda_jax.generate import Runner
from sparda_jax.serve.settings import SettingsError

DEFAULT_MAX_ACTIVE = 4
# Left to the allocator, to activations and to the rest of the process.
SPARE_FRACTION = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes, and the number of sequences that they allow.

    Attributes:
        bytes_per_token: keys, values and compressed keys of all layers.
        bytes_per_sequence: a cache at the context limit.
        workspace_bytes: scores of the largest prefill chunk, and a cache's older half while it grows.
        free_bytes: what was free after the weights were loaded; None where the device does not tell.
        max_active: sequences that hold a cache at the same time.
    """

    bytes_per_token: int
    bytes_per_sequence: int
    workspace_bytes: int
    free_bytes: int | None
    max_active: int

    @classmethod
    def of(cls, runner: Runner, wanted: int | None, free_bytes: int | None) -> "MemoryPlan":
        """Plans for ``wanted`` sequences; None: as many as fit, 4 at most.

        Raises:
            SettingsError: what is wanted does not fit, or not even one sequence does.
        """
        config = runner.config
        capacity = runner.capacity_for(runner.max_model_len)
        item = runner.dtype.itemsize
        rows = config.num_layers * config.num_kv_heads * config.head_dim * item
        per_token = 2 * rows + rows // config.sparse.kernel_stride
        per_sequence = per_token * capacity
        chunk = runner.chunk_for(1, runner.prefill_chunks[-1], capacity)
        workspace = 4 * config.num_heads * capacity * chunk + per_sequence // 2
        fits = DEFAULT_MAX_ACTIVE
        if free_bytes is not None:
            fits = max(0, int(free_bytes * (1 - SPARE_FRACTION)) - workspace) // per_sequence
        if fits < (wanted or 1):
            way_out = f"--max-active {fits} or " if fits else ""
            raise SettingsError(
                f"{wanted or 1} sequence(s) of {runner.max_model_len} tokens need "
                f"{gib((wanted or 1) * per_sequence + workspace)} of KV cache and scores, but only "
                f"{gib(free_bytes or 0)} of memory are free beside the weights; use {way_out}a smaller --max-model-len"
            )
        return cls(
            bytes_per_token=per_token,
            bytes_per_sequence=per_sequence,
            workspace_bytes=workspace,
            free_bytes=free_bytes,
            max_active=wanted or min(fits, DEFAULT_MAX_ACTIVE),
        )


def free_memory(device: jax.Device) -> int | None:  # pyright: ignore[reportInvalidTypeForm]
    """Free bytes of a device: of a GPU's allocator, or of this host (within its container) for a CPU."""
    if device.platform == "cpu":
        return _free_host_memory()
    stats = device.memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats and "bytes_limit" in stats else None


def _free_host_memory() -> int | None:
    meminfo = Path("/proc/meminfo")
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE) if meminfo.is_file() else None
    amounts = [int(match[1]) * 1024] if match else []
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdigit():
        amounts.append(int(text) - int(used.read_text()))
    return min(amounts) if amounts else None


def gib(count: int) -> str:
    """A number of bytes for people."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"

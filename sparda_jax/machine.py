"""What this machine has: memory of the device, and of the host within every limit that a process there meets."""

import dataclasses
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import jax

from sparda_jax.cache.pinning import DEFAULT_PINNED_LIMIT, GIB, PINNED_LIMIT_VARIABLE
from sparda_jax.config import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """So many bytes of memory, and who says so."""

    bytes: int
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a plan has to fit into.

    Attributes:
        device: memory that JAX may use on the device; None where that is not known.
        host: every bound on host memory; the smallest one counts. Empty where nothing is known.
        pinned: how much host memory JAX may pin, in bytes.
    """

    device: Bound | None
    host: tuple[Bound, ...]
    pinned: int = DEFAULT_PINNED_LIMIT

    @property
    def host_bound(self) -> Bound | None:
        """The bound on host memory that counts."""
        return min(self.host, key=lambda bound: bound.bytes, default=None)


def read_limits(device_bytes: int | None = None, host_bytes: int | None = None) -> Limits:
    """The limits of this process; amounts that are given take the place of what would be read.

    Nothing is allocated. Where no device memory is given JAX starts up, which fixes what it may pin.

    Raises:
        ConfigError: the variable that says how much JAX may pin is no number.
    """
    device = Bound(bytes=device_bytes, source="--device-gib") if device_bytes is not None else device_bound()
    host = (Bound(bytes=host_bytes, source="--host-gib"),) if host_bytes is not None else tuple(host_bounds())
    return Limits(device=device, host=host, pinned=pinned_limit())


def device_bound() -> Bound | None:
    """What JAX may use of the first accelerator; None where it sees none."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if not stats or "bytes_limit" not in stats:
        return None
    source = f"JAX's share of the {device.device_kind}, as XLA_CLIENT_MEM_FRACTION sets it"
    return Bound(bytes=stats["bytes_limit"], source=source)


def pinned_limit() -> int:
    """How much host memory JAX may pin, in bytes.

    Raises:
        ConfigError: the variable that says so is no number.
    """
    given = os.environ.get(PINNED_LIMIT_VARIABLE)
    if given is None:
        return DEFAULT_PINNED_LIMIT
    if not given.isdecimal():
        raise ConfigError(f"{PINNED_LIMIT_VARIABLE}={given!r} is not allowed: it must be a whole number of GiB")
    return int(given) * GIB


def locked_memory_limit() -> int | None:
    """RLIMIT_MEMLOCK in bytes; None: unlimited.

    It bounds mlock. The CUDA driver pins pages in the kernel without asking for it, so it is no bound on a pool.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def host_bounds(root: Path = Path("/")) -> Iterator[Bound]:
    """Memory that is available on this host, and what each limit of a control group leaves.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    meminfo = root / "proc/meminfo"
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE) if meminfo.is_file() else None
    if match:
        yield Bound(bytes=int(match[1]) * 1024, source="MemAvailable of this host")
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield from _group_bounds(root / "sys/fs/cgroup", group, _V2)
        elif "memory" in controllers.split(","):
            yield from _group_bounds(root / "sys/fs/cgroup/memory", group, _V1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _GroupFiles:
    """Names in a control group's folder; what lies under ``reclaimable`` in memory.stat goes when memory is needed."""

    limit: str
    usage: str
    reclaimable: str


_V1 = _GroupFiles(limit="memory.limit_in_bytes", usage="memory.usage_in_bytes", reclaimable="total_inactive_file")
_V2 = _GroupFiles(limit="memory.max", usage="memory.current", reclaimable="inactive_file")
# Version 1 writes the largest number of whole pages for "unlimited".
_UNLIMITED = 1 << 60


def _group_bounds(mount: Path, group: str, files: _GroupFiles) -> Iterator[Bound]:
    """The group's own limit and those of the groups around it: a process meets the tightest."""
    # In a container the group may be named as the host sees it, while only the container's own part is mounted.
    parts = [part for part in group.split("/") if part not in ("", "..")]
    for count in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:count])
        limit, usage, stat = folder / files.limit, folder / files.usage, folder / "memory.stat"
        if not (limit.is_file() and usage.is_file()):
            continue
        text = limit.read_text().strip()
        if not text.isdecimal() or int(text) >= _UNLIMITED:
            continue
        cached = re.search(rf"^{files.reclaimable} (\d+)$", stat.read_text(), re.MULTILINE) if stat.is_file() else None
        used = int(usage.read_text()) - (int(cached[1]) if cached else 0)
        name = "/".join(parts[:count]) or "/"
        yield Bound(bytes=max(0, int(text) - used), source=f"memory limit of the control group {name}")

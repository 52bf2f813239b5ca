"""What is read of a machine: from files as the kernel writes them, from JAX, from the environment."""

import resource
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from sparda_jax.cache.pinning import GIB, PINNED_LIMIT_VARIABLE
from sparda_jax.config import ConfigError
from sparda_jax.machine import Bound, Limits, device_bound, host_bounds, locked_memory_limit, pinned_limit, read_limits

MEMINFO = "MemTotal:       24683656 kB\nMemFree:         1730148 kB\nMemAvailable:   23553592 kB\n"
AVAILABLE = Bound(bytes=23553592 * 1024, source="MemAvailable of this host")


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    contents = {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup}
    contents |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in contents.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_version_2_counts_what_is_left_of_every_level(tmp_path: Path) -> None:
    files = {
        "a/b/memory.max": f"{8 * GIB}\n",
        "a/b/memory.current": f"{3 * GIB}\n",
        "a/b/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 7\n",
        "a/memory.max": f"{6 * GIB}\n",
        "a/memory.current": f"{5 * GIB}\n",
        "memory.max": "max\n",
        "memory.current": "0\n",
    }
    bounds = list(host_bounds(machine(tmp_path, "0::/a/b\n", files)))
    assert bounds == [
        AVAILABLE,
        Bound(bytes=6 * GIB, source="memory limit of the control group a/b"),
        Bound(bytes=1 * GIB, source="memory limit of the control group a"),
    ]
    assert Limits(device=None, host=tuple(bounds)).host_bound == bounds[2]


def test_version_1_is_found_among_other_controllers(tmp_path: Path) -> None:
    files = {
        "memory/g/memory.limit_in_bytes": f"{4 * GIB}\n",
        "memory/g/memory.usage_in_bytes": f"{2 * GIB}\n",
        "memory/g/memory.stat": f"inactive_file 9\ntotal_inactive_file {GIB}\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": f"{2 * GIB}\n",
    }
    bounds = list(host_bounds(machine(tmp_path, "9:name=systemd:/\n4:cpu,memory:/g\n0::/\n", files)))
    assert bounds == [AVAILABLE, Bound(bytes=3 * GIB, source="memory limit of the control group g")]


def test_a_container_whose_group_is_named_as_the_host_sees_it(tmp_path: Path) -> None:
    files = {"memory.max": f"{GIB}\n", "memory.current": f"{2 * GIB}\n"}
    for group in ("/docker/1234", "/../../other"):
        bounds = list(host_bounds(machine(tmp_path, f"0::{group}\n", files)))
        assert bounds == [AVAILABLE, Bound(bytes=0, source="memory limit of the control group /")]


def test_a_host_that_says_nothing(tmp_path: Path) -> None:
    assert list(host_bounds(tmp_path)) == []
    assert Limits(device=None, host=()).host_bound is None


def test_this_host_has_memory() -> None:
    found = read_limits()
    assert found.device is None, "the tests run on a CPU"
    assert found.host_bound is not None
    assert 0 < found.host_bound.bytes < 1 << 50


def test_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, limit in ((8192, 8192), (resource.RLIM_INFINITY, None)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, resource.RLIM_INFINITY))
        assert locked_memory_limit() == limit


def test_what_is_given_takes_the_place_of_what_is_read() -> None:
    found = read_limits(device_bytes=7, host_bytes=9)
    assert (found.device, found.host) == (Bound(bytes=7, source="--device-gib"), (Bound(bytes=9, source="--host-gib"),))


def test_an_accelerators_limit_is_jax_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"bytes_limit": 5 * GIB, "bytes_in_use": GIB}
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    found = device_bound()
    assert found is not None
    assert found.bytes == 5 * GIB
    assert found.source.startswith("JAX's share of the NVIDIA H200")


def test_how_much_jax_may_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PINNED_LIMIT_VARIABLE, raising=False)
    assert pinned_limit() == 64 * GIB
    monkeypatch.setenv(PINNED_LIMIT_VARIABLE, "110")
    assert pinned_limit() == 110 * GIB
    monkeypatch.setenv(PINNED_LIMIT_VARIABLE, "all")
    with pytest.raises(ConfigError, match=f"{PINNED_LIMIT_VARIABLE}='all' is not allowed"):
        pinned_limit()

"""How much JAX pins: against a replay of its allocator, array by array; on a GPU, against the allocator itself."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest

from sparda_jax.cache.pinning import GIB, PINNED_LIMIT_VARIABLE, STAGING, pinned_bytes, pinned_limit_for


@dataclasses.dataclass
class Replay:
    """XLA's BFCAllocator as far as arrays of one size go: the rule of Extend, and first fit within the regions."""

    limit: int
    regions: list[int] = dataclasses.field(default_factory=list)
    next_region: int = 2 << 20

    def allocate(self, size: int) -> bool:
        for index, left in enumerate(self.regions):
            if left >= size:
                self.regions[index] -= size
                return True
        available = self.limit - self.pinned
        if size > available:
            return False
        increased = False
        while size > self.next_region:
            self.next_region *= 2
            increased = True
        region = min(self.next_region, available)
        if not increased:
            self.next_region *= 2
        self.pinned += region
        self.regions.append(region - size)
        return True

    pinned: int = 0


SIZES = [
    3 * GIB,
    4 * GIB,
    4 * GIB + 512,
    1 << 22,
    5 << 20,
    *(np.random.default_rng(3).integers(1 << 13, 1 << 24, 12) << 9),
]


@pytest.mark.parametrize("size", [int(size) for size in SIZES])
@pytest.mark.parametrize("count", [1, 2, 6, 32])
def test_as_the_allocator_does(size: int, count: int) -> None:
    for scale in (0.9, 1.0, 1.1, 1.5, 2.5, 9.0):
        limit = int(scale * size * count)
        replay = Replay(limit=limit)
        fit = all(replay.allocate(size) for _ in range(count))
        assert pinned_bytes(size, count, limit + STAGING) == (replay.pinned + STAGING if fit else None)


@pytest.mark.parametrize("size", [int(size) for size in SIZES])
@pytest.mark.parametrize("count", [1, 6, 32])
def test_the_limit_is_the_smallest(size: int, count: int) -> None:
    limit = pinned_limit_for(size, count)
    pinned = pinned_bytes(size, count, limit * GIB)
    assert pinned is not None
    assert size * count + STAGING <= pinned <= limit * GIB
    assert pinned_bytes(size, count, (limit - 1) * GIB) is None


def test_by_hand() -> None:
    """32 arrays of 3 GiB: regions of 4, 4, 8, 16 and 32 GiB hold 1, 1, 2, 5 and 10; the other 13 take 39 GiB."""
    assert pinned_limit_for(3 * GIB, 32) == 64 + 39 + 2
    assert pinned_bytes(3 * GIB, 32, 128 * GIB) == 128 * GIB
    # Powers of two leave nothing over.
    assert pinned_limit_for(2 * GIB, 32) == 64 + 2


PROGRAM = """
import resource
import jax, jax.numpy as jnp
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
make = jax.jit(lambda: jnp.zeros(3 << 28, jnp.uint8), out_shardings=host)
arrays = []
try:
    for _ in range(4):
        arrays.append(jax.block_until_ready(make()))
except jax.errors.JaxRuntimeError as error:
    assert "RESOURCE_EXHAUSTED" in str(error), error
print("arrays", len(arrays))
"""


@pytest.mark.gpu
@pytest.mark.parametrize(("limit", "count"), [(3, 3), (4, 4)])
def test_the_gpu_pins_by_regions_and_without_asking_for_locked_memory(limit: int, count: int) -> None:
    """Arrays of 3/4 GiB, 4 at most: regions of 1, 1 and 1 GiB hold 3 of them, 1, 1 and 2 GiB hold 4."""
    env = {**os.environ, PINNED_LIMIT_VARIABLE: str(limit), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["arrays", str(count)]

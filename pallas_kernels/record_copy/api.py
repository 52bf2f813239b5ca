"""The two directions of the record copy, and the choice between the backends."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from sparda_jax.pallas_kernels.backend import Backend, choose_backend
from sparda_jax.pallas_kernels.operands import INT32, check_operands
from sparda_jax.pallas_kernels.record_copy import mosaic_gpu, triton
from sparda_jax.pallas_kernels.record_copy.codes import code_of
from sparda_jax.pallas_kernels.record_copy.memory_space import device_as_host, host_as_device
from sparda_jax.pallas_kernels.record_copy.packing import packed_rows
from sparda_jax.pallas_kernels.record_copy.plan import plan_width, unpack_plan
from sparda_jax.pallas_kernels.record_copy.reference import copy_in_turn
from sparda_jax.pallas_kernels.record_copy.settings import CopySettings

_RECORD, _SLOT = 0, 1
_KERNELS = {Backend.TRITON: triton, Backend.MOSAIC_GPU: mosaic_gpu}
_CTAS = {Backend.TRITON: "programs", Backend.MOSAIC_GPU: "ctas"}
"""What a kernel calls its number of thread blocks."""


def copy_backend(
    source: Shaped[Array, "from_records from_rows head_dim"],
    destination: Shaped[Array, "to_records to_rows head_dim"],
    backend: str | None = None,
) -> Backend:
    """The backend that copies such records here; ``backend`` and errors as in `fetch_records`."""
    kernels = [name for name, module in _KERNELS.items() if module.takes(source, destination)]
    return choose_backend(backend, "record_copy", available=[Backend.REFERENCE, *kernels])


def fetch_records(
    plan: Int[Array, "plan"],
    pool: Shaped[Array, "records pool_rows head_dim"],
    slots: Shaped[Array, "slots rows head_dim"],
    *,
    segments: int,
    backend: str | None = None,
    settings: CopySettings | None = None,
) -> Shaped[Array, "slots rows head_dim"]:
    """``slots[slot] = pool[record]`` for the (record, slot) pairs of a plan: what a decode step is missing.

    The loops are bounded by the counts in the plan, on the device; pairs beyond a count are never followed. No slot may
    occur twice among the counted pairs. ``slots`` is updated in place when it is donated or temporary.

    Args:
        plan: int32, see `pack_plan`; what `plan_residency` returns.
        pool: the records of one layer, in ``pinned_host`` memory (device memory works too). One record is the K rows of
            a block and one KV head, then its V rows; or that packed (`pack_records`), which its dtype tells.
        slots: the slots of one layer in device memory; packed records are unpacked to their dtype on arrival.
        segments: how many segments the plan has: lanes * KV heads.
        backend: a name of `Backend`; None takes the best one for the device.
        settings: of the kernel; None: its own. No setting changes what is copied.

    Raises:
        ValueError: the plan's size, the record shapes or the dtypes don't fit each other, or the backend is unknown or
            does not take records of this shape.
    """
    direction = (_RECORD, _SLOT)
    return _copy(plan, pool, slots, segments=segments, direction=direction, backend=backend, settings=settings)[0]


def fetch_records_queued(
    plan: Int[Array, "plan"],
    pool: Shaped[Array, "records pool_rows head_dim"],
    slots: Shaped[Array, "slots rows head_dim"],
    queue: Int[Array, "4"],
    *,
    segments: int,
    backend: str | None = None,
    settings: CopySettings | None = None,
) -> tuple[Shaped[Array, "slots rows head_dim"], Int[Array, "4"]]:
    """`fetch_records` that begins when the fetch before it has ended, even if its plan is there earlier.

    Two fetches that share a link both end late, and the first one is wanted first.

    Args:
        queue: what the fetch before it returned, or for the first one any int32; its content means nothing. The other
            arguments and the errors are those of `fetch_records`.

    Returns:
        The slots, and the ``queue`` of the next fetch.
    """
    check_operands(INT32, sizes={}, queue=(queue, "4"))
    direction = (_RECORD, _SLOT)
    return _copy(plan, pool, slots, queue, segments=segments, direction=direction, backend=backend, settings=settings)


def write_back_records(
    plan: Int[Array, "plan"],
    slots: Shaped[Array, "slots rows head_dim"],
    pool: Shaped[Array, "records pool_rows head_dim"],
    *,
    segments: int,
    backend: str | None = None,
) -> Shaped[Array, "records pool_rows head_dim"]:
    """``pool[record] = slots[slot]`` for the (record, slot) pairs of a plan: finished blocks on their way to the host.

    A pool of packed records gets them packed: each row by itself, so that one with NaN or infinity in it, which arrives
    as NaN, changes no other.

    The result lies in the pool's memory, and in place if ``pool`` is donated. It has to be a program of its own: one
    that also reads the pool would copy it whole. No record may occur twice among the counted pairs. Arguments and
    errors are those of `fetch_records`.
    """
    return _copy(plan, slots, pool, segments=segments, direction=(_SLOT, _RECORD), backend=backend)[0]


def _copy(
    plan: Array,
    source: Array,
    destination: Array,
    queue: Array | None = None,
    *,
    segments: int,
    direction: tuple[int, int],
    backend: str | None,
    settings: CopySettings | None = None,
) -> tuple[Array, Any]:
    check_operands(INT32, sizes={}, plan=(plan, "plan"))
    plan_width(plan.shape[0], segments)
    ends = (source, destination)
    if not _alike(*(ends if direction == (_RECORD, _SLOT) else ends[::-1])):
        raise ValueError(
            f"pool and slots must hold equal records, or the pool packed ones: from {source.dtype}"
            f"{list(source.shape[1:])} to {destination.dtype}{list(destination.shape[1:])}."
        )
    chosen, settings = copy_backend(source, destination, backend), settings or CopySettings()
    statics = {"segments": segments, "direction": direction, "backend": chosen, "settings": settings}
    return _jitted(plan, source, destination, queue, **statics)


def _alike(pool: Array, slots: Array) -> bool:
    if pool.dtype == slots.dtype:
        return pool.shape[1:] == slots.shape[1:]
    rows, head_dim = slots.shape[1:]
    packed = code_of(pool.dtype) is not None and jnp.issubdtype(slots.dtype, jnp.floating)
    return packed and rows % 4 == 0 and pool.shape[1:] == (packed_rows(rows, head_dim), head_dim)


# One jit object for all layers, so that they share one lowering of the kernel.
@functools.partial(jax.jit, static_argnames=("segments", "direction", "backend", "settings"))
def _jitted(
    plan: Array,
    source: Array,
    destination: Array,
    queue: Array | None,
    *,
    segments: int,
    direction: tuple[int, int],
    backend: Backend,
    settings: CopySettings,
) -> tuple[Array, Array | None]:
    if backend == Backend.REFERENCE:
        counts, pairs = unpack_plan(plan, segments)
        return copy_in_turn(counts, pairs[..., direction[0]], pairs[..., direction[1]], source, destination), queue
    chosen = {} if settings.ctas is None else {_CTAS[backend]: settings.ctas}
    copied, queue = _KERNELS[backend].copy_records(
        plan,
        host_as_device(source),
        host_as_device(destination),
        queue,
        segments=segments,
        direction=direction,
        **chosen,
    )
    on_host = jax.typeof(destination).memory_space == jax.memory.Space.Host
    return (device_as_host(copied) if on_host else copied), queue

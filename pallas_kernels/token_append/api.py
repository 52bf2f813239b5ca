"""The token append, whole and in its two parts, and the choice between the backends."""

import functools

import jax
from jaxtyping import Array, Float, Int

from sparda_jax.pallas_kernels.backend import Backend, choose_backend
from sparda_jax.pallas_kernels.operands import FLOATS, INT32, check_operands
from sparda_jax.pallas_kernels.token_append import reference, triton


def append_token(
    slots: Float[Array, "slots rows head_dim"],
    pages: Float[Array, "num_blocks kv_heads windows_per_block head_dim"],
    k: Float[Array, "batch kv_heads head_dim"],
    v: Float[Array, "batch kv_heads head_dim"],
    slot_of_block: Int[Array, "batch kv_heads blocks"],
    block_table: Int[Array, "batch blocks"],
    position: Int[Array, "batch"],
    *,
    kernel_size: int,
    kernel_stride: int,
    after: Array | None = None,
    backend: str | None = None,
) -> tuple[
    Float[Array, "slots rows head_dim"],
    Float[Array, "num_blocks kv_heads windows_per_block head_dim"],
]:
    """`finish_window`, then `write_token`, as one kernel where there is one.

    Args:
        slots: one layer's records; updated in place where they are donated or temporary.
        pages: its compressed keys; likewise.
        k, v: the new token of each lane.
        slot_of_block: the slot of each logical block, or -1.
        block_table: the physical block, and so the page, of each logical block.
        position: of the new token; -1 in an idle lane.
        kernel_size, kernel_stride: of the windows, in tokens; a window spans two blocks at most.
        after: any array: the kernel starts when it is there, and never reads it. It orders two kernels in a CUDA graph
            that have nothing else in common.
        backend: a name of `Backend`; None takes the best one for the device.

    Returns:
        The slots and the pages.

    Raises:
        ValueError: the shapes or dtypes don't fit each other; the backend is unknown, or does not take them: Triton
            wants ``head_dim`` and ``kernel_size`` to be powers of two.
    """
    sizes: dict[str, tuple[int, str]] = {}
    _check_rows(sizes, slots, k, v)
    _check_pages(sizes, slots, pages, block_table, kernel_size)
    _check_places(sizes, slot_of_block, position)
    chosen = _choose(backend, k, kernel_size)
    return _append(
        slots,
        pages,
        k,
        v,
        slot_of_block,
        block_table,
        position,
        after,
        kernel_size=kernel_size,
        kernel_stride=kernel_stride,
        backend=chosen,
    )


def finish_window(
    pages: Float[Array, "num_blocks kv_heads windows_per_block head_dim"],
    slots: Float[Array, "slots rows head_dim"],
    k: Float[Array, "batch kv_heads head_dim"],
    slot_of_block: Int[Array, "batch kv_heads blocks"],
    block_table: Int[Array, "batch blocks"],
    position: Int[Array, "batch"],
    *,
    kernel_size: int,
    kernel_stride: int,
    backend: str | None = None,
) -> Float[Array, "num_blocks kv_heads windows_per_block head_dim"]:
    """Writes the compressed key that a new token completes, in the lanes where it completes one.

    The mean of the window's K rows, accumulated in float32: the last one is the new token's, the others lie in the
    slots of the tail and of the block before it, which must be in slots. Window j is entry ``(j + 1) % 4`` of page
    ``(j + 1) // 4`` (docs/semantics.md section 3). Arguments and errors are those of `append_token`.
    """
    sizes: dict[str, tuple[int, str]] = {}
    _check_rows(sizes, slots, k, k)
    _check_pages(sizes, slots, pages, block_table, kernel_size)
    _check_places(sizes, slot_of_block, position)
    chosen = _choose(backend, k, kernel_size)
    window = {"kernel_size": kernel_size, "kernel_stride": kernel_stride}
    return _finish(pages, slots, k, slot_of_block, block_table, position, **window, backend=chosen)


def write_token(
    slots: Float[Array, "slots rows head_dim"],
    k: Float[Array, "batch kv_heads head_dim"],
    v: Float[Array, "batch kv_heads head_dim"],
    slot_of_block: Int[Array, "batch kv_heads blocks"],
    position: Int[Array, "batch"],
    *,
    backend: str | None = None,
) -> Float[Array, "slots rows head_dim"]:
    """Writes the new token's rows into its lane's tail slot; an idle lane, or one whose tail has none, writes nothing.

    Arguments and errors are those of `append_token`.
    """
    sizes: dict[str, tuple[int, str]] = {}
    _check_rows(sizes, slots, k, v)
    _check_places(sizes, slot_of_block, position)
    return _write(slots, k, v, slot_of_block, position, backend=_choose(backend, k, 1))


def _choose(backend: str | None, k: Array, kernel_size: int) -> Backend:
    kernels = [Backend.TRITON] if triton.takes(k, kernel_size) else []
    return choose_backend(backend, "token_append", available=[Backend.REFERENCE, *kernels])


def _check_rows(sizes: dict[str, tuple[int, str]], slots: Array, k: Array, v: Array) -> None:
    row = "batch kv_heads head_dim"
    check_operands(FLOATS, sizes=sizes, k=(k, row), v=(v, row), slots=(slots, "slots rows head_dim"))
    if slots.shape[1] % 2:
        raise ValueError(f"slots{list(slots.shape)} are no records: they must have as many V rows as K rows.")
    if not slots.dtype == k.dtype == v.dtype:
        raise ValueError(f"slots are {slots.dtype}, k is {k.dtype} and v {v.dtype}: they must have the same dtype.")


def _check_pages(
    sizes: dict[str, tuple[int, str]], slots: Array, pages: Array, block_table: Array, kernel_size: int
) -> None:
    check_operands(FLOATS, sizes=sizes, pages=(pages, "num_blocks kv_heads windows_per_block head_dim"))
    check_operands(INT32, sizes=sizes, block_table=(block_table, "batch blocks"))
    if pages.dtype != slots.dtype:
        raise ValueError(f"pages are {pages.dtype} and slots {slots.dtype}: they must have the same dtype.")
    if kernel_size > slots.shape[1] // 2:
        raise ValueError(f"kernel_size={kernel_size} must be at most a block's {slots.shape[1] // 2} tokens.")


def _check_places(sizes: dict[str, tuple[int, str]], slot_of_block: Array, position: Array) -> None:
    check_operands(
        INT32, sizes=sizes, slot_of_block=(slot_of_block, "batch kv_heads blocks"), position=(position, "batch")
    )


# One jit object for all layers, so that they share one lowering of the kernel.
@functools.partial(jax.jit, static_argnames=("kernel_size", "kernel_stride", "backend"))
def _append(
    slots: Array,
    pages: Array,
    k: Array,
    v: Array,
    slot_of_block: Array,
    block_table: Array,
    position: Array,
    after: Array | None,
    *,
    kernel_size: int,
    kernel_stride: int,
    backend: Backend,
) -> tuple[Array, Array]:
    window = {"kernel_size": kernel_size, "kernel_stride": kernel_stride}
    if backend is Backend.TRITON:
        return triton.append_token(slots, pages, k, v, slot_of_block, block_table, position, after, **window)
    pages = reference.finish_window(pages, slots, k, slot_of_block, block_table, position, **window)
    # The window is read from the slots before the token is written to them; else XLA would keep a copy of them.
    k, pages = jax.lax.optimization_barrier((k, pages))
    return reference.write_token(slots, k, v, slot_of_block, position), pages


@functools.partial(jax.jit, static_argnames=("kernel_size", "kernel_stride", "backend"))
def _finish(
    pages: Array,
    slots: Array,
    k: Array,
    slot_of_block: Array,
    block_table: Array,
    position: Array,
    *,
    kernel_size: int,
    kernel_stride: int,
    backend: Backend,
) -> Array:
    run = triton.finish_window if backend is Backend.TRITON else reference.finish_window
    return run(
        pages,
        slots,
        k,
        slot_of_block,
        block_table,
        position,
        kernel_size=kernel_size,
        kernel_stride=kernel_stride,
    )


@functools.partial(jax.jit, static_argnames="backend")
def _write(slots: Array, k: Array, v: Array, slot_of_block: Array, position: Array, *, backend: Backend) -> Array:
    run = triton.write_token if backend is Backend.TRITON else reference.write_token
    return run(slots, k, v, slot_of_block, position)

"""The residency plan, and the choice between the backends."""

import functools

import jax
from jaxtyping import Array, Int

from sparda_jax.pallas_kernels.backend import Backend, choose_backend
from sparda_jax.pallas_kernels.operands import INT32, check_operands
from sparda_jax.pallas_kernels.residency import mosaic_gpu, reference, triton
from sparda_jax.pallas_kernels.residency.state import Residency

_BACKENDS = {
    Backend.REFERENCE: reference.plan_residency,
    Backend.TRITON: triton.plan_residency,
    Backend.MOSAIC_GPU: mosaic_gpu.plan_residency,
}


def plan_residency(
    state: Residency,
    wanted: Int[Array, "batch kv_heads width"],
    block_table: Int[Array, "batch blocks"],
    query_block: Int[Array, "batch"],
    written: Int[Array, "batch"],
    *,
    backend: str | None = None,
) -> tuple[Residency, Int[Array, "batch kv_heads width"], Int[Array, "plan"]]:
    """Gives every wanted block a slot, and says which records have to be copied into slots for that.

    A wanted block that lies in a slot keeps it, and its CLOCK bit is set. The i-th missing block takes the i-th victim
    that CLOCK finds from the lane's hand on, and gets bit 1; the block that lay there has no slot any more. Empty slots
    go like unreferenced ones; wanted and dirty slots never go. Everything is int32, and the tables are updated in place
    where the state is donated.

    Args:
        state: the tables of one layer.
        wanted: logical blocks, ascending, -1 at the end; none twice. A lane that wants nothing (an idle one) stays as
            it is.
        block_table: the physical block of a lane's logical block; record id = physical block * kv_heads + head.
        query_block: the block of a lane's newest token, its tail; -1 for an idle lane. The tail takes a slot like any
            block, but is never copied: its tokens are written to the slot, and no record has them yet.
        written: how many of a lane's blocks, from the first on, the host pool holds; the slots of the others are dirty.
        backend: a name of `Backend`; None takes the best one for the device.

    Returns:
        The new state; the global slot ids of the wanted blocks in the same order, -1 where wanted is; and the plan of
        the copies (see `sparda_jax.pallas_kernels.record_copy`), whose segment ``lane * kv_heads + head`` lists
        (record, slot) in ascending order of the blocks. If a lane has too few slots that may go, the blocks that found
        none get slot id -1 and no copy, and nothing else happens to them.

    Raises:
        ValueError: the shapes or dtypes don't fit each other; the backend is unknown, or does not take these tables:
            the Mosaic kernel wants the number of blocks, the number of slots and the width to be multiples of 4.
    """
    per_head, per_slot = "batch kv_heads", "kv_heads slots"
    check_operands(
        INT32,
        sizes={},
        wanted=(wanted, f"{per_head} width"),
        block_table=(block_table, "batch blocks"),
        query_block=(query_block, "batch"),
        written=(written, "batch"),
        slot_of_block=(state.slot_of_block, f"{per_head} blocks"),
        block_of_slot=(state.block_of_slot, per_slot),
        referenced=(state.referenced, per_slot),
        hand=(state.hand, per_head),
        base=(state.base, "batch"),
        count=(state.count, "batch"),
    )
    unavailable = set() if mosaic_gpu.takes(state, wanted.shape[2]) else {Backend.MOSAIC_GPU}
    chosen = choose_backend(backend, "residency", available=_BACKENDS.keys() - unavailable)
    return _jitted(state, wanted, block_table, query_block, written, backend=chosen)


# One jit object for all layers, so that they share one lowering of the kernel.
@functools.partial(jax.jit, static_argnames="backend")
def _jitted(
    state: Residency, wanted: Array, block_table: Array, query_block: Array, written: Array, *, backend: Backend
) -> tuple[Residency, Array, Array]:
    return _BACKENDS[backend](state, wanted, block_table, query_block, written)

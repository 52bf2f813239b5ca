"""Dense decode beyond the slots: in every step the whole KV of each layer comes from the host pool, layer by layer.

The copy engine brings a layer's pool array, as one contiguous transfer, into one of two buffers in HBM; the copy of
layer l + 1 runs while layer l computes. Attention reads the buffer through the block table. The newest blocks are newer
in their slots than in the pool, so they are written over their places in the buffer first. Layer 0 has no layer before
it, lies in its slots whole, and is not copied.

The whole array travels, whatever part of it the lanes use: a block index that is known on the device only can't drive
the copy engine, and XLA turns a slice of an array on the host into a kernel that reads it over the bus, which is slower
than the engine. So the pool should be no larger than its lanes need. The planner sizes it so: every lane at its full
length.

Two ties make the copies run so (`tests/h200/test_streaming.py` reads it from the compiled program). The copy of layer
l + 1 waits for the one of layer l, and for layer l's queries: these need all of layer l - 1, the last to read the
buffer that is filled next. And layer l attends with what the barrier returns. XLA has to hide latencies for that
(`STREAM_OPTIONS`), which the fetch of single records does without.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sparda_jax.cache.pool import Pools
from sparda_jax.cache.state import LayerState
from sparda_jax.config import SparseConfig

STREAM_OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": True}
"""Without it XLA:GPU waits for every copy where it starts it."""

NEWEST = 2
"""Blocks of a lane that must lie in slots: the tail, and the one before, which a compressed key and the write-back read
after the tail has begun."""


def min_streaming_slots(sparse: SparseConfig, max_blocks: int) -> int:
    """Slots per lane and KV head that streaming needs: those of `NEWEST`, and of the first blocks, which enter with a
    sequence.
    """
    return min(sparse.init_blocks + NEWEST, max_blocks)


def newest_blocks(query_block: Int[Array, "batch"], kv_heads: int) -> Int[Array, "batch kv_heads newest"]:
    """The blocks that a streamed layer keeps in slots, as a list for `plan_residency`.

    Args:
        query_block: of each lane's newest token; -1 for an idle lane, which keeps none.
        kv_heads: the list is the same for all of them.
    """
    blocks = jnp.maximum(query_block[:, None] - (NEWEST - 1), 0) + jnp.arange(NEWEST)
    blocks = jnp.where(blocks <= query_block[:, None], blocks, -1)
    return jnp.broadcast_to(blocks[:, None], (blocks.shape[0], kv_heads, NEWEST))


class LayerStream:
    """The copies of one step, made while it is traced: layer 1's starts with the step.

    Args:
        pools: the host pool's records, an array a layer.
        block_table: the physical block of each logical block of a lane.
        query_block: of each lane's newest token; -1 for an idle lane.
    """

    def __init__(self, pools: Pools, block_table: Int[Array, "batch blocks"], query_block: Int[Array, "batch"]):
        self._pools, self._block_table, self._query_block = pools, block_table, query_block
        self._arriving = _to_device(pools[1]) if len(pools) > 1 else None

    def take(
        self,
        index: int,
        layer: LayerState,
        newest_slots: Int[Array, "batch kv_heads newest"],
        q: Float[Array, "batch kv_heads group head_dim"],
    ) -> tuple[
        Float[Array, "records rows head_dim"],
        Int[Array, "batch kv_heads blocks"],
        Float[Array, "batch kv_heads group head_dim"],
    ]:
        """Waits for a layer's records and starts the copy of the next layer's; to be called for layers 1, 2, ...

        Args:
            index: of the layer.
            layer: its cache, with the new token in the tail slot.
            newest_slots: the slots of `newest_blocks`.
            q: the layer's queries.

        Returns:
            The records, the list over them for `sparse_attention_decode`, and the queries to attend with.
        """
        records, self._arriving = self._arriving, None
        assert records is not None
        if index + 1 < len(self._pools):
            records, q, pool = jax.lax.optimization_barrier((records, q, self._pools[index + 1]))
            self._arriving = _to_device(pool)
        kv_heads = newest_slots.shape[1]
        ids = self._block_table[:, None] * kv_heads + jnp.arange(kv_heads)[:, None]
        newest = newest_blocks(self._query_block, kv_heads)
        place = jnp.take_along_axis(ids, jnp.maximum(newest, 0), axis=2)
        # An index behind the end: the scatter drops it.
        place = jnp.where(newest_slots >= 0, place, records.shape[0])
        records = records.at[place].set(layer.slots[jnp.maximum(newest_slots, 0)], mode="drop")
        listed = jnp.arange(ids.shape[2]) <= self._query_block[:, None, None]
        return records, jnp.where(listed, ids, -1), q


def _to_device(pool: Float[Array, "records rows head_dim"]) -> Float[Array, "records rows head_dim"]:
    return jax.device_put(pool, jax.memory.Space.Device)

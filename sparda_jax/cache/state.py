"""What decode keeps on the device: slots, pages and tables of every layer, and the lanes' lengths."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from sparda_jax.adjusting import all_allowed
from sparda_jax.cache.host_dtype import KvHostDtype
from sparda_jax.config import ConfigError, ModelConfig
from sparda_jax.pallas_kernels.residency import Residency, empty_residency
from sparda_jax.telemetry import Counts, no_counts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerState:
    """One layer's part of the cache in HBM.

    Attributes:
        slots: records of the blocks that are here at the moment; slot n of head h is row ``n * kv_heads + h``.
        pages: compressed keys of every block in the pool, by physical block.
        residency: which block lies in which slot.
        partial_keys: InfiniGen's skewed channels of every token's key, by physical block and in the dtype of the keys.
            None in other modes and in layer 0. They are the owning sequence's alone: another one with the same prefix
            keeps other channels.
        partial_basis: per lane the columns of InfiniGen's basis that its sequence keeps; None with ``partial_keys``.
    """

    slots: Float[Array, "slots rows head_dim"]
    pages: Float[Array, "num_blocks kv_heads windows_per_block head_dim"]
    residency: Residency
    partial_keys: Float[Array, "num_blocks kv_heads block_size channels"] | None = None
    partial_basis: Float[Array, "batch kv_heads head_dim channels"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """The cache of all decode lanes.

    Attributes:
        layers: one :class:`LayerState` a layer.
        block_table: the physical block of each logical block of a lane.
        lengths: tokens stored per lane.
        live: which lanes decode; the others are left as they are.
        written: how many of a lane's blocks, from the first on, the host pool holds.
        counts: what the steps have attended to and copied.
        seen: which tokens prompt and answer hold (`adjusting.count`), of lanes whose requests have penalties; of the
            others anything.
        allowed: which tokens may come next (`adjusting.all_allowed`), of lanes whose requests have a mask; of the
            others anything.
    """

    layers: tuple[LayerState, ...]
    block_table: Int[Array, "batch blocks"]
    lengths: Int[Array, "batch"]
    live: Bool[Array, "batch"]
    written: Int[Array, "batch"]
    counts: Counts
    seen: Int[Array, "batch vocab"]
    allowed: UInt32[Array, "batch words"]

    @property
    def num_lanes(self) -> int:
        return self.lengths.shape[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheShape:
    """Sizes of the offload cache.

    Attributes:
        lanes: sequences that decode together.
        max_blocks: blocks of the longest sequence.
        num_blocks: blocks of the host pool; each has a record per layer and KV head there, and a page per layer in HBM.
        slots_per_lane: HBM slots of a lane per layer and KV head; layer 0 keeps everything and has ``max_blocks``.
        kv_host_dtype: what the host pool keeps of keys and values.

    Raises:
        ConfigError: there is no lane or no block.
    """

    lanes: int
    max_blocks: int
    num_blocks: int
    slots_per_lane: int
    kv_host_dtype: KvHostDtype = KvHostDtype.AUTO

    def __post_init__(self) -> None:
        for name in ("lanes", "max_blocks", "num_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not allowed: it must be at least 1")

    def slots_of(self, layer: int) -> int:
        """Slots per lane and KV head. Layer 0 has no layer before it that could fetch for it, so it stays resident."""
        return self.max_blocks if layer == 0 else min(self.slots_per_lane, self.max_blocks)


def empty_state(config: ModelConfig, shape: CacheShape, dtype: jnp.dtype, *, partial_channels: int = 0) -> DecodeState:
    """A cache without sequences; every lane owns an equal range of the slots.

    Args:
        config: the model.
        shape: the cache's sizes.
        dtype: of the keys and values.
        partial_channels: of InfiniGen's partial keys, see `Mode.partial_channels`; layer 0 never has them.
    """
    heads, block_size = config.num_kv_heads, config.sparse.block_size

    def layer_state(layer: int) -> LayerState:
        count = shape.slots_of(layer)
        has_partial = partial_channels > 0 and layer > 0
        partial_keys = (shape.num_blocks, heads, block_size, partial_channels)
        partial_basis = (shape.lanes, heads, config.head_dim, partial_channels)
        return LayerState(
            slots=jnp.zeros((shape.lanes * count * heads, 2 * block_size, config.head_dim), dtype),
            pages=jnp.zeros((shape.num_blocks, heads, config.sparse.windows_per_block, config.head_dim), dtype),
            residency=empty_residency(
                base=jnp.asarray(np.arange(shape.lanes) * count),
                count=jnp.full(shape.lanes, count),
                kv_heads=heads,
                max_blocks=shape.max_blocks,
                num_slots=shape.lanes * count,
            ),
            partial_keys=jnp.zeros(partial_keys, dtype) if has_partial else None,
            partial_basis=jnp.zeros(partial_basis, jnp.float32) if has_partial else None,
        )

    return DecodeState(
        layers=tuple(layer_state(layer) for layer in range(config.num_layers)),
        block_table=jnp.zeros((shape.lanes, shape.max_blocks), jnp.int32),
        lengths=jnp.zeros(shape.lanes, jnp.int32),
        live=jnp.zeros(shape.lanes, bool),
        written=jnp.zeros(shape.lanes, jnp.int32),
        counts=no_counts(config.num_layers, shape.lanes),
        seen=jnp.zeros((shape.lanes, config.vocab_size), jnp.int32),
        allowed=jnp.asarray(all_allowed(shape.lanes, config.vocab_size)),
    )

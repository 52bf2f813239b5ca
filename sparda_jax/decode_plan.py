"""The static choices of a decode step: what scores the blocks, when records are fetched, what runs the kernels."""

import dataclasses
import enum

from sparda_jax.cache.host_dtype import KvHostDtype
from sparda_jax.config import ConfigError, ModelConfig
from sparda_jax.pallas_kernels.record_copy import CopySettings
from sparda_jax.selection import Mode
from sparda_jax.streaming import STREAM_OPTIONS, min_streaming_slots

# Edges of the CUDA graph follow from data alone, so that a copy can run beside a layer. CPUs ignore these.
GPU_OPTIONS = {
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    "xla_gpu_enable_latency_hiding_scheduler": False,
}

GRAPHS_IN_PROFILES = "xla_enable_command_buffers_during_profiling"
"""XLA's option (of a compilation, or in ``XLA_FLAGS``) without which a program runs kernel by kernel once profiled."""


class Fetch(enum.StrEnum):
    """When the records that a layer lacks are fetched."""

    AHEAD = "ahead"  # while the layer before computes; needs a mode that looks ahead
    IN_TURN = "in-turn"  # by the layer itself, which waits
    STREAM = "stream"  # whole layers, each while the one before computes; for dense beyond the slots


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backends:
    """Which backend runs each operation; None: the fastest (`choose_backend`). The last one is prefill's."""

    block_selection: str | None = None
    residency: str | None = None
    record_copy: str | None = None
    sparse_attention: str | None = None
    token_append: str | None = None
    between_attentions: str | None = None
    block_sparse_attention: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """The static choices of a decode step.

    Attributes:
        mode: what scores the blocks.
        fetch: when missing records are fetched.
        max_len: longest sequence to be served, for the choice of RoPE factors.
        profiled: the step is one CUDA graph under a profiler, too, and a profile shows the kernels in it.
        backends: of the kernels.
        copies: of the kernel that fetches (`calibrate.calibrate_copies` finds them).
        compares: also select with each layer's own query, and count what of it the step attends to and copies.
    """

    mode: Mode
    fetch: Fetch
    max_len: int | None = None
    compares: bool = False
    profiled: bool = False
    backends: Backends = dataclasses.field(default_factory=Backends)
    copies: CopySettings = dataclasses.field(default_factory=CopySettings)

    def __post_init__(self) -> None:
        if self.fetch is Fetch.AHEAD and not self.mode.looks_ahead:
            able = ", ".join(mode.value for mode in Mode if mode.looks_ahead)
            raise ConfigError(
                f"fetch={self.fetch.value} needs a mode that looks a layer ahead ({able}), and mode={self.mode.value} "
                f"does not: use fetch={Fetch.IN_TURN.value}"
            )
        if self.fetch is Fetch.STREAM and self.mode is not Mode.DENSE:
            raise ConfigError(
                f"fetch={self.fetch.value} brings whole layers, and mode={self.mode.value} attends to selected blocks: "
                f"use fetch={Fetch.IN_TURN.value}, or mode={Mode.DENSE.value}"
            )

    @property
    def compiler_options(self) -> dict[str, str | bool]:
        """XLA's options for the step's program."""
        options = GPU_OPTIONS | (STREAM_OPTIONS if self.fetch is Fetch.STREAM else {})
        return options | ({GRAPHS_IN_PROFILES: True} if self.profiled else {})

    def streams(self, layer: int) -> bool:
        """Whether a layer's records come as a whole; layer 0 lies in its slots."""
        return self.fetch is Fetch.STREAM and layer > 0

    def min_slots(self, config: ModelConfig, max_blocks: int) -> int:
        """Slots per lane and KV head that a layer after the first must have."""
        if self.fetch is Fetch.STREAM:
            return min_streaming_slots(config.sparse, max_blocks)
        return self.list_width(config, max_blocks)

    def list_width(self, config: ModelConfig, max_blocks: int) -> int:
        """Entries of a block list: a selection, a request below ``dense_len``, or in dense mode everything.

        InfiniGen is never dense, so its lists hold a selection and no more.
        """
        if self.mode is Mode.DENSE:
            return max_blocks
        never_dense = self.mode is Mode.INFINIGEN
        return min(config.sparse.num_selected_blocks if never_dense else config.sparse.min_list_width, max_blocks)


def check_streaming(fetch: Fetch | None, kv_host_dtype: KvHostDtype) -> None:
    """Raises a ConfigError if whole layers are streamed out of a pool of packed records."""
    if fetch is Fetch.STREAM and kv_host_dtype is not KvHostDtype.AUTO:
        raise ConfigError(
            f"--kv-host-dtype {kv_host_dtype.value} packs the records on the host, and fetch={fetch.value} attends to "
            f"whole layers as they lie there: use --kv-host-dtype {KvHostDtype.AUTO.value}, or a mode that selects "
            f"blocks (mode={Mode.DENSE.value} streams where slots for every block do not fit)"
        )

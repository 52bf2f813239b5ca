"""Decode lanes of the size that ``python -m sparda_jax.plan`` finds, refused by the same sentences where none fits."""

from sparda_jax.budget import Demand
from sparda_jax.config import ConfigError
from sparda_jax.decode import DecodePlan, Fetch
from sparda_jax.fit import shape_for
from sparda_jax.forward import Skew
from sparda_jax.lanes import DecodeLanes
from sparda_jax.machine import Limits, read_limits
from sparda_jax.model import Decoder
from sparda_jax.selection import Mode


def demand_for(model: Decoder, *, mode: Mode, max_model_len: int, batch: int, host_pool: int | None = None) -> Demand:
    """What it takes to decode with a model: its weights as they are, and lanes.

    Args:
        model: the weights.
        mode: what scores the blocks.
        max_model_len: tokens of the longest sequence, prompt and answer together.
        batch: decode lanes.
        host_pool: bytes of the host pool (``--host-pool-gib``); None: every lane at its full length.

    Raises:
        ConfigError: a number is too small, or the host pool can't hold one sequence.
    """
    return Demand(
        config=model.config,
        dtype=model.embed_tokens.dtype,
        mode=mode,
        has_forecast=model.has_forecast,
        max_model_len=max_model_len,
        batch=batch,
        host_pool=host_pool,
    )


def planned_lanes(
    model: Decoder,
    demand: Demand,
    *,
    fetch: Fetch | None = None,
    slots_per_lane: int | None = None,
    limits: Limits | None = None,
    skew: Skew | None = None,
    sample_every: int | None = None,
) -> DecodeLanes:
    """Makes lanes that fit this machine; checks that before it allocates anything.

    Args:
        model: the weights, on their device.
        demand: of this model, see `demand_for`.
        fetch: when missing records are fetched; None: ahead where the mode can.
        slots_per_lane: HBM slots of a lane per layer and KV head (``--slots``); None: as many as fit.
        limits: what the lanes have to fit into; None: what this process may use of this machine.
        skew: InfiniGen's calibrated basis.
        sample_every: as of `DecodeLanes`.

    Raises:
        ConfigError: it does not fit: a sentence for each memory that is too small, with the bytes and the flags that
            help (`check_fits`); or it streams whole layers; or `DecodeLanes` refuses it.
    """
    if fetch is Fetch.STREAM:  # its two buffers of a whole layer are not in the plan
        raise ConfigError(f"fetch={fetch.value} is not planned: give DecodeLanes a CacheShape, or leave fetch out")
    shape = shape_for(demand, read_limits() if limits is None else limits, slots_per_lane)
    if fetch is None:
        fetch = Fetch.AHEAD if demand.mode.looks_ahead else Fetch.IN_TURN
    plan = DecodePlan(mode=demand.mode, fetch=fetch, max_len=demand.max_model_len)
    return DecodeLanes(model, shape, plan, skew, sample_every=sample_every)

"""Decode lanes of the size that ``python -m sparda_jax.plan`` finds, refused by the same sentences where none fits."""

import dataclasses
import logging

from sparda_jax.budget import Demand
from sparda_jax.cache.blocks import BlockAllocator
from sparda_jax.cache.host_dtype import KvHostDtype, host_record
from sparda_jax.calibrate import NO_CALIBRATION, calibrate_copies
from sparda_jax.decode_plan import Fetch
from sparda_jax.fit import settle_fetch, shape_for
from sparda_jax.forward import Skew
from sparda_jax.lanes import DecodeLanes
from sparda_jax.machine import Limits, read_limits
from sparda_jax.model import Decoder
from sparda_jax.pallas_kernels.record_copy import CopySettings
from sparda_jax.selection import Mode

logger = logging.getLogger(__name__)


def demand_for(
    model: Decoder,
    *,
    mode: Mode,
    max_model_len: int,
    batch: int,
    host_pool: int | None = None,
    fetch: Fetch | None = None,
    kv_host_dtype: KvHostDtype = KvHostDtype.AUTO,
) -> Demand:
    """What it takes to decode with a model: its weights as they are, and lanes.

    Args:
        model: the weights.
        mode: what scores the blocks.
        max_model_len: tokens of the longest sequence, prompt and answer together.
        batch: decode lanes.
        host_pool: bytes of the host pool (``--host-pool-gib``); None: every lane at its full length.
        fetch: when missing records are fetched; None: ahead where the mode can, else in turn; but dense streams whole
            layers where the device can't hold a slot for every block.
        kv_host_dtype: what the host pool keeps of keys and values (``--kv-host-dtype``).

    Raises:
        ConfigError: a number is too small, the host pool can't hold one sequence, or the mode can't fetch so.
    """
    return Demand(
        config=model.config,
        dtype=model.embed_tokens.dtype,
        mode=mode,
        has_forecast=model.has_forecast,
        max_model_len=max_model_len,
        batch=batch,
        host_pool=host_pool,
        fetch=fetch,
        kv_host_dtype=kv_host_dtype,
    )


def planned_lanes(
    model: Decoder,
    demand: Demand,
    *,
    slots_per_lane: int | None = None,
    limits: Limits | None = None,
    copies: CopySettings | None = None,
    skew: Skew | None = None,
    sample_every: int | None = None,
    profiled: bool = False,
    blocks: BlockAllocator | None = None,
) -> DecodeLanes:
    """Makes lanes that fit this machine; checks that before it allocates anything.

    What was chosen goes to the log as one line, and is in the lanes' ``shape`` and ``plan``.

    Args:
        model: the weights, on their device.
        demand: of this model, see `demand_for`.
        slots_per_lane: HBM slots of a lane per layer and KV head (``--slots``); None: as many as fit.
        limits: what the lanes have to fit into; None: what this process may use of this machine.
        copies: settings of the kernel that fetches; None: the fastest, by a short calibration where lanes fetch at all.
        skew: InfiniGen's calibrated basis.
        sample_every, blocks: as of `DecodeLanes`.
        profiled: as of `DecodePlan`.

    Raises:
        ConfigError: it does not fit: a sentence for each memory that is too small, with the bytes and the flags that
            help (`check_fits`); or `DecodeLanes` refuses it.
    """
    limits = read_limits() if limits is None else limits
    demand = settle_fetch(demand, limits, slots_per_lane)
    shape = shape_for(demand, limits, slots_per_lane)
    plan, how = demand.decode_plan, "as given"
    if copies is None:
        config, device = model.config, next(iter(model.embed_tokens.devices()))
        fetches = not demand.streams and shape.slots_per_lane < shape.max_blocks
        record = (2 * config.sparse.block_size, config.head_dim)
        held = host_record(record, demand.dtype, demand.kv_host_dtype)
        found = calibrate_copies(device, record, demand.dtype, held) if fetches else NO_CALIBRATION
        copies, how = found.settings, str(found)
    logger.info(
        "decode lanes: %d, each with slots for %d of %d blocks, mode=%s, fetch=%s, records on the host: %s, CTAs of a "
        "copy: %s (%s)",
        shape.lanes,
        shape.slots_per_lane,
        shape.max_blocks,
        plan.mode.value,
        plan.fetch.value,
        demand.dtype.name if shape.kv_host_dtype is KvHostDtype.AUTO else shape.kv_host_dtype.value,
        copies.ctas or "the kernel's own",
        how,
    )
    plan = dataclasses.replace(plan, copies=copies, profiled=profiled)
    return DecodeLanes(model, shape, plan, skew, sample_every=sample_every, blocks=blocks)

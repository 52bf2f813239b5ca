"""The parts of a layer in prefill, for one chunk that ends at several depths of a sequence."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparda_jax.bench._prefill_cases import FLOPS_PER_SECOND, Overlap, work
from sparda_jax.bench._report import Row
from sparda_jax.cache import LayerCache
from sparda_jax.decode_plan import Backends
from sparda_jax.model import Decoder, rope_tables
from sparda_jax.pallas_kernels.block_selection import Scorer, bits_to_mask, mask_to_bits
from sparda_jax.prefill import Chunk
from sparda_jax.selection import Mode

RUNS, CALLS = 3, 3
DEPTHS = (0.25, 0.5, 1.0)
METHOD = (
    f"parts: one layer, a chunk that ends where `end` says, median of {RUNS} runs of {CALLS} calls launched without "
    "waiting; random operands; attention over selections of the given overlap"
)


def seconds(call: Callable[[], Any]) -> float:
    """Of one call."""
    jax.block_until_ready(call())
    runs = []
    for _ in range(RUNS):
        began = time.perf_counter()
        jax.block_until_ready([call() for _ in range(CALLS)])
        runs.append((time.perf_counter() - began) / CALLS)
    return statistics.median(runs)


def parts(model: Decoder, modes: Sequence[Mode], length: int, chunk: int, overlaps: Sequence[float]) -> Iterator[Row]:
    """Rows in ms: norms, products and MLP; each mode's selection; attention over selections, and over everything."""
    config, one = dataclasses.replace(model.config, num_layers=1), model.layers[1]
    key, dtype = jax.random.key(1), model.embed_tokens.dtype
    heads, head_dim = config.num_kv_heads, config.head_dim

    @functools.partial(jax.jit, static_argnums=1)
    def random(number: int, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(key, number), shape, dtype)

    cache = LayerCache(
        k=random(0, (1, heads, length, head_dim)),
        v=random(1, (1, heads, length, head_dim)),
        compressed_k=random(2, (1, heads, length // config.sparse.kernel_stride, head_dim)),
    )
    x = random(3, (1, chunk, config.hidden_size))
    q = random(4, (1, chunk, config.num_heads, head_dim))
    grouped = q.reshape(1, chunk, heads, -1, head_dim)
    queries = {Mode.SPARDA: (Scorer.FORECAST, grouped[:, :, :, :1]), Mode.SPARSE: (Scorer.INFLLM, grouped)}

    def row(name: str, spent: float, flops: float, **settings: Any) -> Row:
        return Row(
            name=name,
            backend="auto",
            settings={"chunk": chunk} | settings,
            value=1e3 * spent,
            unit="ms",
            floor=1e3 * flops / FLOPS_PER_SECOND,
        )

    @jax.jit
    def products(x: jax.Array, q: jax.Array) -> jax.Array:
        cos, sin = rope_tables(config, jnp.arange(chunk)[None], None)
        projected = one.project(x, cos, sin)
        # The heads' queries stand for what they attended to, and nothing of the rest may be dropped.
        rest = [y.astype(jnp.float32).sum() for y in (projected.k, projected.v, projected.q_future) if y is not None]
        return one.finish(x, q + projected.q) + jnp.sum(jnp.stack(rest)).astype(x.dtype)

    needs = Mode.SPARDA if model.has_forecast else Mode.SPARSE
    yield row("products and MLP", seconds(lambda: products(x, q)), work(config, needs, 0, chunk).products)

    def at(start: jax.Array) -> Chunk:
        return Chunk(
            start=start,
            num_new=jnp.full(1, chunk, jnp.int32),
            sparse=jnp.ones(1, bool),
            config=config.sparse,
            backends=Backends(),
        )

    select = {
        mode: jax.jit(lambda start, queries, cache, scorer=scorer: at(start).select(scorer, queries, cache))
        for mode, (scorer, _) in queries.items()
    }
    attend = jax.jit(lambda start, q, cache, bits: at(start).attend(q, cache, bits))
    for end in (max(chunk, round(depth * length)) for depth in DEPTHS):
        start = jnp.full(1, end - chunk, jnp.int32)
        for mode in modes:
            if mode not in queries:
                continue
            spent = seconds(lambda mode=mode, start=start: select[mode](start, queries[mode][1], cache))
            yield row(f"selection, {mode.value}", spent, work(config, mode, end - chunk, end).selection, end=end)
        positions = start[:, None] + jnp.arange(chunk)
        blocks = length // config.sparse.block_size
        every = jnp.broadcast_to(jnp.arange(blocks) >= 0, (1, heads, chunk, blocks))
        kinds: dict[str, tuple[Mode, jax.Array]] = {}
        if any(mode is not Mode.DENSE for mode in modes):
            for percent in overlaps:
                bits = jax.jit(Overlap(config=config, percent=percent))(positions, mask_to_bits(every))
                kinds[f"{percent:g} %"] = Mode.SPARSE, bits
        if Mode.DENSE in modes:
            kinds["all"] = Mode.DENSE, mask_to_bits(every)
        for overlap, (mode, bits) in kinds.items():
            flops = work(config, mode, end - chunk, end).attention
            spent = seconds(lambda start=start, bits=bits: attend(start, q, cache, bits))
            yield row("attention", spent, flops, end=end, overlap=overlap, union=round(union(bits, end, config), 1))


def union(bits: jax.Array, end: int, config: Any, tokens: int = 12) -> float:
    """Blocks that some of ``tokens`` neighbours selected, on average: what a CTA of the Hopper kernel reads."""
    blocks = -(-end // config.sparse.block_size)
    mask = np.asarray(bits_to_mask(bits[0, :, : bits.shape[2] // tokens * tokens], blocks))
    return float(mask.reshape(mask.shape[0], -1, tokens, blocks).any(axis=2).sum(axis=-1).mean())

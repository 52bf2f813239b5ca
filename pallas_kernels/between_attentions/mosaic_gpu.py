"""A layer from its attention's output to the next layer's projections, as one kernel for Hopper.

At small batches these four products do nothing but stream weights, and each kernel that ends lets HBM run dry: the next
one waits for it, starts, and fills its pipeline again. Here the CTAs stay. Each streams tiles of weights through a ring
in shared memory, and since no weight depends on what is computed, the ring goes on filling with the next product's
tiles while the CTAs wait for each other's results.

A product whose columns are too few for all CTAs is split over its inner dimension; after it some CTAs add the parts up,
in order, and do what follows: the residual, the squares for the next norm, RoPE. So no sum depends on who is first.

What one CTA writes and others read lies in HBM (in fact in L2), feature by feature: ``[features, rows]``, as wgmma
leaves it, whose operands are swapped so that the rows of a small batch fill its narrow side: ``Y^T = W^T X^T``.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sparda_jax.pallas_kernels.between_attentions.mosaic_sizes import CTAS, HALF, MOST_ROWS, TILE, Plan, Product
from sparda_jax.pallas_kernels.between_attentions.mosaic_stream import WGMMA, Copied, Loaded, Refs, Ring

_BY_ROW, _BY_FEATURE = WGMMA.reduce(0), WGMMA.reduce(1)
# 128-byte rows of 8 x 64 tiles, as wgmma reads 16-bit operands.
_SWIZZLED = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
_PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)


def takes(output: jax.Array, gate_up: jax.Array, heads: tuple[int, ...], rows: int, cores: int) -> bool:
    """Whether the kernel runs such a layer: bf16, heads of 128, and every CTA on an SM of its own."""
    (attended, hidden), intermediate = output.shape, gate_up.shape[1] // 2
    whole = all(size % TILE == 0 for size in (attended, hidden, intermediate))
    fits = max(hidden // HALF, intermediate // TILE, sum(heads)) <= CTAS
    is_head = attended == heads[0] * TILE
    return output.dtype == jnp.bfloat16 and whole and fits and is_head and rows <= MOST_ROWS and cores > CTAS


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _plain(features: Any) -> Loaded:
    """Features as they are."""
    return Loaded(lambda step: (_load(features.at[pl.ds(step * TILE, TILE)], WGMMA),), lambda x: x)


def _normed(plan: Plan, features: Any, squares: Any, weight: Any, depth: int) -> Loaded:
    """Normed features, with the rounding points of `RMSNorm`."""
    blocks = plan.hidden // HALF
    total = plgpu.layout_cast(jnp.zeros((plan.rows,), jnp.float32), _BY_ROW)
    for start in range(0, squares.shape[0], HALF):
        some = _load(squares.at[pl.ds(start, HALF)], WGMMA)
        block = plgpu.broadcasted_iota(jnp.int32, some.shape, 0, layout=WGMMA)
        total += jnp.where(block < blocks - start, some, 0.0).sum(axis=0)
    inverse = lax.rsqrt(total / plan.hidden + plan.eps)

    def load(step: jax.Array) -> tuple[jax.Array, jax.Array]:
        place = pl.ds(step * depth, depth)
        return _load(features.at[place], WGMMA), _load(weight.at[place], _BY_FEATURE)

    def ready(x: jax.Array, scales: jax.Array) -> jax.Array:
        normed = _rounded(x.astype(jnp.float32) * lax.broadcast_in_dim(inverse, x.shape, [1]))
        return (normed * lax.broadcast_in_dim(scales.astype(jnp.float32), x.shape, [0])).astype(jnp.bfloat16)

    return Loaded(load, ready)


def _rounded(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _add_parts(parts: Any, place: Any) -> jax.Array:
    """The sum of a product's parts, in order, rounded to bf16."""
    total = _load(parts.at[0, place], WGMMA)
    for split in range(1, parts.shape[0]):
        total += _load(parts.at[split, place], WGMMA)
    return _rounded(total)


def _write_parts(product: Product, parts: Any, cta: jax.Array) -> Callable:
    split = lax.rem(cta, jnp.int32(product.splits))

    def done(tile: jax.Array, sums: jax.Array) -> None:
        parts[split, pl.ds(tile * TILE, TILE)] = sums

    return done


def _add_residual(plan: Plan, refs: Refs, cta: jax.Array, parts: str, residual: str, target: str) -> None:
    """64 features of the stream after a product, and their squares."""

    @pl.when(cta < plan.hidden // HALF)
    def _() -> None:
        place = pl.ds(cta * HALF, HALF)
        added = _rounded(_add_parts(refs[parts], place) * plan.residual_scale)
        stream = _rounded(_load(refs[residual].at[place], WGMMA).astype(jnp.float32) + added)
        refs[target][place] = stream.astype(jnp.bfloat16)
        refs[target + "_squares"][cta] = (stream * stream).sum(axis=0)


def _output(plan: Plan, refs: Refs, ring: Ring, index: int, cta: jax.Array) -> None:
    ring.product(index, Copied(refs, refs["attended"]), _write_parts(plan.products[0], refs["output_parts"], cta))


def _gate_up(plan: Plan, refs: Refs, ring: Ring, index: int, cta: jax.Array) -> None:
    def done(tile: jax.Array, gate: jax.Array, up: jax.Array) -> None:
        gate, up = _rounded(gate), _rounded(up)
        activated = _rounded(gate / (1.0 + jnp.exp(-gate))) * up
        refs["activated"][pl.ds(tile * TILE, TILE)] = activated.astype(jnp.bfloat16)

    ring.product(index, _normed(plan, refs["middle"], refs["middle_squares"], refs["mlp_norm"], HALF), done)


def _down(plan: Plan, refs: Refs, ring: Ring, index: int, cta: jax.Array) -> None:
    ring.product(index, _plain(refs["activated"]), _write_parts(plan.products[2], refs["down_parts"], cta))


def _qkvf(plan: Plan, refs: Refs, ring: Ring, index: int, cta: jax.Array) -> None:
    normed = _normed(plan, refs["out"], refs["out_squares"], refs["attention_norm"], TILE)
    ring.product(index, normed, _write_parts(plan.products[3], refs["qkvf_parts"], cta))


def _rotate(plan: Plan, refs: Refs, cta: jax.Array) -> None:
    """One head of the projections: its parts added, rotated unless it is a value, and written row by row."""

    @pl.when(cta < sum(plan.heads))
    def _() -> None:
        halves = [_add_parts(refs["qkvf_parts"], pl.ds(cta * TILE + half, HALF)) for half in (0, HALF)]
        cos, sin = (_load(refs[name], WGMMA) for name in ("cos", "sin"))
        first, second = halves
        q, k, v = plan.heads[:3]
        is_value = (cta >= q + k) & (cta < q + k + v)
        rotated = (first * cos - second * sin, second * cos + first * sin)
        for index, (plain, turned) in enumerate(zip(halves, rotated, strict=True)):
            chosen = jnp.where(lax.broadcast(is_value, plain.shape), plain, turned).astype(jnp.bfloat16)
            place = refs["head"].at[:, pl.ds(index * HALF, HALF)]
            place.transpose((1, 0))[...] = plgpu.layout_cast(chosen, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        start = 0
        for name, count in zip("qkvf", plan.heads, strict=True):

            @pl.when((cta >= start) & (cta < start + count))
            def _(name: str = name, start: int = start) -> None:
                plgpu.copy_smem_to_gmem(refs["head"].at[pl.ds(0, plan.batch)], refs[name].at[:, cta - start])

            start += count
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """A part of the kernel: nothing that it reads is written by it.

    Attributes:
        reads, writes: names of operands and buffers.
        product: index of the product that it streams, if it is one.
        run: see `_output` (of a product) and `_rotate`.
        writers: how many CTAs have a share in it.
        readers: how many have a share in the next one, counted from CTA 0.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    run: Callable
    writers: int
    product: int | None = None


def _parts(plan: Plan) -> list[_Part]:
    products, adders = plan.products, plan.hidden // HALF

    def streams(index: int, run: Callable, reads: tuple[str, ...], writes: str) -> _Part:
        product = products[index]
        writers = product.tiles * product.splits
        return _Part(reads=(product.weights, *reads), writes=(writes,), run=run, writers=writers, product=index)

    def adds(parts: str, residual: str, target: str) -> _Part:
        run = functools.partial(_add_residual, parts=parts, residual=residual, target=target)
        return _Part(reads=(parts, residual), writes=(target, f"{target}_squares"), run=run, writers=adders)

    found = [
        streams(0, _output, ("attended",), "output_parts"),
        adds("output_parts", "residual", "middle"),
        streams(1, _gate_up, ("middle", "middle_squares", "mlp_norm"), "activated"),
        streams(2, _down, ("activated",), "down_parts"),
        adds("down_parts", "middle", "out"),
    ]
    if plan.heads:
        found += [
            streams(3, _qkvf, ("out", "out_squares", "attention_norm"), "qkvf_parts"),
            _Part(reads=("qkvf_parts", "cos", "sin"), writes=tuple("qkvf"), run=_rotate, writers=sum(plan.heads)),
        ]
    return found


def _body(*refs: Any, plan: Plan, parts: Sequence[_Part], names: Sequence[str], waits: bool) -> None:
    named = dict(zip(names, refs, strict=True))
    cta = lax.axis_index("cta")
    products = [plan.products[part.product] for part in parts if part.product is not None]
    ring = Ring(plan, products, named, cta)
    streamed = 0
    for position, part in enumerate(parts):
        if part.product is None:
            part.run(plan, named, cta)
        else:
            part.run(plan, named, ring, streamed, cta)
            streamed += 1
        if waits and position + 1 < len(parts):
            following = parts[position + 1]
            semaphore = named["semaphores"].at[position]

            @pl.when(cta < part.writers)
            def _(semaphore: Any = semaphore) -> None:
                plgpu.commit_smem()  # every warp has written
                plgpu.semaphore_signal(semaphore, memory_scope="gpu")

            @pl.when(cta < following.writers)
            def _(semaphore: Any = semaphore, part: _Part = part) -> None:
                plgpu.semaphore_wait(semaphore, part.writers, decrement=False, memory_scope="gpu")


def _call(plan: Plan, parts: Sequence[_Part], have: dict[str, jax.Array], *, waits: bool) -> dict[str, jax.Array]:
    """Runs some parts as one kernel and returns what they write."""
    written = [name for part in parts for name in part.writes]
    reads = list(dict.fromkeys(name for part in parts for name in part.reads if name not in written))
    buffers = plan.buffers()
    scratch = {
        "ring": plgpu.SMEM((plan.stages, TILE, TILE), jnp.bfloat16, transforms=_SWIZZLED),
        "features": plgpu.SMEM((2, plan.rows, TILE), jnp.bfloat16, transforms=_SWIZZLED),
        "head": plgpu.SMEM((plan.rows, TILE), jnp.bfloat16),
        "arrived": plgpu.Barrier(num_arrivals=2, num_barriers=plan.stages),
        "copied": plgpu.Barrier(num_barriers=2),
    }
    names = [*reads, *written, *scratch]
    body = functools.partial(_body, plan=plan, parts=parts, waits=waits)

    def kernel(*refs: Any) -> None:
        if waits:
            semaphores = pl.get_global(plgpu.SemaphoreType.REGULAR((len(parts),)))
            body(*refs, semaphores, names=[*names, "semaphores"])
        else:
            body(*refs, names=names)

    results = plgpu.kernel(
        kernel,
        out_type=[buffers[name] for name in written],
        grid=(CTAS,),
        grid_names=("cta",),
        scratch_types=list(scratch.values()),
        compiler_params=_PARAMS,
        kernel_name="between_attentions",
    )(*(have[name] for name in reads))
    return dict(zip(written, results, strict=True))


def run(plan: Plan, operands: dict[str, jax.Array], *, at_once: bool) -> dict[str, jax.Array]:
    """All parts, in one kernel, or each in a kernel of its own, which needs no semaphores."""
    parts = _parts(plan)
    if at_once:
        return _call(plan, parts, operands, waits=True)
    have = dict(operands)
    for part in parts:
        have |= _call(plan, [part], have, waits=False)
    return have

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

CTAS = 128
"""Of 132 SMs: the record copy's CTAs have the others to themselves."""
MOST_ROWS = 32
_TILE, _HALF = 128, 64
_SMEM_BYTES, _MOST_STAGES = 225 * 1024, 6
_AHEAD = 2
"""Steps whose features are in registers before they are needed."""
_STAGE_BYTES = 2 * _TILE * _TILE
_WGMMA = plgpu.Layout.WGMMA
_BY_ROW, _BY_FEATURE = _WGMMA.reduce(0), _WGMMA.reduce(1)
# 128-byte rows of 8 x 64 tiles, as wgmma reads 16-bit operands.
_SWIZZLED = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
_PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)


def takes(output: jax.Array, gate_up: jax.Array, heads: tuple[int, ...], rows: int, cores: int) -> bool:
    """Whether the kernel runs such a layer: bf16, heads of 128, and every CTA on an SM of its own."""
    (attended, hidden), intermediate = output.shape, gate_up.shape[1] // 2
    whole = all(size % _TILE == 0 for size in (attended, hidden, intermediate))
    fits = max(hidden // _HALF, intermediate // _TILE, sum(heads)) <= CTAS
    is_head = attended == heads[0] * _TILE
    return output.dtype == jnp.bfloat16 and whole and fits and is_head and rows <= MOST_ROWS and cores > CTAS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """How one product's weights are spread over the CTAs.

    Attributes:
        weights: name of its operand, ``[inner, outer]``.
        inner: its inner dimension.
        tiles: of `_TILE` columns; with `pair`, of gate and as many of up.
        splits: CTAs that share a tile, each with a part of the inner dimension.
        pair: each step takes a tile of gate and the same of up, half as deep.
    """

    weights: str
    inner: int
    tiles: int
    splits: int
    pair: bool = False

    @property
    def depth(self) -> int:
        return _HALF if self.pair else _TILE

    @property
    def steps(self) -> int:
        """Steps of a CTA, at most."""
        return -(-(self.inner // self.depth) // self.splits)

    def steps_of(self, cta: jax.Array) -> jax.Array:
        left = self.inner // self.depth - lax.rem(cta, jnp.int32(self.splits)) * self.steps
        return jnp.where(cta < self.tiles * self.splits, jnp.clip(left, 0, self.steps), 0)

    def tile_of(self, cta: jax.Array) -> jax.Array:
        return lax.div(cta, jnp.int32(self.splits))

    def first_step(self, cta: jax.Array) -> jax.Array:
        return lax.rem(cta, jnp.int32(self.splits)) * self.steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The shapes and constants of a kernel.

    Attributes:
        batch: lanes. rows: a multiple of 8 that holds them; what lies in the rows beyond means nothing.
        hidden: width of the residual stream.
        intermediate: of the MLP.
        attended: width of the attention's output.
        heads: how many heads q, k, v and the Forecast have; empty for the last layer.
        head_dim: 128.
        eps: of the norms.
        residual_scale: as of the decoder.
    """

    batch: int
    rows: int
    hidden: int
    intermediate: int
    attended: int
    heads: tuple[int, ...]
    eps: float
    residual_scale: float

    @property
    def products(self) -> tuple[Product, ...]:
        def spread(weights: str, inner: int, outer: int) -> Product:
            tiles, steps = outer // _TILE, inner // _TILE
            each = -(-steps // max(1, CTAS // tiles))
            return Product(weights=weights, inner=inner, tiles=tiles, splits=-(-steps // each))

        tiles = self.intermediate // _TILE
        products = (
            spread("output", self.attended, self.hidden),
            Product(weights="gate_up", inner=self.hidden, tiles=tiles, splits=1, pair=True),
            spread("down", self.intermediate, self.hidden),
        )
        return (*products, spread("qkvf", self.hidden, sum(self.heads) * _TILE)) if self.heads else products

    @property
    def stages(self) -> int:
        others = 2 * self.rows * _TILE * 2 + self.rows * _TILE * 2
        return min(_MOST_STAGES, (_SMEM_BYTES - others) // _STAGE_BYTES)

    def buffers(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What the CTAs write: results, and what they pass on to each other."""

        def bf16(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

        def f32(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        def parts(product: Product) -> jax.ShapeDtypeStruct:
            return f32(product.splits, product.tiles * _TILE, self.rows)

        squares = f32(-(-self.hidden // _HALF // _HALF) * _HALF, self.rows)
        products = self.products
        made = {
            "output_parts": parts(products[0]),
            "middle": bf16(self.hidden, self.rows),
            "middle_squares": squares,
            "activated": bf16(self.intermediate, self.rows),
            "down_parts": parts(products[2]),
            "out": bf16(self.hidden, self.rows),
            "out_squares": squares,
        }
        if self.heads:
            made["qkvf_parts"] = parts(products[3])
            for name, count in zip("qkvf", self.heads, strict=True):
                made[name] = bf16(self.batch, count, _TILE)
        return made


Refs = dict[str, Any]


class _Ring:
    """The tiles of all products of a kernel in the order in which a CTA uses them."""

    def __init__(self, plan: Plan, products: Sequence[Product], refs: Refs, cta: jax.Array):
        self._plan, self._products, self._refs, self._cta = plan, products, refs, cta
        counts = [product.steps_of(cta) for product in products]
        self._bases = [functools.reduce(jnp.add, counts[:index], jnp.int32(0)) for index in range(len(counts))]
        self._counts = counts
        for step in range(plan.stages - 1):
            self._issue(jnp.int32(step), 0)

    def _issue(self, position: jax.Array, earliest: int) -> None:
        """Starts to load the tiles of a step, counted over all products."""
        stage = lax.rem(position, jnp.int32(self._plan.stages))
        for index in range(earliest, len(self._products)):
            product, base = self._products[index], self._bases[index]

            @pl.when((position >= base) & (position < base + self._counts[index]))
            def _(product: Product = product, base: jax.Array = base) -> None:
                weights = self._refs[product.weights]
                step = product.first_step(self._cta) + position - base
                tile = product.tile_of(self._cta)
                for half in range(2):
                    if product.pair:
                        row, column = step * _HALF, (tile + half * product.tiles) * _TILE
                    else:
                        row, column = step * _TILE + half * _HALF, tile * _TILE
                    plgpu.copy_gmem_to_smem(
                        weights.at[pl.ds(row, _HALF), pl.ds(column, _TILE)],
                        self._refs["ring"].at[stage, pl.ds(half * _HALF, _HALF)],
                        self._refs["arrived"].at[stage],
                    )

    def product(self, index: int, features: "_Copied | _Loaded", done: Callable[..., None]) -> None:
        """One product of this CTA.

        Args:
            index: which.
            features: what brings the other operand.
            done: gets the tile's index and the sums, one array or, with a pair, two.
        """
        product, plan, refs = self._products[index], self._plan, self._refs
        count, base = self._counts[index], self._bases[index]
        first, depth = product.first_step(self._cta), product.depth
        sums_shape = (_TILE, plan.rows)

        def step(i: jax.Array, carry: tuple) -> tuple:
            sums, waiting = carry
            position = base + i
            stage, buffer = lax.rem(position, jnp.int32(plan.stages)), lax.rem(position, jnp.int32(2))
            operand = refs["features"].at[buffer, :, pl.ds(0, depth)]
            features.put(operand, waiting)
            # All warps are done with the step before, whose stage and buffer are the next to be filled.
            plgpu.commit_smem()
            self._issue(position + (plan.stages - 1), index)
            waiting = features.go_on(first, i, count, buffer, waiting)
            plgpu.barrier_wait(refs["arrived"].at[stage])
            tile = refs["ring"].at[stage]
            tiles = [tile.at[pl.ds(0, _HALF)], tile.at[pl.ds(_HALF, _HALF)]] if product.pair else [tile]

            def multiplied(weights: Any) -> jax.Array:
                def run(acc: Any) -> jax.Array:
                    plgpu.wgmma(acc, weights.transpose((1, 0)), operand.transpose((1, 0)))
                    return acc[...]

                return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(sums_shape, jnp.float32))

            return tuple(total + multiplied(weights) for total, weights in zip(sums, tiles, strict=True)), waiting

        @pl.when(count > 0)
        def _() -> None:
            zeros = plgpu.layout_cast(jnp.zeros(sums_shape, jnp.float32), _WGMMA)
            waiting = features.begin(first, count, lax.rem(base, jnp.int32(2)))
            init = ((zeros,) * (2 if product.pair else 1), waiting)
            sums, _ = lax.fori_loop(jnp.int32(0), count, step, init)
            done(product.tile_of(self._cta), *sums)


class _Copied:
    """Features that lie row by row, ``[rows, features]``: TMA brings them as wgmma reads them, a step ahead."""

    def __init__(self, refs: Refs, source: Any):
        self._refs, self._source = refs, source

    def _copy(self, step: jax.Array, buffer: jax.Array) -> None:
        place = self._source.at[:, pl.ds(step * _TILE, _TILE)]
        plgpu.copy_gmem_to_smem(place, self._refs["features"].at[buffer], self._refs["copied"].at[buffer])

    def begin(self, first: jax.Array, count: jax.Array, buffer: jax.Array) -> tuple:
        del count
        self._copy(first, buffer)
        return ()

    def put(self, operand: Any, waiting: tuple) -> None:
        pass

    def go_on(self, first: jax.Array, i: jax.Array, count: jax.Array, buffer: jax.Array, waiting: tuple) -> tuple:
        pl.when(i + 1 < count)(lambda: self._copy(first + i + 1, 1 - buffer))
        plgpu.barrier_wait(self._refs["copied"].at[buffer])
        return waiting


class _Loaded:
    """Features that lie feature by feature: loaded to registers some steps ahead, and made ready there.

    Args:
        load: what a step needs, of its index: the features, ``[depth, rows]``, and whatever else `ready` takes.
        ready: makes of it the operand in bf16.
    """

    def __init__(self, load: Callable[[jax.Array], tuple], ready: Callable[..., jax.Array]):
        self._load, self._ready = load, ready

    def begin(self, first: jax.Array, count: jax.Array, buffer: jax.Array) -> tuple:
        del buffer
        return tuple(self._load(first + jnp.minimum(i, count - 1)) for i in range(_AHEAD))

    def put(self, operand: Any, waiting: tuple) -> None:
        ready = self._ready(*waiting[0])
        operand.transpose((1, 0))[...] = plgpu.layout_cast(ready, plgpu.Layout.WGMMA_TRANSPOSED)

    def go_on(self, first: jax.Array, i: jax.Array, count: jax.Array, buffer: jax.Array, waiting: tuple) -> tuple:
        del buffer
        return (*waiting[1:], self._load(first + jnp.minimum(i + _AHEAD, count - 1)))


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _plain(features: Any) -> _Loaded:
    """Features as they are."""
    return _Loaded(lambda step: (_load(features.at[pl.ds(step * _TILE, _TILE)], _WGMMA),), lambda x: x)


def _normed(plan: Plan, features: Any, squares: Any, weight: Any, depth: int) -> _Loaded:
    """Normed features, with the rounding points of `RMSNorm`."""
    blocks = plan.hidden // _HALF
    total = plgpu.layout_cast(jnp.zeros((plan.rows,), jnp.float32), _BY_ROW)
    for start in range(0, squares.shape[0], _HALF):
        some = _load(squares.at[pl.ds(start, _HALF)], _WGMMA)
        block = plgpu.broadcasted_iota(jnp.int32, some.shape, 0, layout=_WGMMA)
        total += jnp.where(block < blocks - start, some, 0.0).sum(axis=0)
    inverse = lax.rsqrt(total / plan.hidden + plan.eps)

    def load(step: jax.Array) -> tuple[jax.Array, jax.Array]:
        place = pl.ds(step * depth, depth)
        return _load(features.at[place], _WGMMA), _load(weight.at[place], _BY_FEATURE)

    def ready(x: jax.Array, scales: jax.Array) -> jax.Array:
        normed = _rounded(x.astype(jnp.float32) * lax.broadcast_in_dim(inverse, x.shape, [1]))
        return (normed * lax.broadcast_in_dim(scales.astype(jnp.float32), x.shape, [0])).astype(jnp.bfloat16)

    return _Loaded(load, ready)


def _rounded(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _add_parts(parts: Any, place: Any) -> jax.Array:
    """The sum of a product's parts, in order, rounded to bf16."""
    total = _load(parts.at[0, place], _WGMMA)
    for split in range(1, parts.shape[0]):
        total += _load(parts.at[split, place], _WGMMA)
    return _rounded(total)


def _write_parts(product: Product, parts: Any, cta: jax.Array) -> Callable:
    split = lax.rem(cta, jnp.int32(product.splits))

    def done(tile: jax.Array, sums: jax.Array) -> None:
        parts[split, pl.ds(tile * _TILE, _TILE)] = sums

    return done


def _add_residual(plan: Plan, refs: Refs, cta: jax.Array, parts: str, residual: str, target: str) -> None:
    """64 features of the stream after a product, and their squares."""

    @pl.when(cta < plan.hidden // _HALF)
    def _() -> None:
        place = pl.ds(cta * _HALF, _HALF)
        added = _rounded(_add_parts(refs[parts], place) * plan.residual_scale)
        stream = _rounded(_load(refs[residual].at[place], _WGMMA).astype(jnp.float32) + added)
        refs[target][place] = stream.astype(jnp.bfloat16)
        refs[target + "_squares"][cta] = (stream * stream).sum(axis=0)


def _output(plan: Plan, refs: Refs, ring: _Ring, index: int, cta: jax.Array) -> None:
    ring.product(index, _Copied(refs, refs["attended"]), _write_parts(plan.products[0], refs["output_parts"], cta))


def _gate_up(plan: Plan, refs: Refs, ring: _Ring, index: int, cta: jax.Array) -> None:
    def done(tile: jax.Array, gate: jax.Array, up: jax.Array) -> None:
        gate, up = _rounded(gate), _rounded(up)
        activated = _rounded(gate / (1.0 + jnp.exp(-gate))) * up
        refs["activated"][pl.ds(tile * _TILE, _TILE)] = activated.astype(jnp.bfloat16)

    ring.product(index, _normed(plan, refs["middle"], refs["middle_squares"], refs["mlp_norm"], _HALF), done)


def _down(plan: Plan, refs: Refs, ring: _Ring, index: int, cta: jax.Array) -> None:
    ring.product(index, _plain(refs["activated"]), _write_parts(plan.products[2], refs["down_parts"], cta))


def _qkvf(plan: Plan, refs: Refs, ring: _Ring, index: int, cta: jax.Array) -> None:
    normed = _normed(plan, refs["out"], refs["out_squares"], refs["attention_norm"], _TILE)
    ring.product(index, normed, _write_parts(plan.products[3], refs["qkvf_parts"], cta))


def _rotate(plan: Plan, refs: Refs, cta: jax.Array) -> None:
    """One head of the projections: its parts added, rotated unless it is a value, and written row by row."""

    @pl.when(cta < sum(plan.heads))
    def _() -> None:
        halves = [_add_parts(refs["qkvf_parts"], pl.ds(cta * _TILE + half, _HALF)) for half in (0, _HALF)]
        cos, sin = (_load(refs[name], _WGMMA) for name in ("cos", "sin"))
        first, second = halves
        q, k, v = plan.heads[:3]
        is_value = (cta >= q + k) & (cta < q + k + v)
        rotated = (first * cos - second * sin, second * cos + first * sin)
        for index, (plain, turned) in enumerate(zip(halves, rotated, strict=True)):
            chosen = jnp.where(lax.broadcast(is_value, plain.shape), plain, turned).astype(jnp.bfloat16)
            place = refs["head"].at[:, pl.ds(index * _HALF, _HALF)]
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
    products, adders = plan.products, plan.hidden // _HALF

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
    ring = _Ring(plan, products, named, cta)
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
        "ring": plgpu.SMEM((plan.stages, _TILE, _TILE), jnp.bfloat16, transforms=_SWIZZLED),
        "features": plgpu.SMEM((2, plan.rows, _TILE), jnp.bfloat16, transforms=_SWIZZLED),
        "head": plgpu.SMEM((plan.rows, _TILE), jnp.bfloat16),
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

"""A ring of weights in shared memory, tile after tile of all products, and the features they are multiplied with."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sparda_jax.pallas_kernels.between_attentions.mosaic_sizes import HALF, TILE, Plan, Product

_AHEAD = 2
"""Steps whose features are in registers before they are needed."""
WGMMA = plgpu.Layout.WGMMA

Refs = dict[str, Any]


class Ring:
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
                        row, column = step * HALF, (tile + half * product.tiles) * TILE
                    else:
                        row, column = step * TILE + half * HALF, tile * TILE
                    plgpu.copy_gmem_to_smem(
                        weights.at[pl.ds(row, HALF), pl.ds(column, TILE)],
                        self._refs["ring"].at[stage, pl.ds(half * HALF, HALF)],
                        self._refs["arrived"].at[stage],
                    )

    def product(self, index: int, features: "Copied | Loaded", done: Callable[..., None]) -> None:
        """One product of this CTA.

        Args:
            index: which.
            features: what brings the other operand.
            done: gets the tile's index and the sums, one array or, with a pair, two.
        """
        product, plan, refs = self._products[index], self._plan, self._refs
        count, base = self._counts[index], self._bases[index]
        first, depth = product.first_step(self._cta), product.depth
        sums_shape = (TILE, plan.rows)

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
            tiles = [tile.at[pl.ds(0, HALF)], tile.at[pl.ds(HALF, HALF)]] if product.pair else [tile]

            def multiplied(weights: Any) -> jax.Array:
                def run(acc: Any) -> jax.Array:
                    plgpu.wgmma(acc, weights.transpose((1, 0)), operand.transpose((1, 0)))
                    return acc[...]

                return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(sums_shape, jnp.float32))

            return tuple(total + multiplied(weights) for total, weights in zip(sums, tiles, strict=True)), waiting

        @pl.when(count > 0)
        def _() -> None:
            zeros = plgpu.layout_cast(jnp.zeros(sums_shape, jnp.float32), WGMMA)
            waiting = features.begin(first, count, lax.rem(base, jnp.int32(2)))
            init = ((zeros,) * (2 if product.pair else 1), waiting)
            sums, _ = lax.fori_loop(jnp.int32(0), count, step, init)
            done(product.tile_of(self._cta), *sums)


class Copied:
    """Features that lie row by row, ``[rows, features]``: TMA brings them as wgmma reads them, a step ahead."""

    def __init__(self, refs: Refs, source: Any):
        self._refs, self._source = refs, source

    def _copy(self, step: jax.Array, buffer: jax.Array) -> None:
        place = self._source.at[:, pl.ds(step * TILE, TILE)]
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


class Loaded:
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

"""How a layer's four products are spread over CTAs, and what the CTAs pass on to each other."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

CTAS = 128
"""Of 132 SMs: the record copy's CTAs have the others to themselves."""
MOST_ROWS = 16
"""Beyond, XLA's products are faster: measured in whole steps of 24 lanes (docs/performance.md)."""
TILE, HALF = 128, 64
_SMEM_BYTES, _MOST_STAGES = 225 * 1024, 6
_STAGE_BYTES = 2 * TILE * TILE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """How one product's weights are spread over the CTAs.

    Attributes:
        weights: name of its operand, ``[inner, outer]``.
        inner: its inner dimension.
        tiles: of `TILE` columns; with `pair`, of gate and as many of up.
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
        return HALF if self.pair else TILE

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
            tiles, steps = outer // TILE, inner // TILE
            each = -(-steps // max(1, CTAS // tiles))
            return Product(weights=weights, inner=inner, tiles=tiles, splits=-(-steps // each))

        tiles = self.intermediate // TILE
        products = (
            spread("output", self.attended, self.hidden),
            Product(weights="gate_up", inner=self.hidden, tiles=tiles, splits=1, pair=True),
            spread("down", self.intermediate, self.hidden),
        )
        return (*products, spread("qkvf", self.hidden, sum(self.heads) * TILE)) if self.heads else products

    @property
    def stages(self) -> int:
        others = 2 * self.rows * TILE * 2 + self.rows * TILE * 2
        return min(_MOST_STAGES, (_SMEM_BYTES - others) // _STAGE_BYTES)

    def buffers(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What the CTAs write: results, and what they pass on to each other."""

        def bf16(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

        def f32(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        def parts(product: Product) -> jax.ShapeDtypeStruct:
            return f32(product.splits, product.tiles * TILE, self.rows)

        squares = f32(-(-self.hidden // HALF // HALF) * HALF, self.rows)
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
                made[name] = bf16(self.batch, count, TILE)
        return made

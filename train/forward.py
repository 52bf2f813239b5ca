"""The frozen base's forward pass with the loss of every layer on the way, on a mesh with the axis ``data``.

With a frozen base the loss of a layer depends on one entry of the weights only, and nothing of one layer's gradient
reaches another. So a layer's gradient is computed as soon as the layer before it is done, and the memory is that of one
layer: the pass is a loop over layers in Python, over three compiled programs. Every device holds the base, and a part
of the rows.
"""

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from sparda_jax.model import Decoder, rope_tables
from sparda_jax.selection import group_heads
from sparda_jax.train import attention
from sparda_jax.train._rows import KEY_TILE
from sparda_jax.train.attention import attend
from sparda_jax.train.data import Batch
from sparda_jax.train.forecast import predict
from sparda_jax.train.loss import LossParts, Objective, SelectionQuality, forecast_loss

DATA = "data"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSums:
    """Sums over rows, micro-batches and devices, ``[layers]`` each, float32; see `LossParts` and `SelectionQuality`."""

    loss: Float[Array, "layers"]
    weight: Float[Array, "layers"]
    pairs: Float[Array, "layers"]
    quality: SelectionQuality

    @classmethod
    def zeros(cls, layers: int) -> Self:
        fields = [field.name for field in dataclasses.fields(SelectionQuality)]
        quality = SelectionQuality(**{name: jnp.zeros(layers) for name in fields})
        return cls(loss=jnp.zeros(layers), weight=jnp.zeros(layers), pairs=jnp.zeros(layers), quality=quality)

    def add(self, layer: Int[Array, ""], parts: LossParts) -> Self:
        """With the sums of one more part of one layer."""
        add = functools.partial(jax.tree.map, lambda total, part: total.at[layer].add(part.astype(jnp.float32)))
        return dataclasses.replace(
            self,
            loss=add(self.loss, parts.loss),
            weight=add(self.weight, parts.weight),
            pairs=add(self.pairs, parts.pairs),
            quality=add(self.quality, parts.quality),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """A batch on the devices: positions in the documents, and what is no padding."""

    tokens: Int[Array, "rows seq_len"]
    positions: Int[Array, "rows seq_len"]
    valid: Bool[Array, "rows seq_len"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Projected:
    """What a layer computes before it attends, as in `sparda_jax.model.Projections`."""

    normed: Float[Array, "rows seq_len hidden"]
    q: Float[Array, "rows seq_len heads head_dim"]
    k: Float[Array, "rows seq_len kv_heads head_dim"]
    v: Float[Array, "rows seq_len kv_heads head_dim"]


class ForwardPass:
    """The base on a mesh, and its compiled programs.

    Args:
        model: the base; a Forecast that it carries is not used. Its arrays may be dropped afterwards.
        mesh: with the axis ``data``.
        objective: of the loss.
        query_chunk, key_tile: of the teacher and the loss; attention_chunk, attention_tile: of the base's attention.
            They change memory and time only.
    """

    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        *,
        objective: Objective = Objective.PUBLISHED,
        query_chunk: int | None = None,
        key_tile: int = KEY_TILE,
        attention_chunk: int = attention.QUERY_CHUNK,
        attention_tile: int = attention.KEY_TILE,
    ) -> None:
        self.config, self.mesh = model.config, mesh
        self._everywhere, self._by_row = NamedSharding(mesh, P()), NamedSharding(mesh, P(DATA))
        self._table = self.everywhere(model.embed_tokens[...])
        self._layers: list[tuple[nnx.GraphDef, Any]] = []
        for layer in model.layers:
            graphdef, weights = nnx.split(layer)
            self._layers.append((graphdef, self.everywhere(weights)))
        self._numbers = [self.everywhere(np.int32(number)) for number in range(len(self._layers))]
        self._loss_options = {"objective": objective, "chunk": query_chunk, "key_tile": key_tile}
        self._attention_tiles = {"chunk": attention_chunk, "key_tile": attention_tile}
        whole, rows = P(), P(DATA)
        self._embed = self._program(self._embed_rows, (whole, rows), rows)
        self._learn = self._program(
            self._learn_rows, (whole, whole, rows, rows, rows, whole, whole), (rows, whole, whole), (5, 6)
        )
        self._measure = self._program(self._measure_rows, (whole, whole, rows, rows, rows, whole), (rows, whole), (5,))
        self._project = {
            g: self._program(functools.partial(self._project_rows, g), (whole, rows, rows), rows)
            for g, _ in self._layers
        }
        self._advance = {
            g: self._program(functools.partial(self._advance_rows, g), (whole, rows, rows, rows), rows, (1,))
            for g, _ in self._layers
        }

    def _program(self, function: Any, inputs: Any, outputs: Any, donated: tuple[int, ...] = ()) -> Any:
        # The loops inside start from constants, which JAX can't see to become different on every device.
        split = jax.shard_map(function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
        return jax.jit(split, donate_argnums=donated)

    def on_devices(self, batch: Batch) -> Rows:
        """This process's rows of a batch, moved to its devices."""

        def move(values: np.ndarray) -> jax.Array:
            return jax.make_array_from_process_local_data(self._by_row, values)

        return Rows(tokens=move(batch.tokens), positions=move(batch.positions), valid=move(batch.segments > 0))

    def everywhere(self, values: Any) -> Any:
        """Arrays as every device needs them; each process has to give the same."""
        if self._everywhere.is_fully_addressable:
            return jax.device_put(values, self._everywhere)

        def spread(value: Any) -> jax.Array:
            if isinstance(value, jax.Array) and value.sharding == self._everywhere:
                return value
            return jax.make_array_from_process_local_data(self._everywhere, np.asarray(value))

        return jax.tree.map(spread, values)

    def learn(
        self,
        weights: Float[Array, "layers hidden outputs"],
        rows: Rows,
        gradient: Float[Array, "layers hidden outputs"],
        sums: LayerSums,
    ) -> tuple[Float[Array, "layers hidden outputs"], LayerSums]:
        """Adds the gradient of ``sum(loss)`` over layers, and the sums, of some rows; both are donated."""
        totals = [gradient, sums]

        def visit(layer: Array, seen: Array, projected: Projected) -> Array:
            blocks, *totals[:] = self._learn(weights, layer, rows, seen, projected, *totals)
            return blocks

        self._run(rows, visit)
        return totals[0], totals[1]

    def measure(self, weights: Float[Array, "layers hidden outputs"], rows: Rows, sums: LayerSums) -> LayerSums:
        """Adds the sums of some rows, without a gradient; ``sums`` is donated."""
        totals = [sums]

        def visit(layer: Array, seen: Array, projected: Projected) -> Array:
            blocks, totals[0] = self._measure(weights, layer, rows, seen, projected, totals[0])
            return blocks

        self._run(rows, visit)
        return totals[0]

    def _run(self, rows: Rows, visit: Any) -> None:
        """Runs the layers; ``visit`` gets the layer's number, what its Forecast sees and its projections, and gives the
        blocks to attend to.
        """
        x = self._embed(self._table, rows)
        before = None
        for number, (graphdef, weights) in zip(self._numbers, self._layers, strict=True):
            projected = self._project[graphdef](weights, x, rows)
            seen = projected.normed if before is None else before
            blocks = visit(number, seen, projected)
            before = projected.normed
            if number is not self._numbers[-1]:
                x = self._advance[graphdef](weights, x, projected, blocks)

    def _embed_rows(self, table: Array, rows: Rows) -> Array:
        # As Decoder.embed.
        wide = table[rows.tokens].astype(jnp.float32) * self.config.embedding_scale
        return wide.astype(table.dtype)

    def _project_rows(self, graphdef: nnx.GraphDef, weights: Any, x: Array, rows: Rows) -> Projected:
        found = nnx.merge(graphdef, weights).project(x, *rope_tables(self.config, rows.positions))
        return Projected(normed=found.normed, q=found.q, k=found.k, v=found.v)

    def _advance_rows(
        self, graphdef: nnx.GraphDef, weights: Any, x: Array, projected: Projected, blocks: Array
    ) -> Array:
        attended = attend(
            group_heads(projected.q, self.config),
            projected.k,
            projected.v,
            blocks,
            block_size=self.config.sparse.block_size,
            **self._attention_tiles,
        )
        return nnx.merge(graphdef, weights).finish(x, attended.reshape(projected.q.shape))

    def _loss(self, weight: Array, rows: Rows, seen: Array, projected: Projected) -> tuple[Array, LossParts]:
        parts = forecast_loss(
            predict(weight, seen, rows.positions, self.config),
            group_heads(projected.q, self.config),
            projected.k,
            rows.positions,
            rows.valid,
            self.config.sparse,
            **self._loss_options,
        )
        return parts.loss, parts

    def _learn_rows(self, weights, layer, rows, seen, projected, gradient, sums):
        (_, parts), part = jax.value_and_grad(self._loss, has_aux=True)(weights[layer], rows, seen, projected)
        gradient = gradient.at[layer].add(jax.lax.psum(part, DATA))
        return parts.blocks, gradient, sums.add(layer, _over_devices(parts))

    def _measure_rows(self, weights, layer, rows, seen, projected, sums):
        _, parts = self._loss(weights[layer], rows, seen, projected)
        return parts.blocks, sums.add(layer, _over_devices(parts))


def _over_devices(parts: LossParts) -> LossParts:
    loss, weight, pairs, quality = jax.lax.psum((parts.loss, parts.weight, parts.pairs, parts.quality), DATA)
    return dataclasses.replace(parts, loss=loss, weight=weight, pairs=pairs, quality=quality)

"""The frozen base's forward pass with the loss of every layer on the way, on a mesh of devices.

With a frozen base the loss of a layer depends on one entry of the weights only, and nothing of one layer's gradient
reaches another. So a layer's gradient is computed as soon as the layer before it is done, and the memory is that of one
layer: the pass is a loop over layers in Python, over three compiled programs. `sparda_jax.train.mesh` says what of the
rows and of the base each device holds.
"""

import dataclasses
import functools
from collections import deque
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, UInt32

from sparda_jax.foresight import ForecastDesign
from sparda_jax.model import Decoder, DecoderLayer, rope_tables
from sparda_jax.selection import group_heads
from sparda_jax.train import attention
from sparda_jax.train._cache_hits import CacheHits, cache_hits
from sparda_jax.train._rows import KEY_TILE
from sparda_jax.train.attention import attend
from sparda_jax.train.data import Batch
from sparda_jax.train.flops import Flops
from sparda_jax.train.forecast import PUBLISHED_DESIGN, predict
from sparda_jax.train.loss import LossParts, Objective, SelectionQuality, Teacher, forecast_loss
from sparda_jax.train.mesh import AXES, ROWS, SEQUENCE, Pieces, gather_weights, weight_spec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSums:
    """Sums over rows, micro-batches and devices, ``[layers]`` each, float32; see `LossParts`, `SelectionQuality` and
    `CacheHits`, which only `ForwardPass.measure` counts.
    """

    loss: Float[Array, "layers"]
    weight: Float[Array, "layers"]
    pairs: Float[Array, "layers"]
    quality: SelectionQuality
    cache: CacheHits

    @classmethod
    def zeros(cls, layers: int) -> Self:
        def of[T: SelectionQuality | CacheHits](kind: type[T]) -> T:
            return kind(**{field.name: jnp.zeros(layers) for field in dataclasses.fields(kind)})

        loss, weight, pairs = (jnp.zeros(layers) for _ in range(3))  # one each, since they are donated
        return cls(loss=loss, weight=weight, pairs=pairs, quality=of(SelectionQuality), cache=of(CacheHits))

    def add(self, layer: Int[Array, ""], parts: LossParts, cache: CacheHits | None = None) -> Self:
        """With the sums of one more part of one layer."""
        add = functools.partial(jax.tree.map, lambda total, part: total.at[layer].add(part.astype(jnp.float32)))
        return dataclasses.replace(
            self,
            loss=add(self.loss, parts.loss),
            weight=add(self.weight, parts.weight),
            pairs=add(self.pairs, parts.pairs),
            quality=add(self.quality, parts.quality),
            cache=self.cache if cache is None else add(self.cache, cache),
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
        mesh: from `make_mesh`.
        objective, teacher: of the loss.
        design: of the Forecast, whose weights have `ForecastDesign.outputs` columns.
        query_chunk, key_tile: of the teacher and the loss; attention_chunk, attention_tile: of the base's attention.
            They change memory and time only.
    """

    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        *,
        objective: Objective = Objective.PUBLISHED,
        teacher: Teacher = Teacher.FINE,
        design: ForecastDesign = PUBLISHED_DESIGN,
        query_chunk: int | None = None,
        key_tile: int = KEY_TILE,
        attention_chunk: int = attention.QUERY_CHUNK,
        attention_tile: int = attention.KEY_TILE,
    ) -> None:
        self.config, self.mesh, self.design = model.config, mesh, design
        self._pieces = Pieces(shards=mesh.shape[SEQUENCE])
        self._everywhere, self._by_row = NamedSharding(mesh, P()), NamedSharding(mesh, ROWS)
        self._table, table = self._shared_out(model.embed_tokens[...])
        self._layers: list[tuple[nnx.GraphDef, Any]] = []
        self._specs: dict[nnx.GraphDef, Any] = {}
        for layer in model.layers:
            graphdef, weights = nnx.split(layer)
            parts, self._specs[graphdef] = self._shared_out(weights)
            self._layers.append((graphdef, parts))
        self._numbers = [self.everywhere(np.int32(number)) for number in range(len(self._layers))]
        self._loss_options = {"objective": objective, "teacher": teacher, "chunk": query_chunk, "key_tile": key_tile}
        self._attention_tiles = {"chunk": attention_chunk, "key_tile": attention_tile}
        whole, blocks = P(), P(ROWS[0], None, SEQUENCE)
        self._embed = self._program(functools.partial(self._embed_rows, table), (table, ROWS), ROWS)
        self._learn = self._program(
            self._learn_rows, (whole, whole, ROWS, ROWS, ROWS, whole, whole), (blocks, whole, whole), (5, 6)
        )
        self._measure = self._program(
            self._measure_rows, (whole, whole, ROWS, ROWS, ROWS, whole), (blocks, whole), (5,)
        )
        self._project = {
            g: self._program(functools.partial(self._project_rows, g), (specs, ROWS, ROWS), ROWS)
            for g, specs in self._specs.items()
        }
        self._advance = {
            g: self._program(functools.partial(self._advance_rows, g), (specs, ROWS, ROWS, blocks), ROWS, (1,))
            for g, specs in self._specs.items()
        }

    def _program(self, function: Any, inputs: Any, outputs: Any, donated: tuple[int, ...] = ()) -> Any:
        # The loops inside start from constants, which JAX can't see to become different on every device.
        split = jax.shard_map(function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
        return jax.jit(split, donate_argnums=donated)

    def _shared_out(self, weights: Any) -> tuple[Any, Any]:
        """The base's arrays on the devices, and how they lie there."""
        specs = jax.tree.map(lambda value: weight_spec(value.shape, self.mesh), weights)

        def place(value: jax.Array, spec: P) -> jax.Array:
            sharding = NamedSharding(self.mesh, spec)
            if sharding.is_fully_addressable:
                return jax.device_put(value, sharding)
            host = np.asarray(value)
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

        return jax.tree.map(place, weights, specs), specs

    def on_devices(self, batch: Batch) -> Rows:
        """This process's rows of a batch, moved to its devices."""

        def move(values: np.ndarray) -> jax.Array:
            return jax.make_array_from_process_local_data(self._by_row, self._pieces.cut(values))

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

    def flops(self, positions: Int[np.ndarray, "tokens"]) -> float:
        """What `learn` has to compute for tokens at these positions of their documents, see `Flops`."""
        return Flops.of(self.config, positions).total

    def learn(
        self,
        weights: Float[Array, "layers hidden outputs"],
        rows: Rows,
        gradient: Float[Array, "layers hidden outputs"],
        sums: LayerSums,
    ) -> tuple[Float[Array, "layers hidden outputs"], LayerSums]:
        """Adds the gradient of ``sum(loss)`` over layers, and the sums, of some rows; both are donated."""
        x, inputs = self.embed(rows), deque[Array](maxlen=self.design.lookahead + 1)
        for layer in range(self.config.num_layers):
            projected = self.project(layer, x, rows)
            inputs.append(projected.normed)
            # The oldest that is kept is that of `ForecastDesign.source`.
            blocks, gradient, sums = self.learn_layer(layer, weights, rows, inputs[0], projected, gradient, sums)
            if layer + 1 < self.config.num_layers:
                x = self.advance(layer, x, projected, blocks)
        return gradient, sums

    def measure(self, weights: Float[Array, "layers hidden outputs"], rows: Rows, sums: LayerSums) -> LayerSums:
        """Adds the sums of some rows, without a gradient; ``sums`` is donated."""
        x, inputs = self.embed(rows), deque[Array](maxlen=self.design.lookahead + 1)
        for layer in range(self.config.num_layers):
            projected = self.project(layer, x, rows)
            inputs.append(projected.normed)
            blocks, sums = self.measure_layer(layer, weights, rows, inputs[0], projected, sums)
            if layer + 1 < self.config.num_layers:
                x = self.advance(layer, x, projected, blocks)
        return sums

    def embed(self, rows: Rows) -> Float[Array, "rows seq_len hidden"]:
        """The residual stream before the first layer."""
        return self._embed(self._table, rows)

    def project(self, layer: int, x: Float[Array, "rows seq_len hidden"], rows: Rows) -> Projected:
        """What a layer computes before it attends."""
        graphdef, weights = self._layers[layer]
        return self._project[graphdef](weights, x, rows)

    def learn_layer(
        self,
        layer: int,
        weights: Float[Array, "layers hidden outputs"],
        rows: Rows,
        seen: Float[Array, "rows seq_len hidden"],
        projected: Projected,
        gradient: Float[Array, "layers hidden outputs"],
        sums: LayerSums,
    ) -> tuple[UInt32[Array, "rows kv_heads seq_len words"], Float[Array, "layers hidden outputs"], LayerSums]:
        """The blocks that a layer attends to; and ``gradient`` and ``sums``, which are donated, with its own added.

        Args:
            seen: what the layer's Forecast sees: the normed input of layer `ForecastDesign.source`.
        """
        return self._learn(weights, self._numbers[layer], rows, seen, projected, gradient, sums)

    def measure_layer(
        self,
        layer: int,
        weights: Float[Array, "layers hidden outputs"],
        rows: Rows,
        seen: Float[Array, "rows seq_len hidden"],
        projected: Projected,
        sums: LayerSums,
    ) -> tuple[UInt32[Array, "rows kv_heads seq_len words"], LayerSums]:
        """As `learn_layer`, without a gradient."""
        return self._measure(weights, self._numbers[layer], rows, seen, projected, sums)

    def advance(
        self,
        layer: int,
        x: Float[Array, "rows seq_len hidden"],
        projected: Projected,
        blocks: UInt32[Array, "rows kv_heads seq_len words"],
    ) -> Float[Array, "rows seq_len hidden"]:
        """The residual stream after a layer; ``x``, the one before it, is donated."""
        graphdef, weights = self._layers[layer]
        return self._advance[graphdef](weights, x, projected, blocks)

    def _embed_rows(self, spec: P, table: Array, rows: Rows) -> Array:
        # As Decoder.embed.
        table = gather_weights(table, spec)
        wide = table[rows.tokens].astype(jnp.float32) * self.config.embedding_scale
        return wide.astype(table.dtype)

    def _layer(self, graphdef: nnx.GraphDef, weights: Any) -> DecoderLayer:
        return nnx.merge(graphdef, gather_weights(weights, self._specs[graphdef]))

    def _project_rows(self, graphdef: nnx.GraphDef, weights: Any, x: Array, rows: Rows) -> Projected:
        found = self._layer(graphdef, weights).project(x, *rope_tables(self.config, rows.positions))
        assert found.normed is not None  # only decode's kernel between two layers keeps it to itself
        return Projected(normed=found.normed, q=found.q, k=found.k, v=found.v)

    def _advance_rows(
        self, graphdef: nnx.GraphDef, weights: Any, x: Array, projected: Projected, blocks: Array
    ) -> Array:
        q = group_heads(projected.q, self.config)
        k, v = self._pieces.whole(projected.k), self._pieces.whole(projected.v)
        size = self.config.sparse.block_size
        attended = [
            attend(q[:, here], k, v, blocks[:, :, here], begin, block_size=size, **self._attention_tiles)
            for here, begin in self._pieces.own(q.shape[1])
        ]
        attended = jnp.concatenate(attended, axis=1).reshape(projected.q.shape)
        return self._layer(graphdef, weights).finish(x, attended)

    def _loss(self, weight: Array, rows: Rows, seen: Array, projected: Projected) -> tuple[Array, LossParts]:
        student = predict(weight, seen, rows.positions, self.config)
        q = group_heads(projected.q, self.config)
        k, positions, valid = (self._pieces.whole(x) for x in (projected.k, rows.positions, rows.valid))
        sparse, options = self.config.sparse, self._loss_options
        parts = [
            forecast_loss(student[:, here], q[:, here], k, positions, valid, sparse, begin=begin, **options)
            for here, begin in self._pieces.own(q.shape[1])
        ]
        blocks, student = (
            jnp.concatenate([getattr(part, name) for part in parts], axis=2) for name in ("blocks", "student_blocks")
        )
        numbers = [dataclasses.replace(part, blocks=None, student_blocks=None) for part in parts]
        summed = jax.tree.map(lambda *x: sum(x), *numbers)
        return summed.loss, dataclasses.replace(summed, blocks=blocks, student_blocks=student)

    def _learn_rows(self, weights, layer, rows, seen, projected, gradient, sums):
        (_, parts), part = jax.value_and_grad(self._loss, has_aux=True)(weights[layer], rows, seen, projected)
        gradient = gradient.at[layer].add(jax.lax.psum(part, AXES))
        # Validation compares with the selector.
        parts = dataclasses.replace(parts, quality=parts.quality.without_selector())
        return parts.blocks, gradient, sums.add(layer, _over_devices(parts))

    def _measure_rows(self, weights, layer, rows, seen, projected, sums):
        _, parts = self._loss(weights[layer], rows, seen, projected)
        bits = jnp.swapaxes(self._pieces.whole(jnp.swapaxes(parts.student_blocks, 1, 2)), 1, 2)
        positions, valid = (self._pieces.whole(x) for x in (rows.positions, rows.valid))
        cache = cache_hits(bits, positions, valid, self.config.sparse)
        # Every device that shares the rows has counted all their tokens.
        cache = jax.tree.map(lambda x: jax.lax.psum(x, AXES) / self._pieces.shards, cache)
        return parts.blocks, sums.add(layer, _over_devices(parts), cache)


def _over_devices(parts: LossParts) -> LossParts:
    loss, weight, pairs, quality = jax.lax.psum((parts.loss, parts.weight, parts.pairs, parts.quality), AXES)
    return dataclasses.replace(parts, loss=loss, weight=weight, pairs=pairs, quality=quality)

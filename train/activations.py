"""Layers that train on their own, from what the base computed once for every row and which a folder keeps.

The base is frozen and the teacher chooses its blocks, so what a layer gets does not depend on any weights that are
trained. Kept is the residual stream before a layer, from which its norm, queries and keys take little to compute; the
layer before gives what the Forecast sees. So a layer costs its teacher and its student, whatever the depth of the
model, and gets the very numbers of a joint run.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from sparda_jax.checkpoint.atomic import atomic_file
from sparda_jax.model import Decoder
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.flops import Flops
from sparda_jax.train.forward import ForwardPass, LayerSums, Projected, Rows
from sparda_jax.train.mesh import SEQUENCE


def check_rows(mesh: Mesh) -> None:
    """Refuses a mesh whose rows can't be kept.

    Raises:
        TrainingError: it spans several processes, or cuts rows.
    """
    if jax.process_count() > 1 or mesh.shape[SEQUENCE] > 1:
        raise TrainingError("--activations keeps whole rows of one process: leave out --coordinator, --sequence-shards")


class CachedForward(ForwardPass):
    """A `ForwardPass` that learns and measures some layers only, from a folder of activations that it fills itself.

    A file ``ROW-LAYER.npy`` has the residual stream of one row before a layer, ``[seq_len, hidden]``, bfloat16 as
    uint16. A row's name is a hash of its tokens and documents: runs share the folder, whatever their order, seed or
    number of devices.

    Args:
        folder: for this base alone.
        layers: to train, ascending.
        model, mesh, options: see `ForwardPass`; `check_rows` must have passed the mesh.
    """

    def __init__(self, model: Decoder, mesh: Mesh, folder: Path, layers: tuple[int, ...], **options: Any) -> None:
        super().__init__(model, mesh, **options)
        self._folder, self._wanted = folder, layers
        self._kept = sorted({self.design.source(layer) for layer in layers} | set(layers))
        self._dtype = model.embed_tokens[...].dtype
        folder.mkdir(parents=True, exist_ok=True)

    def bytes_of_row(self, seq_len: int) -> int:
        """What the folder holds of one row."""
        return len(self._kept) * seq_len * self.config.hidden_size * self._dtype.itemsize

    def flops(self, positions: Int[np.ndarray, "tokens"]) -> float:
        """Of the teacher and the student of the layers that are trained."""
        every = Flops.of(self.config, positions)
        return (every.teacher + every.student) * len(self._wanted) / self.config.num_layers

    def learn(
        self,
        weights: Float[Array, "layers hidden outputs"],
        rows: Rows,
        gradient: Float[Array, "layers hidden outputs"],
        sums: LayerSums,
    ) -> tuple[Float[Array, "layers hidden outputs"], LayerSums]:
        """As `ForwardPass.learn`, for the layers that are trained."""
        for layer, seen, projected in self._inputs(rows):
            _, gradient, sums = self.learn_layer(layer, weights, rows, seen, projected, gradient, sums)
        return gradient, sums

    def measure(self, weights: Float[Array, "layers hidden outputs"], rows: Rows, sums: LayerSums) -> LayerSums:
        """As `ForwardPass.measure`, for the layers that are trained."""
        for layer, seen, projected in self._inputs(rows):
            _, sums = self.measure_layer(layer, weights, rows, seen, projected, sums)
        return sums

    def _inputs(self, rows: Rows) -> Iterator[tuple[int, Float[Array, "rows seq_len hidden"], Projected]]:
        """Each layer that is trained, what its Forecast sees, and what it computes before it attends."""
        names = _names(rows)
        self._fill(rows, names)
        known: dict[int, Projected] = {}
        for layer in self._wanted:
            source = self.design.source(layer)
            known = {number: projected for number, projected in known.items() if number >= source}
            for number in (source, layer):
                if number not in known:
                    known[number] = self.project(number, self._read(names, number), rows)
            yield layer, known[source].normed, known[layer]

    def _fill(self, rows: Rows, names: list[str]) -> None:
        """Runs the base over rows of which something is missing."""
        if all(self._file(name, layer).exists() for name in names for layer in self._kept):
            return
        config, x = self.config, self.embed(rows)
        shape = (config.num_layers, config.hidden_size, self.design.outputs(config))
        # The blocks that the base attends to come with the loss, whose weights and sums do not matter here.
        weights, gradient = self.everywhere((jnp.zeros(shape), jnp.zeros(shape)))
        sums = self.everywhere(LayerSums.zeros(config.num_layers))
        for layer in range(self._kept[-1] + 1):
            if layer in self._kept:
                self._write(names, layer, x)
            if layer < self._kept[-1]:
                projected = self.project(layer, x, rows)
                found = self.learn_layer(layer, weights, rows, projected.normed, projected, gradient, sums)
                blocks, gradient, sums = found
                x = self.advance(layer, x, projected, blocks)

    def _file(self, name: str, layer: int) -> Path:
        return self._folder / f"{name}-{layer}.npy"

    def _write(self, names: list[str], layer: int, x: Float[Array, "rows seq_len hidden"]) -> None:
        for name, values in zip(names, np.asarray(x), strict=True):
            with atomic_file(self._file(name, layer), overwrite=True) as temporary, temporary.open("wb") as stream:
                np.save(stream, values.view(np.uint16) if values.dtype.itemsize == 2 else values)

    def _read(self, names: list[str], layer: int) -> Float[Array, "rows seq_len hidden"]:
        """Raises TrainingError where a file is damaged."""
        rows = []
        for file in (self._file(name, layer) for name in names):
            try:
                rows.append(np.load(file).view(self._dtype))
            except (OSError, ValueError, EOFError) as error:
                raise TrainingError(f"{file} is damaged: {error}; remove it, and the base computes it again") from error
        return jax.device_put(np.stack(rows), self._by_row)


def _names(rows: Rows) -> list[str]:
    """A hash of each row."""
    tokens, positions, valid = (np.asarray(x) for x in (rows.tokens, rows.positions, rows.valid))
    whole = np.where(valid, np.stack([tokens, positions]), -1)
    return [hashlib.sha256(whole[:, row].tobytes()).hexdigest()[:20] for row in range(whole.shape[1])]

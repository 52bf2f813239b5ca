"""How a run's devices share its work: rows over ``data`` and ``fsdp``, a row's tokens over ``sequence``.

The base's weights lie in parts over ``fsdp``; a layer's are gathered when it runs. A row's tokens are cut into twice as
many pieces as there are shards, and a shard has one from the front and one from the back, since later tokens see more:
of 2 shards the first has pieces 0 and 3, the second 1 and 2.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from sparda_jax.train.errors import TrainingError

DATA, FSDP, SEQUENCE = AXES = ("data", "fsdp", "sequence")
ROWS = P((DATA, FSDP), SEQUENCE)
"""Of arrays ``[rows, tokens, ...]``."""


def make_mesh(devices: Sequence[Any], *, fsdp: int = 1, sequence: int = 1) -> Mesh:
    """All devices, ``fsdp`` to a copy of the base and ``sequence`` to a row.

    Raises:
        TrainingError: they can't be shared out so, or a row would be cut between processes.
    """
    if len(devices) % (fsdp * sequence):
        raise TrainingError(
            f"fsdp={fsdp} times sequence_shards={sequence} must divide the number of devices, {len(devices)}"
        )
    of_process = sum(device.process_index == devices[0].process_index for device in devices)
    if of_process % sequence:
        raise TrainingError(
            f"sequence_shards={sequence} must divide the {of_process} devices of a process: a row stays in one process"
        )
    return Mesh(np.array(devices).reshape(-1, fsdp, sequence), AXES)


def row_shares(mesh: Mesh) -> int:
    """Among how many the rows of a micro-batch are shared out."""
    return mesh.shape[DATA] * mesh.shape[FSDP]


def weight_spec(shape: Sequence[int], mesh: Mesh) -> P:
    """How an array of the base lies: along the first axis of a matrix that ``fsdp`` divides, else whole everywhere."""
    parts = mesh.shape[FSDP]
    axis = next((axis for axis, size in enumerate(shape) if parts > 1 and len(shape) > 1 and size % parts == 0), None)
    return P() if axis is None else P(*[None] * axis, FSDP)


def gather_weights(weights: Any, specs: Any) -> Any:
    """Within a program on a mesh: the whole arrays of parts that lie as ``specs`` says."""

    def whole(part: Array, spec: P) -> Array:
        return jax.lax.all_gather(part, FSDP, axis=len(spec) - 1, tiled=True) if len(spec) else part

    return jax.tree.map(whole, weights, specs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pieces:
    """How a row's tokens are cut over ``shards`` devices."""

    shards: int

    @property
    def _order(self) -> list[int]:
        """The pieces, shard after shard."""
        last = 2 * self.shards - 1
        return [piece for shard in range(self.shards) for piece in (shard, last - shard)]

    def cut(self, values: np.ndarray) -> np.ndarray:
        """``[rows, tokens]`` with the tokens of each shard beside each other."""
        if self.shards == 1:
            return values
        pieces = np.split(values, 2 * self.shards, axis=1)
        return np.concatenate([pieces[piece] for piece in self._order], axis=1)

    def whole(self, x: Array) -> Array:
        """Within a program on a mesh: ``[rows, tokens, ...]`` of all shards, in the tokens' order."""
        if self.shards == 1:
            return x
        pieces = jnp.split(jax.lax.all_gather(x, SEQUENCE, axis=1, tiled=True), 2 * self.shards, axis=1)
        return jnp.concatenate([pieces[place] for place in np.argsort(self._order)], axis=1)

    def own(self, tokens: int) -> list[tuple[slice, Int[Array, ""]]]:
        """Within a program on a mesh: where this shard's pieces lie among its ``tokens``, and where in the row."""
        if self.shards == 1:
            return [(slice(0, tokens), jnp.int32(0))]
        half, shard = tokens // 2, jax.lax.axis_index(SEQUENCE)
        return [(slice(0, half), shard * half), (slice(half, tokens), (2 * self.shards - 1 - shard) * half)]

"""How well a Forecast chooses blocks, measured while its loss is computed."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from sparda_jax.pallas_kernels.block_selection import bits_to_mask, pool_to_blocks
from sparda_jax.train._rows import BlockSets, Keys, Queries, SelectionGrid, ended_windows
from sparda_jax.train.heads import ranking
from sparda_jax.train.teacher import TeacherScores, selector_scores, top_blocks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionQuality:
    """Sums that say how well the student chooses, over the (query, KV head) pairs that have a choice.

    A pair has a choice if more past blocks exist than are selected. Only free blocks count, those that are not forced.
    "Student" is the selection of serving by the Forecast, "selector" that of InfLLM-V2 by the layer's own queries,
    "teacher" the blocks of `route`. Sums of several calls may be added.

    Attributes:
        pairs: with a choice.
        teacher_blocks, selector_blocks: free blocks that the teacher and the selector chose.
        teacher_hits, selector_hits: how many of these the student chose as well.
        free_mass: probability that the teacher's softmax puts on free past blocks, summed over pairs.
        teacher_mass, selector_mass, student_mass: the part of it on the blocks that each chose.
    """

    pairs: Int[Array, ""]
    teacher_blocks: Int[Array, ""]
    teacher_hits: Int[Array, ""]
    selector_blocks: Int[Array, ""]
    selector_hits: Int[Array, ""]
    free_mass: Float[Array, ""]
    teacher_mass: Float[Array, ""]
    selector_mass: Float[Array, ""]
    student_mass: Float[Array, ""]

    def without_selector(self) -> Self:
        """With zeros for the selector: where nothing else uses it, a jitted caller saves its scores, which cost more
        than all the rest.
        """
        hits = jnp.zeros_like(self.selector_hits)
        mass = jnp.zeros_like(self.selector_mass)
        return dataclasses.replace(self, selector_blocks=hits, selector_hits=hits, selector_mass=mass)


def selection_quality(
    scores: Float[Array, "batch kv_heads heads chunk windows"],
    teacher: TeacherScores,
    chosen: Bool[Array, "batch kv_heads chunk blocks"],
    queries: Queries,
    keys: Keys,
    sets: BlockSets,
    grid: SelectionGrid,
) -> tuple[SelectionQuality, UInt32[Array, "batch kv_heads chunk words"]]:
    """Compares the student's and the layer's own selection of serving with the teacher's blocks; the student's as bits,
    too.

    Args:
        scores: of `score_heads`.
    """
    blocks = chosen.shape[-1]
    ended = ended_windows(queries, keys, grid)

    def selected(window_scores: Array) -> Array:
        pooled = pool_to_blocks(jnp.where(ended, window_scores, -jnp.inf), grid.block_size // grid.kernel_stride)
        return top_blocks(pooled, queries, grid, blocks)

    group = queries.q.shape[3]
    own = bits_to_mask(selected(selector_scores(queries, keys, ended)), blocks)
    bits = selected(ranking(scores, ended, np.sqrt(queries.q.shape[-1])))
    student = bits_to_mask(bits, blocks)
    choice = jnp.sum(sets.past, axis=-1, keepdims=True) > grid.num_selected_blocks
    free = sets.past & ~sets.forced & choice
    mass = teacher.mass[..., :blocks] / group

    def count(mask: Array) -> Array:
        return jnp.sum(mask & free)

    def weigh(mask: Array) -> Array:
        return jnp.sum(jnp.where(mask & free, mass, 0))

    quality = SelectionQuality(
        pairs=jnp.sum(choice) * scores.shape[1],
        teacher_blocks=count(chosen),
        teacher_hits=count(chosen & student),
        selector_blocks=count(own),
        selector_hits=count(own & student),
        free_mass=weigh(jnp.ones_like(chosen)),
        teacher_mass=weigh(chosen),
        selector_mass=weigh(own),
        student_mass=weigh(student),
    )
    return quality, bits

"""The public function of the softmax over fine keys, and the choice of what runs it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sparda_jax.pallas_kernels.backend import Backend, choose_backend
from sparda_jax.pallas_kernels.fine_softmax import reference, triton
from sparda_jax.pallas_kernels.operands import INT32, check_operands

OPERATION = "fine_softmax"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FineScores:
    """``P``, the softmax over the fine keys that a query sees, summed over the heads of a group, in three summaries.

    Attributes:
        largest: the largest P of each stride of fine keys.
        first: P of the first fine key of each stride.
        mass: the sum of P over the fine keys of each block; over all blocks it adds up to ``group``, or to 0 where a
            query sees none.
    """

    largest: Float[Array, "batch kv_heads q_len strides"]
    first: Float[Array, "batch kv_heads q_len strides"]
    mass: Float[Array, "batch kv_heads q_len blocks"]


def fine_softmax(
    q: Float[Array, "batch q_len kv_heads group head_dim"],
    fine: Float[Array, "batch kv_heads length head_dim"],
    first: Int[Array, "batch q_len"],
    last: Int[Array, "batch q_len"],
    *,
    stride: int,
    block_size: int,
    tile: int,
    backend: str | None = None,
) -> FineScores:
    """``P[r, i] = sum over h of softmax_i(q[r, h] . fine[i] / sqrt(head_dim))`` (docs/semantics.md section 11.2).

    A first sweep over the keys finds the denominators, a second one the values: nothing has the two axes of queries and
    fine keys. Float32 scores and sums.

    Args:
        q: queries after RoPE; finite where they see a key.
        fine: all finite.
        first, last: the fine keys that a query sees, both included; none if last < first.
        stride, block_size: fine keys of each; both divide ``length``.
        tile: fine keys at a time of the reference, which divides ``length`` and is a multiple of ``block_size``; the
            kernels have their own.
        backend: a name of `Backend`, or None for the fastest that runs here.

    Raises:
        ValueError: shapes or dtypes that don't fit each other; an unknown backend, or one that doesn't take them.
    """
    sizes: dict[str, tuple[int, str]] = {}
    check_operands(INT32, sizes=sizes, first=(first, "batch q_len"), last=(last, "batch q_len"))
    if fine.shape[2] % tile or tile % block_size or block_size % stride:
        raise ValueError(
            f"length={fine.shape[2]}, tile={tile}, block_size={block_size}, stride={stride}: each must be a multiple "
            "of the next."
        )
    available = [Backend.REFERENCE]
    if triton.takes(q, fine, stride, block_size):
        available.append(Backend.TRITON)
    chosen = choose_backend(backend, OPERATION, available=available)
    if chosen is Backend.REFERENCE:
        found = reference.scores(q, fine, first, last, stride=stride, block_size=block_size, tile=tile)
    else:
        found = _jitted(q, fine, first, last, stride=stride, block_size=block_size)
    return FineScores(largest=found[0], first=found[1], mass=found[2])


def has_kernels(dtype: jax.typing.DTypeLike, head_dim: int, stride: int, block_size: int) -> bool:
    """Whether such operands have a kernel on the device that a program traced here is meant for."""
    like = jax.ShapeDtypeStruct((1, block_size, 1, 1, head_dim), jnp.dtype(dtype))
    if not triton.takes(like, jax.ShapeDtypeStruct((1, 1, block_size, head_dim), like.dtype), stride, block_size):
        return False
    return choose_backend(None, OPERATION) is not Backend.REFERENCE


# One jit object for all layers, so that they share one lowering of the kernels.
@functools.partial(jax.jit, static_argnames=("stride", "block_size"))
def _jitted(q: Array, fine: Array, first: Array, last: Array, *, stride: int, block_size: int) -> tuple[Array, ...]:
    logs = triton.logs(q, fine, first, last)
    return triton.scores(q, fine, first, last, logs, stride=stride, block_size=block_size)

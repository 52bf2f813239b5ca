"""Does a converted folder compute what its source does? Dense logits of both on a seeded prompt."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from numpy.typing import DTypeLike

from sparda_jax.checkpoint import reference
from sparda_jax.checkpoint.errors import CheckpointError
from sparda_jax.checkpoint.load import fill, put
from sparda_jax.checkpoint.tensor_files import open_tensors
from sparda_jax.checkpoint.weights import Weights, open_weights
from sparda_jax.config import ModelConfig
from sparda_jax.model import Decoder, Projections, abstract_decoder, rope_tables

# Largest allowed difference, in standard deviations of the reference's logits, by the dtype that the decoder computes
# in. A wrong transpose, order or scale changes logits by about one, float32 rounding by 1e-4, bfloat16 by hundredths.
TOLERANCES = {"float32": 5e-3, "bfloat16": 0.25}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of :func:`verify`.

    Attributes:
        reference: ``transformers`` or ``numpy``.
        num_tokens: positions compared.
        max_difference, last_difference: largest absolute difference of a logit, over all positions and at the last one.
        top1_agreement: share of the positions with the same most likely token.
        tolerance: what ``max_difference`` may be.
    """

    reference: str
    num_tokens: int
    max_difference: float
    last_difference: float
    top1_agreement: float
    tolerance: float

    def __str__(self) -> str:
        return (
            f"logits against {self.reference} over {self.num_tokens} positions: max abs difference "
            f"{self.max_difference:.3g} (last position {self.last_difference:.3g}, tolerance {self.tolerance:.3g}), "
            f"top-1 agreement {self.top1_agreement:.1%}"
        )


def verify(
    source: Path,
    converted: Path,
    *,
    num_tokens: int = 32,
    seed: int = 0,
    dtype: DTypeLike = jnp.float32,
    use_reference: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Compares dense logits of the converted weights with those of the source, and every hash with the manifest.

    Both sides hold one layer at a time, except transformers, which is used only if its float32 model fits in memory.

    Args:
        source: the Hugging Face folder.
        converted: the folder made from it.
        num_tokens: length of the prompt, random tokens from ``seed``.
        dtype: that the decoder computes in, float32 or bfloat16; the reference is float32 or float64.
        use_reference: ``transformers`` or ``numpy`` in place of the choice.
        progress: called with the items that are done and their number.

    Raises:
        CheckpointError: the difference is larger than the tolerance, or a stored value does not have its hash.
    """
    weights = open_weights(converted, check_hashes=True)
    entries = open_tensors(source).entries
    tokens = np.random.default_rng(seed).integers(0, weights.config.vocab_size, num_tokens)
    ours = _stream_logits(weights, tokens, jnp.dtype(dtype), progress)
    config = ModelConfig.from_pretrained(source)
    name = use_reference or reference.choose_reference(config, entries)
    compute = {"numpy": reference.numpy_logits, "transformers": reference.transformers_logits}[name]
    theirs = compute(config, entries, tokens)
    difference = np.abs(ours - theirs)
    result = Comparison(
        reference=name,
        num_tokens=num_tokens,
        max_difference=float(difference.max()),
        last_difference=float(difference[-1].max()),
        top1_agreement=float(np.mean(ours.argmax(-1) == theirs.argmax(-1))),
        tolerance=TOLERANCES[jnp.dtype(dtype).name] * float(theirs.std()),
    )
    if not result.max_difference <= result.tolerance:  # also true for NaN
        raise CheckpointError(f"{converted} does not compute what {source} does: {result}")
    return result


def _attend_densely(projections: Projections) -> Float[Array, "batch q_len heads head_dim"]:
    q, k, v = projections.q, projections.k, projections.v
    batch, length, heads, head_dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], head_dim)
    exact = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    scores = jnp.einsum("bqmgd,bkmd->bmgqk", grouped, k, **exact) / np.sqrt(head_dim)
    future = jnp.triu(jnp.ones((length, length), bool), 1)
    weights = jax.nn.softmax(jnp.where(future, -jnp.inf, scores), axis=-1).astype(v.dtype)
    return jnp.einsum("bmgqk,bkmd->bqmgd", weights, v, **exact).astype(q.dtype).reshape(q.shape)


def _stream_logits(
    weights: Weights,
    tokens: Int[np.ndarray, " length"],
    dtype: np.dtype,
    progress: Callable[[int, int], None],
) -> Float[np.ndarray, "length vocab"]:
    """The decoder's own code, with one item's weights at a time."""
    config = weights.config

    model: Decoder = abstract_decoder(config, has_forecast=weights.forecast is not None, dtype=dtype)
    steps = config.num_layers + 2
    cos, sin = rope_tables(config, jnp.arange(len(tokens))[None], max_len=len(tokens))
    # Of the table only the prompt's rows: in float32 the whole of it would be the largest array of all.
    rows = weights.read_item("embed_tokens")["embed_tokens"][tokens].astype(dtype)
    model.embed_tokens = nnx.Param(jnp.asarray(rows))
    x = model.embed(jnp.arange(len(tokens))[None])
    progress(1, steps)
    for index in range(config.num_layers):
        prefix = f"layers.{index}."
        arrays = put(weights.read_item(prefix[:-1]), dtype)
        arrays = {name.removeprefix(prefix): value for name, value in arrays.items()}
        x = fill(model.layers[index], arrays)(x, cos, sin, _attend_densely)
        progress(index + 2, steps)
    head = put(weights.read_item("head"), dtype)
    model.norm.weight = nnx.Param(head["norm.weight"])
    if config.tie_word_embeddings:
        model.embed_tokens = nnx.Param(put(weights.read_item("embed_tokens"), dtype)["embed_tokens"])
    else:
        model.lm_head.kernel = nnx.Param(head["lm_head.kernel"])
    progress(steps, steps)
    return np.asarray(model.logits(x)[0])

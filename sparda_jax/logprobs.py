"""Log probabilities: of a token, and of the likeliest ones beside it, in the model's own distribution."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

MAX_LOGPROBS = 20
"""Of the likeliest tokens at each place."""
SCORED_TOKENS = 256
"""Prompt tokens that are scored at a time: each takes float32 logits of the whole vocabulary."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """Log probabilities on the device, of a row of tokens; `Logprobs` says of what."""

    ids: Int[Array, "rows listed"]
    values: Float[Array, "rows listed"]

    def copy_to_host_async(self) -> None:
        for array in (self.ids, self.values):
            array.copy_to_host_async()

    def to_host(self) -> "Logprobs":
        """Waits for them."""
        return Logprobs(ids=np.asarray(self.ids), values=np.asarray(self.values))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logprobs:
    """Log probabilities of a row of tokens.

    They are the float32 ``log_softmax`` of the model's logits, before biases, penalties and temperature.

    Attributes:
        ids: the token itself, and behind it the likeliest tokens, the best first, the lower id first among equals.
        values: natural logarithms, likewise.
    """

    ids: Int[np.ndarray, "rows listed"]
    values: Float[np.ndarray, "rows listed"]

    def rows(self, which: slice, likeliest: int) -> "Logprobs":
        """Some of the rows, with so many of the likeliest tokens."""
        return Logprobs(ids=self.ids[which, : likeliest + 1], values=self.values[which, : likeliest + 1])

    def row(self, index: int, likeliest: int) -> "Logprobs":
        """One of them."""
        return self.rows(slice(index, index + 1), likeliest)

    @classmethod
    def concatenate(cls, parts: "Sequence[Logprobs]", likeliest: int) -> "Logprobs":
        """Parts of so many of the likeliest tokens, one behind the other; there may be none."""
        width = (0, likeliest + 1)
        return cls(
            ids=np.concatenate([np.zeros(width, np.int32), *(part.ids for part in parts)]),
            values=np.concatenate([np.zeros(width, np.float32), *(part.values for part in parts)]),
        )


def score(logits: Float[Array, "rows vocab"], tokens: Int[Array, "rows"]) -> Scores:
    """The log probability of each row's token, and of the `MAX_LOGPROBS` likeliest ones."""
    norm = jax.nn.logsumexp(logits, axis=-1)
    place = jnp.arange(logits.shape[1])
    ids = [tokens]
    best, last = jnp.full(logits.shape[:1], jnp.inf), jnp.full(logits.shape[:1], -1)
    # One after the other: what sorts or takes a top-k, XLA makes a library call that no CUDA graph takes.
    for _ in range(min(MAX_LOGPROBS, logits.shape[1])):
        below = (logits < best[:, None]) | ((logits == best[:, None]) & (place > last[:, None]))
        last = jnp.argmax(jnp.where(below, logits, -jnp.inf), axis=-1).astype(jnp.int32)
        best = _at(logits, last)
        ids.append(last)
    listed = jnp.stack(ids, axis=1)
    return Scores(ids=listed, values=jnp.take_along_axis(logits, listed, axis=1) - norm[:, None])


def score_if(wanted: Bool[Array, "rows"], logits: Float[Array, "rows vocab"], tokens: Int[Array, "rows"]) -> Scores:
    """`score` where any row is wanted; else zeros, and nothing is computed."""
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(score, logits, tokens))
    return jax.lax.cond(jnp.any(wanted), lambda: score(logits, tokens), lambda: nothing)


def _at(logits: Float[Array, "rows vocab"], ids: Int[Array, "rows"]) -> Float[Array, "rows"]:
    return jnp.take_along_axis(logits, ids[:, None], axis=1)[:, 0]

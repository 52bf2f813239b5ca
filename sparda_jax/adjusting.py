"""What a request adds to its logits before a token is chosen: biases, stop tokens held back, penalties, a mask."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

if TYPE_CHECKING:
    from sparda_jax.sampling import SamplingParams

MAX_BIASES = 300
"""Entries of one request's ``logit_bias``."""
MAX_STOP_IDS = 64
"""Token ids that a request with ``min_tokens`` can hold back."""
# Behind any vocabulary, so that a scatter drops it.
_NOTHING = 2**31 - 1
_GENERATED = 2
_WORD = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adjustments:
    """Of each sequence of a batch, on the device.

    Attributes:
        on: which sequences have any.
        presence, frequency, repetition: the penalties.
        min_p: tokens less likely than so many times the likeliest one are not drawn.
        ids, values: what is added to which logit: ``logit_bias``, behind it the stop tokens; padded with ids that are
            dropped.
        min_length: a sequence shorter than that gets no stop token.
        masked: which sequences get tokens of their mask only.
    """

    on: Bool[Array, "batch"]
    presence: Float[Array, "batch"]
    frequency: Float[Array, "batch"]
    repetition: Float[Array, "batch"]
    min_p: Float[Array, "batch"]
    ids: Int[Array, "batch entries"]
    values: Float[Array, "batch entries"]
    min_length: Int[Array, "batch"]
    masked: Bool[Array, "batch"]

    @classmethod
    def of(cls, params: "Sequence[SamplingParams]", prompt_lengths: Sequence[int]) -> "Adjustments":
        """``prompt_lengths`` is where each sequence's answer begins."""
        ids = np.full((len(params), MAX_BIASES + MAX_STOP_IDS), _NOTHING, np.int32)
        values = np.zeros(ids.shape, np.float32)
        for row, p in enumerate(params):
            for entry, (token, bias) in enumerate(p.logit_bias):
                ids[row, entry], values[row, entry] = token, bias
            if p.min_tokens:
                stops = list(dict.fromkeys(p.stop_token_ids))
                ids[row, MAX_BIASES : MAX_BIASES + len(stops)] = stops
                values[row, MAX_BIASES:] = -np.inf

        def each(name: str) -> np.ndarray:
            return np.array([getattr(p, name) for p in params], np.float32)

        lengths = [length + p.min_tokens for p, length in zip(params, prompt_lengths, strict=True)]
        arrays = {
            "on": np.array([p.adjusts for p in params]),
            "presence": each("presence_penalty"),
            "frequency": each("frequency_penalty"),
            "repetition": each("repetition_penalty"),
            "min_p": each("min_p"),
            "ids": ids,
            "values": values,
            "min_length": np.array([min(length, _NOTHING) for length in lengths], np.int32),
            "masked": np.array([p.masked for p in params]),
        }
        return cls(**jax.device_put(arrays))


def adjust(
    logits: Float[Array, "batch vocab"],
    adjustments: Adjustments,
    position: Int[Array, "batch"],
    seen: Int[Array, "batch vocab"] | None,
    allowed: UInt32[Array, "batch words"] | None = None,
) -> Float[Array, "batch vocab"]:
    """The logits that a token is chosen by; those of a sequence without adjustments stay as they are, bit by bit.

    The order is vLLM's: ``min_tokens`` and ``logit_bias``, the repetition penalty, frequency and presence;
    last the mask.

    Args:
        logits: the model's.
        adjustments: of each sequence.
        position: tokens before the one to be chosen.
        seen: what `prompt_tokens` and `count` say; None: nobody has penalties.
        allowed: the masks, see `all_allowed`; None: nobody has one.
    """
    stops = jnp.arange(adjustments.ids.shape[1]) >= MAX_BIASES
    done = position >= adjustments.min_length
    values = jnp.where(stops & done[:, None], 0.0, adjustments.values)
    rows = jnp.arange(logits.shape[0])[:, None]
    changed = logits + jnp.zeros_like(logits).at[rows, adjustments.ids].add(values, mode="drop")
    if seen is not None:
        repetition = adjustments.repetition[:, None]
        repeated = jnp.where(changed > 0, changed / repetition, changed * repetition)
        generated = seen // _GENERATED
        changed = jnp.where(seen > 0, repeated, changed)
        changed = changed - adjustments.frequency[:, None] * generated
        changed = changed - adjustments.presence[:, None] * (generated > 0)
    if allowed is not None:
        bits = (allowed[:, :, None] >> jnp.arange(_WORD, dtype=jnp.uint32)) & 1
        may_come = bits.reshape(logits.shape[0], -1)[:, : logits.shape[1]] > 0
        changed = jnp.where(may_come | ~adjustments.masked[:, None], changed, -jnp.inf)
    return jnp.where(adjustments.on[:, None], changed, logits)


def all_allowed(batch: int, vocab_size: int) -> UInt32[np.ndarray, "batch words"]:
    """Masks that allow every token: token ``t`` is bit ``t % 32``, from the lowest one, of word ``t // 32``."""
    return np.full((batch, -(-vocab_size // _WORD)), 2**_WORD - 1, np.uint32)


def prompt_tokens(prompts: Sequence[np.ndarray], vocab_size: int) -> Int[np.ndarray, "batch vocab"]:
    """What has been seen before an answer begins: 1 for each token of the prompt; `count` adds 2 for each new one."""
    seen = np.zeros((len(prompts), vocab_size), np.int32)
    for row, prompt in enumerate(prompts):
        seen[row, prompt] = 1
    return seen


def count(
    seen: Int[Array, "batch vocab"], tokens: Int[Array, "batch"], which: Bool[Array, "batch"] | None = None
) -> Int[Array, "batch vocab"]:
    """``seen`` with one more token of each sequence, or of ``which``."""
    amount = _GENERATED if which is None else _GENERATED * which
    return seen.at[jnp.arange(seen.shape[0]), tokens].add(amount, mode="promise_in_bounds")

"""flax.nnx modules of a MiniCPM4.1-style decoder with the Forecast projection."""

from sparda_jax.model.attention import ForecastAttention, Projections
from sparda_jax.model.decoder import Decoder, DecoderLayer, abstract_decoder
from sparda_jax.model.rope import apply_rope, rope_frequencies, rope_tables

__all__ = [
    "Decoder",
    "DecoderLayer",
    "ForecastAttention",
    "Projections",
    "abstract_decoder",
    "apply_rope",
    "rope_frequencies",
    "rope_tables",
]

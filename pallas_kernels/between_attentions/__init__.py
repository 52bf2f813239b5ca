"""What a layer does behind its attention, and the projections of the next layer, in one go."""

from sparda_jax.pallas_kernels.between_attentions.api import (
    LayerWeights,
    between_attentions,
    between_backend,
    from_features,
    padded_rows,
    to_features,
)

__all__ = ["LayerWeights", "between_attentions", "between_backend", "from_features", "padded_rows", "to_features"]

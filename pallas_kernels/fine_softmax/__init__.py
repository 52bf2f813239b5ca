"""The softmax over fine keys of every query head, summed over its group: what a Forecast is taught with."""

from sparda_jax.pallas_kernels.fine_softmax.api import FineScores, fine_softmax, has_kernels

__all__ = ["FineScores", "fine_softmax", "has_kernels"]

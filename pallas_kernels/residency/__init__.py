"""Residency: which wanted blocks lie in a slot, which are fetched, and which slots they take."""

from sparda_jax.pallas_kernels.residency.api import plan_residency
from sparda_jax.pallas_kernels.residency.state import Residency, empty_residency

__all__ = ["Residency", "empty_residency", "plan_residency"]

"""Sparse decoupled attention (SparDA) on JAX: MiniCPM4.1-style models with block selection and a Forecast."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparda_jax.library import Generation, SparDA

__version__ = "0.1.0"
__all__ = ["Generation", "SparDA", "__version__"]


def __getattr__(name: str) -> object:
    """Loads the library's front door on first use, so that ``import sparda_jax`` and ``--help`` need no JAX."""
    if name in ("Generation", "SparDA"):
        from sparda_jax import library

        return getattr(library, name)
    raise AttributeError(f"module 'sparda_jax' has no attribute {name!r}")

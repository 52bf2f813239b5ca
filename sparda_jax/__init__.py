"""Sparse decoupled attention (SparDA) on JAX: MiniCPM4.1-style models with block selection and a Forecast."""

__version__ = "0.1.0"

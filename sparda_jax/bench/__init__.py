"""Benchmarks against floors, published times and targets: ``python -m sparda_jax.bench``."""

"""The benchmark of the whole engine: ``python -m sparda_jax.bench engine``."""

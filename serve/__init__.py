"""The OpenAI-compatible HTTP server. Imported as `sparda_jax.serve`."""

"""Pretraining of the small bundled model: corpus, tokenizer, recall tasks and the batch stream (no JAX is imported here)."""

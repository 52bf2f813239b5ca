"""Pretraining of the small bundled model: corpus, tokenizer, recall tasks, batches, training."""

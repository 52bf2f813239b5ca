"""Geometries of published models, for benchmarks and plans that need no checkpoint."""

from sparda_jax.config import ModelConfig, RopeConfig, SparseConfig

SHAPES = {
    "minicpm4.1-8b": ModelConfig(
        vocab_size=73448,
        hidden_size=4096,
        intermediate_size=16384,
        num_layers=32,
        num_heads=32,
        num_kv_heads=2,
        head_dim=128,
        max_position_embeddings=65536,
        rms_norm_eps=1e-6,
        embedding_scale=12.0,
        residual_scale=1.4 / 32**0.5,
        logit_divisor=16.0,
        tie_word_embeddings=False,
        rope=RopeConfig(theta=10000.0),
        sparse=SparseConfig(),
    )
}

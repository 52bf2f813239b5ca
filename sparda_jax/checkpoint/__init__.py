"""Checkpoints: Hugging Face and PyTorch files in, orbax and safetensors out, every tensor accounted for."""

from sparda_jax.checkpoint.errors import CheckpointError
from sparda_jax.checkpoint.hf import save_hf
from sparda_jax.checkpoint.load import load_model
from sparda_jax.checkpoint.weights import Weights, open_weights

__all__ = ["CheckpointError", "Weights", "load_model", "open_weights", "save_hf"]

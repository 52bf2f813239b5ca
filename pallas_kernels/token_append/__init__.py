"""Token append: a new token's K and V in its tail slot, and the compressed key that it completes in its page."""

from sparda_jax.pallas_kernels.token_append.api import append_token, finish_window, write_token

__all__ = ["append_token", "finish_window", "write_token"]

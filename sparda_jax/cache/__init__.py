"""Where the keys and values live."""

from sparda_jax.cache.kv import KVCache, LayerCache

__all__ = ["KVCache", "LayerCache"]

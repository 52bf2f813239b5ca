"""What tells one base from another, for runs that go on and for activations that are kept."""

import hashlib

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Shaped, UInt32

from sparda_jax.model import Decoder


def base_fingerprint(base: Decoder) -> str:
    """The dtype, and a hash of every weight in it and of the config; not of a Forecast that the base carries.

    All weights, since a base that was tuned in some matrices only (q and v, say) keeps the others bit for bit.
    """
    config = base.config
    own_columns = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    found = hashlib.sha256(repr(config).encode())
    for path, leaf in nnx.to_flat_state(nnx.state(base)):
        values = leaf[...]
        if "qkvf_proj" in path:
            values = values[..., :own_columns]
        found.update(f"{path} {values.shape} {int(_checksum(values))}".encode())
    return f"{base.embed_tokens[...].dtype.name} {found.hexdigest()[:16]}"


@jax.jit
def _checksum(values: Shaped[Array, "..."]) -> UInt32[Array, ""]:
    """On the device, where the weights lie. A single other bit always changes it, and so does another order."""
    unsigned = {2: jnp.uint16, 4: jnp.uint32}[values.dtype.itemsize]
    bits = lax.bitcast_convert_type(values.ravel(), unsigned).astype(jnp.uint32)
    return jnp.sum(bits * (2 * lax.iota(jnp.uint32, bits.size) + 1), dtype=jnp.uint32)

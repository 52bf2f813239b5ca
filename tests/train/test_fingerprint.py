"""What tells one base from another."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparda_jax.model import Decoder
from sparda_jax.train.fingerprint import base_fingerprint
from tests.train.support import tiny_model

CONFIG = tiny_model().config


def base(*, has_forecast: bool = False, dtype: str = "float32", theta: float = CONFIG.rope.theta) -> Decoder:
    config = dataclasses.replace(CONFIG, rope=dataclasses.replace(CONFIG.rope, theta=theta))
    return Decoder(config, has_forecast=has_forecast, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))


def changed(name: tuple[Any, ...], *, swapped: bool) -> str:
    """Of a base with one matrix changed: the last bit of a number, or two numbers that change places."""
    other = base()
    leaf = dict(nnx.to_flat_state(nnx.state(other)))[name]
    values = np.array(leaf[...])
    flat = values.reshape(-1)
    flat[:2] = 1, 2
    if swapped:
        flat[:2] = 2, 1
    else:
        flat.view(np.uint32)[0] ^= 1
    nnx.update(other, nnx.from_flat_state([(name, leaf.replace(jnp.asarray(values)))]))
    return base_fingerprint(other)


def test_every_weight_counts() -> None:
    whole = base_fingerprint(base())
    assert base_fingerprint(base()) == whole
    names = [path for path, _ in nnx.to_flat_state(nnx.state(base()))]
    seen = {changed(name, swapped=swapped) for name in names for swapped in (False, True)}
    assert len(seen | {whole}) == 1 + 2 * len(names)


def test_dtype_and_config_count() -> None:
    assert (
        len({base_fingerprint(base()), base_fingerprint(base(dtype="bfloat16")), base_fingerprint(base(theta=500.0))})
        == 3
    )


def test_a_forecast_does_not_count() -> None:
    """So that a run goes on when its first Forecast was put into the base's folder."""
    bare, carrying = base(), base(has_forecast=True)
    for layer, other in zip(bare.layers, carrying.layers, strict=True):
        kernel = layer.self_attn.qkvf_proj.kernel
        own = kernel[...].shape[1]
        both = other.self_attn.qkvf_proj.kernel
        both[...] = both[...].at[:, :own].set(kernel[...])
        for name in ("input_layernorm", "post_attention_layernorm", "mlp"):
            nnx.update(getattr(other, name), nnx.state(getattr(layer, name)))
        nnx.update(other.self_attn.o_proj, nnx.state(layer.self_attn.o_proj))
    nnx.update(carrying.norm, nnx.state(bare.norm))
    carrying.embed_tokens[...] = bare.embed_tokens[...]
    assert base_fingerprint(carrying) == base_fingerprint(bare)

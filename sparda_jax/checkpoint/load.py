"""A checkpoint into a :class:`~sparda_jax.model.Decoder`, each tensor straight to its device."""

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import DTypeLike

from sparda_jax.checkpoint.errors import CheckpointError
from sparda_jax.checkpoint.weights import open_weights
from sparda_jax.config import ConfigError
from sparda_jax.model import Decoder, abstract_decoder


def load_model(
    path: str | Path,
    *,
    dtype: DTypeLike | None = None,
    forecast: str | Path | None = None,
    require_forecast: bool = False,
    device: jax.Device | None = None,  # pyright: ignore[reportInvalidTypeForm]
    check_hashes: bool = False,
) -> Decoder:
    """Loads a Hugging Face folder or one that ``python -m sparda_jax.convert`` wrote.

    Host memory holds one layer (or the embeddings) at a time. A value is rounded at most once, from the stored dtype to
    ``dtype``.

    Args:
        path: the folder.
        dtype: of the weights. None: bfloat16 on a GPU, float32 on a CPU (where bfloat16 is slower).
        forecast: a Forecast checkpoint (``.pt`` or safetensors) to use in place of the folder's own, if it has one.
        require_forecast: fail if there is no Forecast.
        device: None: the first one.
        check_hashes: compare a converted folder's values with the hashes in its manifest (slower).

    Raises:
        CheckpointError: a tensor is missing, unexpected, misshaped or damaged, or a required Forecast is missing.
        ConfigError: ``config.json`` describes a model that is not implemented, or ``dtype`` is not.
    """
    path, forecast = Path(path), None if forecast is None else Path(forecast)
    target = jax.local_devices()[0] if device is None else device
    wanted = jnp.dtype(dtype or (jnp.float32 if target.platform == "cpu" else jnp.bfloat16))
    if wanted not in (jnp.float32, jnp.bfloat16):
        raise ConfigError(f"dtype={wanted.name} is not supported: use float32 or bfloat16")
    weights = open_weights(path, forecast=forecast, check_hashes=check_hashes)
    if require_forecast and weights.forecast is None:
        raise CheckpointError(
            f"{path} has no Forecast, which mode 'sparda' needs: give its file (--forecast FILE) or put "
            "forecast.safetensors into the folder; mode 'sparse' needs none"
        )
    arrays: dict[str, jax.Array] = {}
    for item in weights.items:
        arrays |= put(weights.read_item(item), wanted, target)
    model = abstract_decoder(weights.config, has_forecast=weights.forecast is not None, dtype=wanted)
    return fill(model, arrays)


def put(
    values: dict[str, np.ndarray],
    dtype: np.dtype,
    device: jax.Device | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> dict[str, jax.Array]:
    """Moves host values to a device, one by one: each leaves ``values``, and host memory, before the next is copied."""
    arrays = {}
    for name in list(values):
        arrays[name] = jax.device_put(values.pop(name).astype(dtype, copy=False), device).block_until_ready()
    return arrays


def fill[M: nnx.Module](model: M, arrays: Mapping[str, jax.Array | np.ndarray]) -> M:
    """An abstract module with these values, by dotted path; every parameter must be given, in its shape.

    Raises:
        CheckpointError: names or shapes differ.
    """
    graphdef, state = nnx.split(model)
    flat = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(state)}
    wrong = sorted(flat.keys() ^ arrays.keys())
    wrong += [name for name in flat.keys() & arrays.keys() if flat[name][1].shape != arrays[name].shape]
    if wrong:
        raise CheckpointError.listing("the decoder", wrong, "The parameters are not those of the given tensors.")
    values = {path: leaf.replace(arrays[name]) for name, (path, leaf) in flat.items()}
    return nnx.merge(graphdef, nnx.from_flat_state(values))

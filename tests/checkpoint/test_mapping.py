"""The table of names: sizes of the published model, order of the columns, and its inverse."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparda_jax.checkpoint.mapping import Parameter, SourceTensor, decoder_parameters, forecast_tensors
from sparda_jax.config import ModelConfig, RopeConfig
from sparda_jax.model import abstract_decoder

from .checkpoints import BFLOAT16, SPECIAL_BITS, base_shapes, bits, config, forecast_shapes

MINICPM41 = ModelConfig(
    vocab_size=73448,
    hidden_size=4096,
    intermediate_size=16384,
    num_layers=32,
    num_heads=32,
    num_kv_heads=2,
    head_dim=128,
    max_position_embeddings=65536,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    rope=RopeConfig(theta=10000.0),
)


def test_published_model_has_291_tensors_and_its_parameter_count() -> None:
    parameters = decoder_parameters(MINICPM41, has_forecast=False)
    assert sum(len(parameter.tensors) for parameter in parameters) == 291
    assert sum(parameter.size for parameter in parameters) == 8_185_253_888


def test_forecast_of_the_published_model_has_33_tensors() -> None:
    tensors = forecast_tensors(MINICPM41)
    assert len(tensors) == 33
    assert sum(int(np.prod(tensor.shape)) for tensor in tensors) == 34_603_008


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("has_forecast", [False, True])
def test_parameters_are_those_of_the_decoder(tied: bool, has_forecast: bool) -> None:
    model_config = ModelConfig.from_hf(config(tie_word_embeddings=tied))
    model = abstract_decoder(model_config, has_forecast=has_forecast, dtype=jnp.bfloat16)
    state = {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(model))}
    parameters = decoder_parameters(model_config, has_forecast=has_forecast)
    assert {parameter.path: parameter.shape for parameter in parameters} == state
    names = {tensor.name: tensor.shape for parameter in parameters for tensor in parameter.tensors}
    assert names == base_shapes(tied=tied) | (forecast_shapes() if has_forecast else {})


def _parameter(path: str) -> Parameter:
    parameters = decoder_parameters(ModelConfig.from_hf(config()), has_forecast=True)
    return next(parameter for parameter in parameters if parameter.path == path)


def test_columns_are_q_k_v_future_current() -> None:
    parameter = _parameter("layers.0.self_attn.qkvf_proj.kernel")
    order = ["q_proj", "k_proj", "v_proj", "q_future_proj", "q_curr_proj"]
    assert [tensor.name.split(".")[-2] for tensor in parameter.tensors] == order
    parts = [np.full(t.shape, i, np.float32) for i, t in enumerate(parameter.tensors)]
    assert parameter.join(parts)[5].tolist() == [i for i, t in enumerate(parameter.tensors) for _ in range(t.shape[0])]


@pytest.mark.parametrize(
    "path", ["embed_tokens", "layers.0.self_attn.qkvf_proj.kernel", "layers.2.mlp.gate_up_proj.kernel"]
)
def test_split_undoes_join_for_every_bit_pattern(path: str) -> None:
    parameter = _parameter(path)
    generator = np.random.default_rng(0)
    parts = [generator.integers(0, 2**16, tensor.shape, np.uint16) for tensor in parameter.tensors]
    parts[0].flat[: SPECIAL_BITS.size] = SPECIAL_BITS
    again = parameter.split(parameter.join([part.view(BFLOAT16) for part in parts]))
    assert {name: bits(value) for name, value in again.items()} == {
        tensor.name: bits(part) for tensor, part in zip(parameter.tensors, parts, strict=True)
    }


def test_a_transpose_of_more_than_one_tile() -> None:
    tensor = SourceTensor(name="model.layers.0.mlp.down_proj.weight", shape=(1100, 700))
    parameter = Parameter(path="layers.0.mlp.down_proj.kernel", item="layers.0", tensors=(tensor,))
    value = np.random.default_rng(0).standard_normal(tensor.shape).astype(np.float32)
    assert np.array_equal(parameter.join([value]), value.T)
    assert np.array_equal(parameter.split(value.T)[tensor.name], value)

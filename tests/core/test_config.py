"""Configuration: everything comes from `config.json`, and what is wrong or not built is refused by name."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from sparda_jax.checkpoint.mapping import decoder_parameters, forecast_tensors, last_q_future
from sparda_jax.config import MINICPM41_128K_FACTORS, ConfigError, ModelConfig, RopeConfig, SparseConfig
from sparda_jax.model import abstract_decoder
from tests.oracle import toy_config

# The published MiniCPM4.1-8B (docs/semantics.md 1.1), with the sparse_config of its model card.
MINICPM41 = {
    "architectures": ["MiniCPMForCausalLM"],
    "model_type": "minicpm",
    "vocab_size": 73448,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.1,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 64,
        "long_factor": [1.0] * 64,
        "original_max_position_embeddings": 65536,
    },
    "attention_bias": False,
    "scale_emb": 12,
    "dim_model_base": 256,
    "scale_depth": 1.4,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": [2, 73440],
    "sparse_config": {
        "kernel_size": 32, "kernel_stride": 16, "init_blocks": 1, "block_size": 64, "window_size": 2048, "topk": 64,
        "use_nope": False, "dense_len": 8192,
    },
}  # fmt: skip


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(toy_config(**changes))


def test_minicpm41():
    config = ModelConfig.from_hf(MINICPM41)
    assert (config.num_heads, config.num_kv_heads, config.group_size, config.head_dim) == (32, 2, 16, 128)
    assert config.embedding_scale == 12
    assert config.residual_scale == pytest.approx(0.2474873734, abs=1e-10)
    assert config.logit_divisor == 16
    assert config.eos_token_ids == (2, 73440)
    assert (config.sparse.local_blocks, config.sparse.num_selected_blocks) == (32, 96)
    assert (config.sparse.dense_len, config.sparse.min_list_width) == (8192, 128)


def test_minicpm41_parameters_are_counted_as_published():
    """8 185 253 888 in 291 tensors; a Forecast of 33 tensors, of which all but the last layer's is trained."""
    config = ModelConfig.from_hf(MINICPM41)

    def size(has_forecast: bool) -> int:
        state = nnx.state(abstract_decoder(config, has_forecast=has_forecast, dtype=jnp.bfloat16))
        return sum(math.prod(leaf.shape) for _, leaf in nnx.to_flat_state(state))

    assert size(False) == 8_185_253_888
    assert size(True) - size(False) == 34_603_008
    assert sum(len(p.tensors) for p in decoder_parameters(config, has_forecast=False)) == 291
    forecast = forecast_tensors(config)
    assert len(forecast) == 33
    trained = sum(math.prod(t.shape) for t in forecast if t.name != last_q_future(config))
    assert trained == 33_554_432


def test_abstract_decoder_has_exactly_the_parameters_of_the_table():
    for config in (ModelConfig.from_hf(MINICPM41), read(tie_word_embeddings=True)):
        for has_forecast in (False, True):
            state = nnx.state(abstract_decoder(config, has_forecast=has_forecast, dtype=jnp.float32))
            found = {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}
            assert found == {p.path: p.shape for p in decoder_parameters(config, has_forecast=has_forecast)}


REQUIRED = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "scale_emb",
    "scale_depth", "dim_model_base",
)  # fmt: skip


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("absent", [True, False])
def test_a_missing_field_is_named(name: str, absent: bool):
    data = toy_config() | {name: None}
    if absent:
        del data[name]
    with pytest.raises(ConfigError, match=f"'{name}'"):
        ModelConfig.from_hf(data)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "qwen3"}, "model_type='qwen3'"),
        ({"architectures": ["SparseLlamaForCausalLM"]}, "architectures=.*NOSA"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is 'yes'"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_attention_heads": 6}, "num_attention_heads=6"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0"),
        ({"num_attention_heads": 64, "head_dim": 8}, "num_attention_heads=64.*16 query heads"),
        ({"dim_model_base": 0}, "dim_model_base=0"),
        ({"head_dim": 20}, "head_dim=20"),
        ({"head_dim": 512}, "head_dim=512"),
        ({"rope_theta": 1.0}, "rope_theta=1.0"),
        ({"sparse_config": {"kernel_size": 16}}, "sparse_config.kernel_size=16"),
        ({"sparse_config": {"kernel_stride": 8}}, "sparse_config.kernel_stride=8"),
        ({"sparse_config": {"block_size": 32}}, "sparse_config.block_size=32"),
        ({"sparse_config": {"init_blocks": -1}}, "sparse_config.init_blocks=-1"),
        ({"sparse_config": {"window_size": 63}}, "sparse_config.window_size=63.*local block"),
        ({"sparse_config": {"window_size": 0}}, "sparse_config.window_size=0"),
        ({"sparse_config": {"topk": 1}}, "sparse_config.topk=1"),
        ({"sparse_config": {"select_blocks": 24}}, "sparse_config.select_blocks=24.*NOSA"),
        ({"sparse_config": {"use_nope": True}}, "sparse_config.use_nope=True"),
    ],
)
def test_what_is_wrong_or_not_built_is_named(changes: dict, named: str):
    with pytest.raises(ConfigError, match=named):
        read(**changes)


NUMBERS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings rms_norm_eps rope_theta scale_emb dim_model_base scale_depth initializer_range"
).split()


@pytest.mark.parametrize("value", ["5", [5], {"a": 5}, True, float("nan"), float("inf"), 10**400, -1])
@pytest.mark.parametrize("field", NUMBERS)
def test_what_is_no_sensible_number_is_refused_by_name(field: str, value: Any):
    with pytest.raises(ConfigError, match=f"^{field}="):
        ModelConfig.from_hf(MINICPM41 | {field: value})


@pytest.mark.parametrize("value", ["5", [5], True, float("nan"), 1.5, 384.0, 10**30])
@pytest.mark.parametrize("field", ["topk", "window_size", "init_blocks", "dense_len", "block_size"])
def test_a_selection_field_is_a_whole_number(field: str, value: Any):
    with pytest.raises(ConfigError, match=f"^sparse_config.{field}="):
        SparseConfig.from_hf({field: value})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers=1000000"),
        ({"hidden_size": 384.0}, "hidden_size=384.0"),
        ({"eos_token_id": [2, "x"]}, "eos_token_id='x'"),
        ({"eos_token_id": {"a": 1}}, "eos_token_id="),
        ({"bos_token_id": [1]}, "bos_token_id="),
        ({"architectures": 5}, "architectures=5"),
        ({"sparse_config": [1]}, "sparse_config="),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn'"),
        ({"rope_parameters": [1]}, "rope_parameters="),
        ({"rope_scaling": {"rope_type": 0}}, "rope_scaling.rope_type=0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rope_scaling.factor='2'"),
        ({"rope_scaling": MINICPM41["rope_scaling"] | {"long_factor": 2.0}}, "rope_scaling.long_factor=2.0"),
        ({"rope_scaling": MINICPM41["rope_scaling"] | {"long_factor": ["a"] * 64}}, "rope_scaling.long_factor='a'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0}}, "rope_scaling.beta_fast"),
    ],
)
def test_values_of_another_kind_are_refused_by_name(changes: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match=f"^{named}"):
        ModelConfig.from_hf(MINICPM41 | changes)


def test_duplicate_ends_and_an_empty_rope_scaling_are_fine():
    config = ModelConfig.from_hf(MINICPM41 | {"eos_token_id": [2, 2, 5], "rope_scaling": {}})
    assert (config.eos_token_ids, config.rope.rope_type) == ((2, 5), "default")


@pytest.mark.parametrize("text", ["[", "[]", "5", "\xe9", "[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_files_that_are_no_json_object_are_named(name: str, text: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(MINICPM41))
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        ModelConfig.from_pretrained(tmp_path)


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 2048,
}


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "llama3", "factor": 8.0}, "rope_scaling.rope_type='llama3'"),
        ({"type": "su"}, "rope_scaling.rope_type='su'"),
        ({"rope_type": "linear"}, "rope_scaling.factor"),
        ({"rope_type": "yarn"}, "rope_scaling.factor"),
        ({"rope_type": "dynamic"}, "rope_scaling.factor"),
        ({"rope_type": "linear", "factor": 0.5}, "rope_scaling.factor=0.5"),
        ({"rope_type": "yarn", "factor": 4.0, "mscale": 1.0}, "rope_scaling=.*'mscale'"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "rope_scaling=.*'partial_rotary_factor'"),
        (LONGROPE | {"long_factor": [1.0] * 7}, "rope_scaling.short_factor/long_factor"),
        (LONGROPE | {"short_factor": [], "long_factor": []}, "rope_scaling.short_factor/long_factor"),
        (LONGROPE | {"short_factor": [0.0] * 8}, "rope_scaling.short_factor/long_factor"),
        (LONGROPE | {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4}, "rope_scaling.long_factor"),
        (LONGROPE | {"attention_factor": 1.5}, "rope_scaling.attention_factor=1.5"),
        (LONGROPE | {"original_max_position_embeddings": 1}, "rope_scaling.original_max_position_embeddings=1"),
    ],
)
def test_rope_that_is_wrong_or_not_built_is_named(scaling: dict, named: str):
    with pytest.raises(ConfigError, match=named):
        read(rope_scaling=scaling)


def test_both_forms_of_rope_are_read_alike():
    old = read(rope_theta=5e5, rope_scaling=LONGROPE)
    new = toy_config() | {"rope_parameters": LONGROPE | {"rope_theta": 5e5}}
    del new["rope_theta"], new["rope_scaling"]
    assert ModelConfig.from_hf(new).rope == old.rope
    assert old.rope == RopeConfig(
        rope_type="longrope", theta=5e5, original_max_position_embeddings=2048,
        short_factor=(1.0,) * 8, long_factor=(2.0,) * 8,
    )  # fmt: skip
    assert read(rope_scaling={"type": "linear", "factor": 2.0, "rope_type": "linear"}).rope.factor == 2
    assert read(rope_scaling={"rope_type": "default", "partial_rotary_factor": 1}).rope.rope_type == "default"
    yarn = read(rope_scaling={"type": "yarn", "factor": 4.0}).rope
    assert yarn.original_max_position_embeddings == 4096


def test_128k_factors_are_for_longrope_models_of_head_dim_128():
    rope = ModelConfig.from_hf(MINICPM41).rope.with_minicpm41_128k()
    assert rope.short_factor == rope.long_factor == MINICPM41_128K_FACTORS
    assert rope.original_max_position_embeddings == 65536
    assert len(MINICPM41_128K_FACTORS) == 64
    assert (MINICPM41_128K_FACTORS[0], MINICPM41_128K_FACTORS[-1]) == (0.9982316082870437, 126.01712561287873)
    for other in (read(), read(rope_scaling=LONGROPE)):
        with pytest.raises(ConfigError, match="128K factors"):
            other.rope.with_minicpm41_128k()


def test_sparse_config_merge_order():
    """Model card < config.json < Forecast checkpoint (docs/semantics.md 8.3); a null is no value."""
    assert SparseConfig.from_hf(None, None) == SparseConfig()
    merged = SparseConfig.from_hf(
        {"topk": 32, "dense_len": 100, "init_blocks": None}, {"topk": 48, "window_size": None}
    )
    assert merged == SparseConfig(topk=48, dense_len=100)
    from_files = ModelConfig.from_hf(toy_config(sparse_config={"dense_len": 7}), None, {"dense_len": 99, "topk": 5})
    assert (from_files.sparse.dense_len, from_files.sparse.topk, from_files.sparse.window_size) == (99, 5, 128)
    assert ModelConfig.from_hf(toy_config() | {"sparse_config": None}).sparse == SparseConfig()


def test_effective_topk_is_96():
    """`topk` 64 beside a window of 2048 means 96 in all, in every mode: one field for all (docs/semantics.md 13.48)."""
    assert SparseConfig(topk=64, window_size=2048).num_selected_blocks == 96
    assert SparseConfig(topk=80, window_size=1024).num_selected_blocks == 96
    assert SparseConfig(topk=2, window_size=128).num_selected_blocks == 4
    with pytest.raises(ConfigError, match="4 blocks that are always selected"):
        SparseConfig(topk=1, window_size=128)


def test_list_width_holds_a_request_below_dense_len():
    assert SparseConfig(dense_len=-1).min_list_width == 96
    assert SparseConfig(dense_len=96 * 64).min_list_width == 96
    assert SparseConfig(dense_len=96 * 64 + 1).min_list_width == 97


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [
        (2, None, (2,)),
        (2, [2, 73440], (2, 73440)),
        ([5, 6], 7, (5, 6, 7)),
        (None, None, ()),
        (None, 3, (3,)),
        (0, 0, (0,)),
    ],
)
def test_eos_ids_are_the_union_of_both_files(own, generation, expected, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(toy_config(eos_token_id=own)))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == expected


def test_a_folder_without_config_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        ModelConfig.from_pretrained(tmp_path)


def test_llama_models_have_no_scales():
    data = {k: v for k, v in toy_config(model_type="llama").items() if not k.startswith(("scale_", "dim_model"))}
    config = ModelConfig.from_hf(data)
    assert (config.embedding_scale, config.residual_scale, config.logit_divisor) == (1, 1, 1)


def test_configs_are_frozen():
    config = read()
    for part in (config, config.rope, config.sparse):
        with pytest.raises(dataclasses.FrozenInstanceError):
            part.__setattr__(dataclasses.fields(part)[0].name, 1)

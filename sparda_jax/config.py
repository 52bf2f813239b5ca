"""Model, RoPE and sparsity configuration: frozen, validated, read from a Hugging Face ``config.json``."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from sparda_jax.config_checks import (
    ConfigError,
    as_list,
    as_object,
    check,
    check_number,
    check_numbers,
    read_config_file,
    take,
    take_bool,
    take_number,
)

__all__ = ["MINICPM41_128K_FACTORS", "ConfigError", "ModelConfig", "RopeConfig", "RopeType", "SparseConfig"]

RopeType = Literal["default", "linear", "dynamic", "longrope", "yarn"]

# LongRoPE factors of MiniCPM4.1's 128K mode (docs/semantics.md section 1.4), for head_dim 128.
MINICPM41_128K_FACTORS: tuple[float, ...] = tuple(
    float(x)
    for x in """
0.9982316082870437 1.033048153422584 1.0749920956484724 1.1255096879436193 1.1863348602111476 1.259543828902579
1.3476188888731149 1.4535223827776373 1.5807816745852985 1.7335856049489526 1.9168922912975785 2.1365471404135326
2.3994084200118646 2.713475511863602 3.0880118452194134 3.533650295140154 4.062463396503134 4.687974098908333
5.425075306704039 6.289818967956352 7.29902962722721 8.6357018163639 10.210822723989212 12.053807765671676
14.193944598909404 16.65780676784363 19.463620727694074 22.628311203524586 26.150106147261315 30.02526691405111
34.23183327975347 38.73811934094828 43.502489489729555 48.47627117965394 53.61139491762471 58.857366522037935
64.16798299215064 69.51359464319125 74.86555458220285 80.21497790341579 85.55322183307433 90.89611806932027
96.26245306514224 101.68269304046481 107.18619510219668 112.82253283014026 118.63764063163615 119.88866203644656
120.9462882391725 121.837565139014 122.58663780572562 123.2147719894291 123.74049454862576 124.17980424685767
124.54641761955492 124.85202548028222 125.10654406389756 125.31835105170659 125.49450117164764 125.64091910903052
125.76256945356558 125.86360463815589 125.94749252260765 126.01712561287873
""".split()
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (docs/semantics.md sections 1.3 and 1.4).

    Attributes:
        rope_type: default, linear, dynamic (NTK), longrope or yarn, with the semantics of Hugging Face transformers.
        theta: base of the frequencies.
        factor: scaling of linear, dynamic and yarn.
        original_max_position_embeddings: trained length of longrope and yarn.
        short_factor, long_factor: longrope's divisors, one per frequency (head_dim / 2 of each).
        attention_factor: yarn's scale of cos and sin; None derives it from ``factor``.
        beta_fast, beta_slow: yarn's correction range, in rotations.
    """

    rope_type: RopeType = "default"
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        known = ("default", "linear", "dynamic", "longrope", "yarn")
        check(self.rope_type in known, "rope_scaling.rope_type", self.rope_type, f"use one of {', '.join(known)}")
        check_numbers(self, {"theta": "rope_theta"}, "rope_scaling.")
        check(self.theta > 1, "rope_theta", self.theta, "it must be larger than 1")
        check(self.factor >= 1, "rope_scaling.factor", self.factor, "it must be at least 1")
        check(
            self.attention_factor is None or self.rope_type == "yarn",
            "rope_scaling.attention_factor",
            self.attention_factor,
            "only yarn's is implemented",
        )
        betas = (self.beta_fast, self.beta_slow)
        check(betas[0] > betas[1] > 0, "rope_scaling.beta_fast/beta_slow", betas, "the first must exceed the second")
        if self.rope_type in ("longrope", "yarn"):
            original = self.original_max_position_embeddings
            check(
                original is not None and original > 1,
                "rope_scaling.original_max_position_embeddings",
                original,
                f"{self.rope_type} needs the trained length",
            )
        if self.rope_type == "longrope":
            sizes = (len(self.short_factor), len(self.long_factor))
            check(
                sizes[0] == sizes[1] > 0 and min(self.short_factor + self.long_factor) > 0,
                "rope_scaling.short_factor/long_factor",
                f"lists of {sizes[0]} and {sizes[1]}",
                "longrope needs two lists of head_dim / 2 positive factors",
            )

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> "RopeConfig":
        """Reads ``rope_theta`` and ``rope_scaling``, or ``rope_parameters`` as newer files write them."""
        newer = as_object(data.get("rope_parameters"), "rope_parameters")
        scaling = dict(newer or as_object(data.get("rope_scaling"), "rope_scaling"))
        if (theta := scaling.pop("rope_theta", None)) is None:
            theta = take(data, "rope_theta")
        check_number("rope_theta", theta, float)
        kinds = (scaling.pop("rope_type", None), scaling.pop("type", None), "default")
        kind: Any = next(k for k in kinds if k is not None)
        original = scaling.pop("original_max_position_embeddings", None)
        if original is None and kind in ("longrope", "yarn"):
            original = data.get("original_max_position_embeddings") or take(data, "max_position_embeddings")
        names = {f.name for f in dataclasses.fields(cls)}
        values = {k: v for k, v in scaling.items() if k in names and v is not None}
        if scaling.get("partial_rotary_factor") == 1:
            del scaling["partial_rotary_factor"]
        unknown = sorted(set(scaling) - names)
        check(not unknown, "rope_scaling", unknown, "these fields would change the rotation and are not implemented")
        if kind in ("linear", "dynamic", "yarn"):
            check("factor" in values, "rope_scaling.factor", None, f"{kind} needs it (no default is used)")
        for name in ("short_factor", "long_factor"):
            values[name] = tuple(as_list(values.get(name), f"rope_scaling.{name}"))
        return cls(rope_type=kind, theta=float(theta), original_max_position_embeddings=original, **values)

    def with_minicpm41_128k(self) -> "RopeConfig":
        """The published 128K factors in place of both lists; only for a longrope model of head_dim 128.

        Raises:
            ConfigError: when the model's own rope is not longrope over 64 frequencies.
        """
        check(
            self.rope_type == "longrope" and len(self.long_factor) == len(MINICPM41_128K_FACTORS),
            "rope_scaling.rope_type",
            self.rope_type,
            "the MiniCPM4.1 128K factors apply to a longrope model with head_dim 128 only",
        )
        return dataclasses.replace(
            self,
            short_factor=MINICPM41_128K_FACTORS,
            long_factor=MINICPM41_128K_FACTORS,
            original_max_position_embeddings=65536,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseConfig:
    """Block selection (docs/semantics.md section 2). The defaults are those of MiniCPM4.1's model card.

    Attributes:
        kernel_size, kernel_stride: window and step of the compressed keys, in tokens.
        block_size: tokens of one KV block.
        init_blocks: blocks at the start of the sequence that are always selected.
        window_size: tokens of the local window; ``local_blocks = window_size // block_size`` blocks before the
            current one, and the current one itself, are always selected.
        topk: selected blocks besides the local window, as ``config.json`` counts them.
        dense_len: a request attends densely while it has fewer tokens; 0 or less: never.
    """

    kernel_size: int = 32
    kernel_stride: int = 16
    block_size: int = 64
    init_blocks: int = 1
    window_size: int = 2048
    topk: int = 64
    dense_len: int = 8192

    def __post_init__(self) -> None:
        check_numbers(self, {}, "sparse_config.")
        fixed = {"kernel_size": 32, "kernel_stride": 16, "block_size": 64}
        for name, value in fixed.items():
            check(getattr(self, name) == value, f"sparse_config.{name}", getattr(self, name), f"it must be {value}")
        check(self.init_blocks >= 0, "sparse_config.init_blocks", self.init_blocks, "it must not be negative")
        check(
            self.window_size >= self.block_size,
            "sparse_config.window_size",
            self.window_size,
            f"at least one local block is needed, so use {self.block_size} or more",
        )
        forced = self.init_blocks + self.local_blocks + 1
        check(
            self.num_selected_blocks >= forced,
            "sparse_config.topk",
            self.topk,
            f"topk + local_blocks must hold the {forced} blocks that are always selected",
        )

    @property
    def local_blocks(self) -> int:
        """Whole blocks before the query's own that are always selected."""
        return self.window_size // self.block_size

    @property
    def num_selected_blocks(self) -> int:
        """Blocks that a (token, KV head) attends to, the forced ones included: the one width of every mode."""
        return self.topk + self.local_blocks

    @property
    def windows_per_block(self) -> int:
        return self.block_size // self.kernel_stride

    @property
    def min_list_width(self) -> int:
        """Width of a block list that can hold a sparse selection or a whole request below ``dense_len``."""
        return max(self.num_selected_blocks, math.ceil(max(self.dense_len, 0) / self.block_size))

    @classmethod
    def from_hf(cls, *layers: Mapping[str, Any] | None) -> "SparseConfig":
        """Merges ``sparse_config`` dictionaries; later ones win (model card < config.json < Forecast checkpoint).

        Raises:
            ConfigError: for NOSA's two-stage selection and for options that change the result and are not built.
        """
        merged: dict[str, Any] = {}
        for layer in layers:
            merged |= {k: v for k, v in as_object(layer, "sparse_config").items() if v is not None}
        check("select_blocks" not in merged, "sparse_config.select_blocks", merged.get("select_blocks"), NOSA_REFUSED)
        check(not merged.get("use_nope"), "sparse_config.use_nope", True, "keys are compressed after RoPE only")
        names = {f.name for f in dataclasses.fields(cls)}
        return cls(**{k: v for k, v in merged.items() if k in names})


# More than any published model; a size beyond it is a broken file.
MAX_LAYERS = 1000

# What config.json calls the fields that have another name here.
_HF_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "embedding_scale": "scale_emb",
    "residual_scale": "scale_depth",
    "logit_divisor": "dim_model_base",
    "eos_token_ids": "eos_token_id",
}

NOSA_REFUSED = "NOSA models (two-stage selection with an eviction head) are not implemented yet"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A MiniCPM4.1-style (or plain Llama) decoder (docs/semantics.md section 1).

    Attributes:
        vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: sizes.
        max_position_embeddings: trained context, in tokens.
        rms_norm_eps: epsilon of every RMSNorm.
        initializer_range: standard deviation of freshly made weights.
        embedding_scale: multiplies the token embeddings (``scale_emb``).
        residual_scale: multiplies each branch before it is added (``scale_depth / sqrt(num_layers)``).
        logit_divisor: divides the final hidden state (``hidden_size / dim_model_base``).
        tie_word_embeddings: the LM head is the embedding table.
        bos_token_id: put in front of a prompt, or None.
        eos_token_ids: each of them ends a generation.
        rope, sparse: see there.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    initializer_range: float = 0.02
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    tie_word_embeddings: bool
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    rope: RopeConfig
    sparse: SparseConfig = SparseConfig()

    def __post_init__(self) -> None:
        check_numbers(self, _HF_NAMES)
        sizes = "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads max_position_embeddings"
        for name in sizes.split():
            check(getattr(self, name) > 0, _HF_NAMES.get(name, name), getattr(self, name), "it must be positive")
        for name in ("rms_norm_eps", "embedding_scale", "residual_scale", "logit_divisor"):
            check(getattr(self, name) > 0, _HF_NAMES.get(name, name), getattr(self, name), "it must be positive")
        check(self.initializer_range >= 0, "initializer_range", self.initializer_range, "it must not be negative")
        check(self.num_layers <= MAX_LAYERS, "num_hidden_layers", self.num_layers, f"at most {MAX_LAYERS}")
        check(
            self.num_heads % self.num_kv_heads == 0,
            "num_key_value_heads",
            self.num_kv_heads,
            f"it must divide num_attention_heads={self.num_heads}",
        )
        check(self.group_size <= 16, "num_attention_heads", self.num_heads, "at most 16 query heads per KV head")
        check(
            self.head_dim % 8 == 0 and 0 < self.head_dim <= 256, "head_dim", self.head_dim, "a multiple of 8 up to 256"
        )
        if self.rope.rope_type == "longrope":
            count = len(self.rope.long_factor)
            check(count == self.head_dim // 2, "rope_scaling.long_factor", f"list of {count}", "need head_dim / 2")

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def num_forecast_heads(self, layer: int) -> int:
        """Forecast outputs of a layer, in heads: one per KV head, and layer 0 has its own ``q_curr`` as well."""
        return self.num_kv_heads * (2 if layer == 0 else 1)

    @classmethod
    def from_hf(
        cls,
        data: Mapping[str, Any],
        generation: Mapping[str, Any] | None = None,
        forecast_sparse_config: Mapping[str, Any] | None = None,
    ) -> "ModelConfig":
        """Reads the contents of ``config.json``, ``generation_config.json`` and a Forecast's own ``sparse_config``.

        Raises:
            ConfigError: a required field is missing, or a value is outside what is implemented.
        """
        data, generation = as_object(data, "config.json"), as_object(generation, "generation_config.json")
        kind = take(data, "model_type")
        check(kind in ("minicpm", "llama"), "model_type", kind, "use a minicpm or llama model")
        architectures = " ".join(map(str, as_list(data.get("architectures"), "architectures")))
        check(
            "Sparse" not in architectures and "NOSA" not in architectures, "architectures", architectures, NOSA_REFUSED
        )
        check(data.get("hidden_act", "silu") == "silu", "hidden_act", data.get("hidden_act"), "only silu")
        for name in ("attention_bias", "mlp_bias"):
            check(not data.get(name), name, data.get(name), "only projections without bias")
        check(data.get("pretraining_tp", 1) == 1, "pretraining_tp", data.get("pretraining_tp"), "only 1")
        hidden, heads, layers = (
            take_number(data, n, int) for n in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        for name, value in (("hidden_size", hidden), ("num_attention_heads", heads), ("num_hidden_layers", layers)):
            check(value > 0, name, value, "it must be positive")
        head_dim = data.get("head_dim")
        if head_dim is None:
            check(hidden % heads == 0, "num_attention_heads", heads, f"it must divide hidden_size={hidden}")
            head_dim = hidden // heads
        check_number("head_dim", head_dim, int)
        scales: dict[str, float] = {}
        if kind == "minicpm":
            base = take_number(data, "dim_model_base", float)
            check(base > 0, "dim_model_base", base, "it must be positive")
            scales = {
                "embedding_scale": take_number(data, "scale_emb", float),
                "residual_scale": take_number(data, "scale_depth", float) / math.sqrt(layers),
                "logit_divisor": hidden / base,
            }
        return cls(
            vocab_size=take(data, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=take(data, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=take(data, "num_key_value_heads"),
            head_dim=head_dim,
            max_position_embeddings=take(data, "max_position_embeddings"),
            rms_norm_eps=take(data, "rms_norm_eps"),
            initializer_range=data.get("initializer_range") or 0.02,
            tie_word_embeddings=take_bool(data, "tie_word_embeddings"),
            bos_token_id=data.get("bos_token_id"),
            eos_token_ids=_eos_ids(data, generation),
            rope=RopeConfig.from_hf(data),
            sparse=SparseConfig.from_hf(data.get("sparse_config"), forecast_sparse_config),
            **scales,
        )

    @classmethod
    def from_pretrained(
        cls, path: str | Path, forecast_sparse_config: Mapping[str, Any] | None = None
    ) -> "ModelConfig":
        """Reads ``config.json`` (and ``generation_config.json`` where present) of a checkpoint folder."""
        folder = Path(path)
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"{folder} holds no config.json; give the folder of a Hugging Face or converted checkpoint"
            )
        data = read_config_file(folder / "config.json")
        generation_file = folder / "generation_config.json"
        generation = read_config_file(generation_file) if generation_file.is_file() else None
        return cls.from_hf(data, generation, forecast_sparse_config)


def _eos_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    """The union of the end-of-sequence ids of all files, in order: each of them must stop a generation."""
    ids: dict[int, None] = {}
    for source in sources:
        value = source.get("eos_token_id")
        given = value if isinstance(value, list) else [] if value is None else [value]
        for item in given:
            check_number("eos_token_id", item, int)
        ids |= dict.fromkeys(given)
    return tuple(ids)

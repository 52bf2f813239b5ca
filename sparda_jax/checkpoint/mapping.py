"""Hugging Face tensor names <-> the decoder's parameters (docs/semantics.md 8.1, 8.3): a table, nothing is read.

PyTorch stores a linear map as ``[out, in]``. A ``kernel`` is ``[in, out]``:
the transpose of its tensors, stacked by rows.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from sparda_jax.config import ModelConfig

# Parameter of a layer -> the tensors that it joins, in the order of its columns; `_layer_names` adds the Forecast's.
_LAYER: Mapping[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attn.qkvf_proj.kernel": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "self_attn.o_proj.kernel": ("self_attn.o_proj.weight",),
    "post_attention_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.gate_up_proj.kernel": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down_proj.kernel": ("mlp.down_proj.weight",),
}
FORECAST_NAME = re.compile(r"q_(future|curr)_proj")
Q_FUTURE, Q_CURR = "self_attn.q_future_proj.weight", "self_attn.q_curr_proj.weight"
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"

# Buffers that older exports carry; they follow from config.json.
HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$")
# Tensors of related models, and why a model that has them is refused.
UNSUPPORTED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\.self_attn\.(A|delta\..+)$"), "NOSA's eviction head is not implemented"),
    (re.compile(r"\.self_attn\.[qk]_norm\."), "norms of q and k are not implemented"),
    (re.compile(r"\.bias$"), "projections with a bias are not implemented"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceTensor:
    """A tensor of the Hugging Face layout: its name and its shape (``[out, in]`` or ``[size]``)."""

    name: str
    shape: tuple[int, ...]

    @property
    def is_forecast(self) -> bool:
        return FORECAST_NAME.search(self.name) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of :class:`~sparda_jax.model.Decoder` and the tensors that it is made of.

    Attributes:
        path: dotted path in the model's state, as ``layers.0.self_attn.o_proj.kernel``.
        item: the stored piece that holds it: ``embed_tokens``, ``layers.N`` or ``head``.
        tensors: stacked by rows; a ``kernel`` is the transpose of the stack.
    """

    path: str
    item: str
    tensors: tuple[SourceTensor, ...]

    @property
    def is_transposed(self) -> bool:
        return self.path.endswith(".kernel")

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(t.shape[0] for t in self.tensors)
        return (self.tensors[0].shape[1], rows) if self.is_transposed else (rows, *self.tensors[0].shape[1:])

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """The parameter from its tensors' values (all of one dtype): a fresh array, bit for bit."""
        dtype = arrays[0].dtype
        bits = np.dtype(f"u{dtype.itemsize}")  # copies of plain integers are fast, and no NaN can be touched
        joined = np.empty(self.shape, bits)
        start = 0
        for tensor, array in zip(self.tensors, arrays, strict=True):
            stop = start + tensor.shape[0]
            if self.is_transposed:
                _copy_transposed(joined[:, start:stop], array.view(bits))
            else:
                joined[start:stop] = array.view(bits)
            start = stop
        return joined.view(dtype)

    def split(self, value: np.ndarray) -> dict[str, np.ndarray]:
        """The inverse of :meth:`join`: name -> values in PyTorch's layout (views where no transpose is needed)."""
        stops = np.cumsum([t.shape[0] for t in self.tensors])[:-1]
        if not self.is_transposed:
            return dict(zip((t.name for t in self.tensors), np.split(value, stops), strict=True))
        bits = np.dtype(f"u{value.dtype.itemsize}")
        parts = {}
        for tensor, columns in zip(self.tensors, np.split(value.view(bits), stops, axis=1), strict=True):
            parts[tensor.name] = np.empty(tensor.shape, bits)
            _copy_transposed(parts[tensor.name], columns)
        return {name: part.view(value.dtype) for name, part in parts.items()}


def _copy_transposed(target: np.ndarray, source: np.ndarray, tile: int = 512) -> None:
    """``target[...] = source.T`` in tiles that fit a CPU cache: several times faster than one strided copy."""
    for row in range(0, source.shape[0], tile):
        for column in range(0, source.shape[1], tile):
            piece = source[row : row + tile, column : column + tile]
            target[column : column + tile, row : row + tile] = piece.T


def _layer_names(layer: int, has_forecast: bool) -> dict[str, tuple[str, ...]]:
    names = dict(_LAYER)
    if has_forecast:
        names["self_attn.qkvf_proj.kernel"] += (Q_FUTURE, Q_CURR) if layer == 0 else (Q_FUTURE,)
    return names


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, ffn = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        Q_FUTURE: (kv, hidden),
        Q_CURR: (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }


def decoder_parameters(config: ModelConfig, *, has_forecast: bool) -> tuple[Parameter, ...]:
    """Every parameter of the decoder, in the order of the forward pass; parameters of one item are neighbours."""
    table = (config.vocab_size, config.hidden_size)
    embedding = SourceTensor(name=EMBEDDING, shape=table)
    parameters = [Parameter(path="embed_tokens", item="embed_tokens", tensors=(embedding,))]
    shapes = _shapes(config)
    for layer in range(config.num_layers):
        for path, names in _layer_names(layer, has_forecast).items():
            tensors = tuple(SourceTensor(name=f"model.layers.{layer}.{n}", shape=shapes[n]) for n in names)
            parameters.append(Parameter(path=f"layers.{layer}.{path}", item=f"layers.{layer}", tensors=tensors))
    norm = SourceTensor(name="model.norm.weight", shape=(config.hidden_size,))
    parameters.append(Parameter(path="norm.weight", item="head", tensors=(norm,)))
    if not config.tie_word_embeddings:
        head = SourceTensor(name=LM_HEAD, shape=table)
        parameters.append(Parameter(path="lm_head.kernel", item="head", tensors=(head,)))
    return tuple(parameters)


def forecast_tensors(config: ModelConfig) -> tuple[SourceTensor, ...]:
    """The tensors of a Forecast checkpoint: ``q_future_proj`` of every layer and layer 0's ``q_curr_proj``."""
    parameters = decoder_parameters(config, has_forecast=True)
    return tuple(t for parameter in parameters for t in parameter.tensors if t.is_forecast)


def last_q_future(config: ModelConfig) -> str:
    """The one Forecast tensor that nothing reads: the last layer has no next layer (docs/semantics.md section 5.3)."""
    return f"model.layers.{config.num_layers - 1}.{Q_FUTURE}"

"""A whole MiniCPM-style decoder for one sequence, with every selection mode (docs/semantics.md 1, 2.3, 5.3, 7)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.oracle import infinigen, rope
from tests.oracle.attention import block_sparse_attention, dense_attention
from tests.oracle.compress import compress_keys
from tests.oracle.numerics import Numerics, linear, rms_norm, silu
from tests.oracle.select import forecast_score, pool_blocks, select_blocks, stage1_score, visible_stage1

MODES = ("dense", "sparse", "sparda", "sparda_decode_only", "infinigen")
CALIBRATION_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class SparseSettings:
    """`sparse_config` with the defaults of section 2.1; `total_blocks` counts the forced ones (topk + local_blocks)."""

    kernel_size: int
    kernel_stride: int
    init_blocks: int
    block_size: int
    local_blocks: int
    total_blocks: int
    dense_len: int
    num_channels: int

    @staticmethod
    def read(config: Mapping[str, Any]) -> "SparseSettings":
        """From an HF config dict; a missing `sparse_config` means all defaults."""
        sparse = config.get("sparse_config") or {}
        block_size = sparse.get("block_size", 64)
        local_blocks = sparse.get("window_size", 2048) // block_size
        return SparseSettings(
            kernel_size=sparse.get("kernel_size", 32),
            kernel_stride=sparse.get("kernel_stride", 16),
            init_blocks=sparse.get("init_blocks", 1),
            block_size=block_size,
            local_blocks=local_blocks,
            total_blocks=sparse.get("topk", 64) + local_blocks,
            dense_len=sparse.get("dense_len", 8192),
            num_channels=sparse.get("infinigen_num_channels", 32),
        )


@dataclass(frozen=True, kw_only=True)
class LayerState:
    """What one layer keeps: post-RoPE `k`, `v` [S, Hk, D]; for InfiniGen also its basis, channels, partial keys."""

    k: np.ndarray
    v: np.ndarray
    basis: np.ndarray | None = None
    channels: np.ndarray | None = None
    partial: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class OracleState:
    """A sequence between two decode steps. `decode` makes a new one; the old one stays usable."""

    weights: Mapping[str, np.ndarray]
    config: Mapping[str, Any]
    mode: str
    numerics: Numerics
    table_len: int | None
    layers: tuple[LayerState, ...] = ()

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(self.layers[0].k) if self.layers else 0


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a layer chose its blocks; the fields are the entries of `OracleResult`'s lists."""

    ids: np.ndarray
    score: np.ndarray
    pooled: np.ndarray
    k1: np.ndarray


@dataclass(frozen=True, kw_only=True)
class OracleResult:
    """What a forward call of T tokens gave. Lists have one entry per layer; L = num_hidden_layers.

    Attributes:
        logits: [T, vocab].
        selections: int32 [Hk, T, k], ascending, -1 last; None where the layer attended densely.
        scores: what was pooled: [Hk, T, n1] (InfiniGen decode: [Hk, 1, S]); None if dense.
        pooled: block scores [Hk, T, num_blocks], +inf where forced; None if dense.
        k1: compressed keys [n1, Hk, D] after this call; None if dense.
        forecasts: post-RoPE Forecast [T, Hk, D] of each layer, meant for the next; empty without Forecast weights.
        q_curr: layer 0's own prediction [T, Hk, D], or None.
        hidden: L + 1 arrays [T, hidden_size]: the residual before each layer, then the output of the final norm.
        attention: attention outputs [T, H, D] before o_proj.
        state: pass it to `decode`.
    """

    logits: np.ndarray
    state: OracleState
    q_curr: np.ndarray | None = None
    selections: list[np.ndarray | None] = field(default_factory=list)
    scores: list[np.ndarray | None] = field(default_factory=list)
    pooled: list[np.ndarray | None] = field(default_factory=list)
    k1: list[np.ndarray | None] = field(default_factory=list)
    forecasts: list[np.ndarray] = field(default_factory=list)
    hidden: list[np.ndarray] = field(default_factory=list)
    attention: list[np.ndarray] = field(default_factory=list)

    def routing(self, layer: int) -> Routing:
        """The selection of a layer that was not dense; ValueError if it was."""
        ids, score, pooled, k1 = self.selections[layer], self.scores[layer], self.pooled[layer], self.k1[layer]
        if ids is None or score is None or pooled is None or k1 is None:
            raise ValueError(f"layer {layer} attended densely; it selected nothing")
        return Routing(ids=ids, score=score, pooled=pooled, k1=k1)


def forward(
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    tokens: Sequence[int] | np.ndarray,
    mode: str = "sparda",
    *,
    bf16: bool = False,
    dtype: type = np.float64,
    ref_compat: bool = False,
    forced: Sequence[np.ndarray | None] | None = None,
    basis: Sequence[np.ndarray] | None = None,
    table_len: int | None = None,
    batch_max_len: int | None = None,
) -> OracleResult:
    """Prefill of one whole prompt.

    Args:
        weights: HF names -> arrays [out, in] of any float dtype. The head may be missing if the config ties it.
        config: config.json as a dict, with `sparse_config`.
        tokens: T >= 1 ids.
        mode: one of `MODES`. Below `dense_len` every mode but infinigen is dense.
        bf16, dtype, ref_compat: see `Numerics`.
        forced: per layer the selection [Hk, T, k] to use in place of the computed one (which is still returned).
        basis: InfiniGen bases [Hk, D, D] per layer; None calibrates on this prompt's first 2048 tokens.
        table_len: length of the RoPE table, which picks longrope factors; None is max_position_embeddings.
        batch_max_len: longest prompt of the batch; used only with ref_compat (quirk Q3).

    Raises:
        ValueError: unknown mode, or no tokens.
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; known: {', '.join(MODES)}")
    tokens = np.asarray(tokens)
    if tokens.size == 0:
        raise ValueError("tokens is empty; a prefill needs at least one token")
    numerics = Numerics(dtype=dtype, bf16=bf16, ref_compat=ref_compat)
    state = OracleState(
        weights={name: numerics.round(numerics.cast(w)) for name, w in weights.items()},
        config=config,
        mode=mode,
        numerics=numerics,
        table_len=table_len,
    )
    return _run(state, tokens, forced, basis, batch_max_len)


def decode(state: OracleState, token: int, *, forced: Sequence[np.ndarray | None] | None = None) -> OracleResult:
    """One more token after `forward` or `decode`; the result's arrays have T = 1. `forced` as in `forward`."""
    if not state.layers:
        raise ValueError("state has no tokens; call forward first")
    return _run(state, np.asarray([token]), forced, None, None)


def decode_many(
    state: OracleState, tokens: Sequence[int] | np.ndarray, *, forced: Sequence[Sequence[np.ndarray]] | None = None
) -> list[OracleResult]:
    """`decode` for each of `tokens` in turn; `forced[step][layer]`. One result per step, its state included."""
    results = []
    for i, token in enumerate(tokens):
        results.append(decode(state, int(token), forced=None if forced is None else forced[i]))
        state = results[-1].state
    return results


@dataclass(frozen=True, kw_only=True)
class _Call:
    """What all layers of one forward call share."""

    state: OracleState
    sparse: SparseSettings
    positions: np.ndarray
    is_decode: bool
    batch_max_len: int

    @property
    def is_dense(self) -> bool:
        if self.state.mode == "infinigen":
            return False
        return self.state.mode == "dense" or self.positions[-1] + 1 < self.sparse.dense_len


def _run(
    state: OracleState,
    tokens: np.ndarray,
    forced: Sequence[np.ndarray | None] | None,
    basis: Sequence[np.ndarray] | None,
    batch_max_len: int | None,
) -> OracleResult:
    config, num, w = state.config, state.numerics, state.weights
    positions = np.arange(state.length, state.length + len(tokens))
    call = _Call(
        state=state,
        sparse=SparseSettings.read(config),
        positions=positions,
        is_decode=state.length > 0,
        batch_max_len=max(batch_max_len or 0, len(tokens)),
    )
    cos, sin = rope.tables(dict(config), positions, state.table_len)
    num_layers, eps = config["num_hidden_layers"], config["rms_norm_eps"]
    residual_scale = config.get("scale_depth", 1.0) / math.sqrt(num_layers)
    embed = w["model.embed_tokens.weight"]
    x = num.round(embed[tokens] * config.get("scale_emb", 1.0))

    def heads(name: str, n: np.ndarray) -> np.ndarray:
        return linear(n, w[name], num).reshape(len(n), -1, rope.head_dim(dict(config)))

    def rotated(name: str, n: np.ndarray) -> np.ndarray:
        return num.round(rope.rotate(heads(name, n), cos, sin))

    result = OracleResult(logits=np.zeros(0), state=state)
    layers: list[LayerState] = []
    prediction = q_curr = n_before = None
    for i in range(num_layers):
        result.hidden.append(x)
        name = f"model.layers.{i}."
        n = rms_norm(x, w[name + "input_layernorm.weight"], eps, num)
        q, k = rotated(name + "self_attn.q_proj.weight", n), rotated(name + "self_attn.k_proj.weight", n)
        v = heads(name + "self_attn.v_proj.weight", n)
        if i == 0 and name + "self_attn.q_curr_proj.weight" in w:
            prediction = q_curr = rotated(name + "self_attn.q_curr_proj.weight", n)
        old = state.layers[i] if state.layers else None
        layer = _extend(old, q, k, v, call, basis[i] if basis else None)
        layers.append(layer)
        if call.is_dense:
            score = pooled = ids = k1 = None
        else:
            # InfiniGen asks with this layer's queries as the previous layer's input would make them.
            q_hat = None
            if n_before is not None and call.is_decode:
                q_hat = rotated(name + "self_attn.q_proj.weight", n_before)
            score, pooled, ids, k1 = _select(call, layer, old, q, q_hat, prediction)
        used = forced[i] if forced is not None and forced[i] is not None else ids
        a = (
            dense_attention(q, layer.k, layer.v, num)
            if used is None
            else block_sparse_attention(q, layer.k, layer.v, used, call.sparse.block_size, num)
        )
        result.attention.append(a)
        out = linear(a.reshape(len(n), -1), w[name + "self_attn.o_proj.weight"], num)
        x = num.round(x + num.round(out * residual_scale))
        x = num.round(x + num.round(_mlp(x, w, name, eps, num) * residual_scale))
        for values, value in zip(
            (result.selections, result.scores, result.pooled, result.k1), (ids, score, pooled, k1), strict=True
        ):
            values.append(value)
        if name + "self_attn.q_future_proj.weight" in w:
            prediction = rotated(name + "self_attn.q_future_proj.weight", n)
            result.forecasts.append(prediction)
        n_before = n
    x = rms_norm(x, w["model.norm.weight"], eps, num)
    result.hidden.append(x)
    head = embed if config.get("tie_word_embeddings") else w["lm_head.weight"]
    divisor = config["hidden_size"] / config.get("dim_model_base", config["hidden_size"])
    logits = linear(num.round(x / divisor), head, num)
    return replace(result, logits=logits, state=replace(state, layers=tuple(layers)), q_curr=q_curr)


def _mlp(x: np.ndarray, w: Mapping[str, np.ndarray], name: str, eps: float, num: Numerics) -> np.ndarray:
    n = rms_norm(x, w[name + "post_attention_layernorm.weight"], eps, num)
    gate = num.round(silu(linear(n, w[name + "mlp.gate_proj.weight"], num)))
    up = linear(n, w[name + "mlp.up_proj.weight"], num)
    return linear(num.round(gate * up), w[name + "mlp.down_proj.weight"], num)


def _extend(
    old: LayerState | None, q: np.ndarray, k: np.ndarray, v: np.ndarray, call: _Call, basis: np.ndarray | None
) -> LayerState:
    """The layer's state after this call's tokens."""
    num = call.state.numerics
    if old is not None:
        partial = old.partial
        if partial is not None and old.basis is not None and old.channels is not None:
            new = infinigen.partial_keys(k, old.basis, old.channels, num)
            partial = np.concatenate([partial, new])
        return LayerState(
            k=np.concatenate([old.k, k]),
            v=np.concatenate([old.v, v]),
            basis=old.basis,
            channels=old.channels,
            partial=partial,
        )
    if call.state.mode != "infinigen":
        return LayerState(k=k, v=v)
    if basis is None:
        basis = infinigen.calibrate(q[:CALIBRATION_TOKENS], k[:CALIBRATION_TOKENS])
    basis = num.cast(basis)
    channels = infinigen.choose_channels(q, basis, call.sparse.num_channels)
    partial = infinigen.partial_keys(k, basis, channels, num)
    return LayerState(k=k, v=v, basis=basis, channels=channels, partial=partial)


def _select(
    call: _Call,
    layer: LayerState,
    old: LayerState | None,
    q: np.ndarray,
    q_hat: np.ndarray | None,
    prediction: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Score, block scores, block ids and compressed keys of one layer."""
    s, num, mode, rows = call.sparse, call.state.numerics, call.state.mode, call.positions
    k1 = compress_keys(layer.k, s.kernel_size, s.kernel_stride, num)
    ratio = s.block_size // s.kernel_stride
    by_forecast = mode == "sparda" or (mode == "sparda_decode_only" and call.is_decode)
    if mode == "infinigen" and q_hat is not None:
        assert old is not None
        assert old.partial is not None
        assert layer.basis is not None
        assert layer.channels is not None
        # The current token's entry is written after scoring: it is scored as zero.
        partial = np.concatenate([old.partial, np.zeros_like(old.partial[:1])])
        score = infinigen.token_score(q_hat, layer.basis, layer.channels, partial, num)
        ratio = s.block_size
    elif by_forecast and len(k1) > 0:
        if prediction is None:
            raise ValueError(f"mode is {mode!r}, but the weights hold no q_curr_proj / q_future_proj")
        score = forecast_score(prediction, k1, None if call.is_decode else rows, s.kernel_stride, num)
    else:
        n1 = len(k1)
        visible = (
            np.full(1, n1)
            if call.is_decode
            else visible_stage1(rows, len(rows), n1, s.kernel_size, s.kernel_stride, num.ref_compat)
        )
        score = stage1_score(q, k1, visible, num)
    length, last_row_block = len(layer.k), rows // s.block_size
    if num.ref_compat and not call.is_decode:
        length = call.batch_max_len
        last_row_block = (rows + call.batch_max_len - len(rows)) // s.block_size
    num_blocks = -(-length // s.block_size)
    pooled = pool_blocks(score, rows // s.block_size, num_blocks, s.init_blocks, s.local_blocks, ratio)
    return score, pooled, select_blocks(pooled, last_row_block, s.total_blocks, num.ref_compat), k1

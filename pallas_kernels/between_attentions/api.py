"""The products between two layers' attention: their operands' form, and the choice of what runs them."""

import functools
import os
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import get_abstract_mesh
from jaxtyping import Array, Float

from sparda_jax.pallas_kernels.backend import Backend, choose_backend, interprets_mosaic
from sparda_jax.pallas_kernels.between_attentions import mosaic_gpu, reference
from sparda_jax.pallas_kernels.operands import FLOATS, check_operands


class LayerWeights(NamedTuple):
    """The weights from one layer's attention to the next one's, all of one dtype.

    Attributes:
        output: of the attention. mlp_norm, gate_up, down: of the MLP; gate's columns first.
        attention_norm, qkvf: the next layer's; its columns are q, k, v and the Forecast. None behind the last layer.
    """

    output: Float[Array, "attended hidden"]
    mlp_norm: Float[Array, "hidden"]
    gate_up: Float[Array, "hidden two_intermediate"]
    down: Float[Array, "intermediate hidden"]
    attention_norm: Float[Array, "hidden"] | None
    qkvf: Float[Array, "hidden columns"] | None


def padded_rows(batch: int) -> int:
    """Rows that the kernel computes for so many lanes: a multiple of 8."""
    return -(-batch // 8) * 8


def to_features(x: Float[Array, "batch features"]) -> Float[Array, "features rows"]:
    """What lies lane by lane, feature by feature; the rows beyond the batch are zero."""
    return jnp.pad(x.T, ((0, 0), (0, padded_rows(x.shape[0]) - x.shape[0])))


def from_features(x: Float[Array, "features rows"], batch: int) -> Float[Array, "batch features"]:
    """`to_features` undone."""
    return x[:, :batch].T


def between_backend(
    weights: LayerWeights, batch: int, heads: tuple[int, int, int, int], backend: str | None = None
) -> Backend:
    """What runs `between_attentions` on such weights here; ``backend`` and errors as there."""
    available = [Backend.REFERENCE]
    device = get_abstract_mesh().abstract_device or jax.devices()[0]
    cores = getattr(device, "num_cores", None) or getattr(device, "core_count", 0)
    takes = mosaic_gpu.takes(weights.output, weights.gate_up, heads, padded_rows(batch), cores)
    if takes and not _has_mps():
        available.append(Backend.MOSAIC_GPU)
    return choose_backend(backend, "between_attentions", available=available)


def _has_mps() -> bool:
    """Whether CUDA's Multi-Process Service runs, so that another process may hold a part of the SMs.

    Two processes whose CTAs wait for each other could then each hold the SMs that the other one waits for.
    """
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return Path(folder, "control").exists()


def between_attentions(
    attended: Float[Array, "rows attended"],
    residual: Float[Array, "hidden rows"],
    weights: LayerWeights,
    cos: Float[Array, "half rows"],
    sin: Float[Array, "half rows"],
    *,
    batch: int,
    heads: tuple[int, int, int, int],
    eps: float,
    residual_scale: float,
    backend: str | None = None,
) -> tuple[Float[Array, "hidden rows"], tuple[Float[Array, "batch heads head_dim"], ...]]:
    """Attention's output projection, residual, norm, SwiGLU MLP, residual; the next layer's norm, q, k, v and Forecast.

    Rows are lanes, padded to `padded_rows`; what lies in the padding means nothing and may be NaN. Every product is
    accumulated in float32 and rounded once; the other rounding points are those of docs/semantics.md section 1.2. A
    lane's result has the same bits whatever the other lanes hold.

    Args:
        attended: the attention's output, all heads of a lane in a row.
        residual: the stream before the layer's attention, feature by feature (`to_features`).
        weights: of the two layers.
        cos, sin: RoPE's tables at each lane's position, float32, likewise.
        batch: lanes.
        heads: how many heads q, k, v and the Forecast have.
        eps: of both norms.
        residual_scale: what the outputs of attention and MLP are multiplied by.
        backend: a name of `Backend`; None takes the best one for the device.

    Returns:
        The stream behind the layer, and q, k, v and the Forecast of the next layer after RoPE (v without), lane by
        lane; behind the last layer no such.

    Raises:
        ValueError: the shapes or dtypes don't fit each other, or the backend is unknown or doesn't take them.
    """
    sizes: dict[str, tuple[int, str]] = {"rows": (padded_rows(batch), "a batch of this size")}
    check_operands(FLOATS, sizes=sizes, attended=(attended, "rows attended"), residual=(residual, "hidden rows"))
    check_operands(FLOATS, sizes=sizes, output=(weights.output, "attended hidden"), down=(weights.down, "inner hidden"))
    check_operands(
        FLOATS, sizes=sizes, gate_up=(weights.gate_up, "hidden two_inner"), norm=(weights.mlp_norm, "hidden")
    )
    check_operands(FLOATS, sizes=sizes, cos=(cos, "half rows"), sin=(sin, "half rows"))
    if weights.qkvf is not None and weights.attention_norm is not None:
        check_operands(FLOATS, sizes=sizes, qkvf=(weights.qkvf, "hidden columns"))
        check_operands(FLOATS, sizes=sizes, attention_norm=(weights.attention_norm, "hidden"))
        if sizes["columns"][0] != sum(heads) * 2 * sizes["half"][0]:
            raise ValueError(f"qkvf{list(weights.qkvf.shape)} does not have the columns of {heads} heads.")
    if sizes["two_inner"][0] != 2 * sizes["inner"][0]:
        raise ValueError(f"gate_up{list(weights.gate_up.shape)} must have twice the {sizes['inner'][0]} rows of down.")
    chosen = between_backend(weights, batch, heads, backend)
    return _jitted(
        attended,
        residual,
        weights,
        cos,
        sin,
        batch=batch,
        heads=heads,
        eps=eps,
        residual_scale=residual_scale,
        backend=chosen,
        # The interpreter has no semaphores, so that it runs the kernel's parts one by one.
        at_once=not interprets_mosaic(),
    )


# One jit object for all layers, so that they share one lowering of the kernel.
@functools.partial(jax.jit, static_argnames=("batch", "heads", "eps", "residual_scale", "backend", "at_once"))
def _jitted(
    attended: Array,
    residual: Array,
    weights: LayerWeights,
    cos: Array,
    sin: Array,
    *,
    batch: int,
    heads: tuple[int, int, int, int],
    eps: float,
    residual_scale: float,
    backend: Backend,
    at_once: bool,
) -> tuple[Array, tuple[Array, ...]]:
    norm, qkvf_weights = weights.attention_norm, weights.qkvf
    is_last = norm is None or qkvf_weights is None
    if backend is Backend.REFERENCE:
        x = reference.between_attentions(
            attended[:batch],
            from_features(residual, batch),
            output=weights.output,
            mlp_norm=weights.mlp_norm,
            gate_up=weights.gate_up,
            down=weights.down,
            eps=eps,
            residual_scale=residual_scale,
        )
        if norm is None or qkvf_weights is None:
            return to_features(x), ()
        tables = from_features(cos, batch), from_features(sin, batch)
        return to_features(x), reference.projections(x, norm, qkvf_weights, *tables, heads=heads, eps=eps)
    plan = mosaic_gpu.Plan(
        batch=batch,
        rows=residual.shape[1],
        hidden=residual.shape[0],
        intermediate=weights.down.shape[0],
        attended=attended.shape[1],
        heads=() if is_last else heads,
        eps=eps,
        residual_scale=residual_scale,
    )
    operands = {"attended": attended, "residual": residual, "cos": cos, "sin": sin}
    operands |= {name: weight for name, weight in weights._asdict().items() if weight is not None}
    found = mosaic_gpu.run(plan, operands, at_once=at_once)
    return found["out"], () if is_last else tuple(found[name] for name in "qkvf")

"""The training loop: micro-batches to a step, a validation and a checkpoint every so many steps."""

import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from sparda_jax.train.checkpoints import Checkpoints
from sparda_jax.train.config import TrainConfig
from sparda_jax.train.data import Batch, TrainingRows
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.forward import ForwardPass, LayerSums
from sparda_jax.train.metrics import STUDENT_QUALITY, Record, describe, not_finite
from sparda_jax.train.state import TrainState, apply_gradient, init_state, learning_rate, make_optimizer


class Trainer:
    """One run of training.

    Args:
        config: of the run; its micro-batches must be those of ``data`` and ``validation``.
        forward: the base on its devices.
        data: batch i of it is micro-batch ``i % accumulation`` of step ``i // accumulation``.
        validation: measured before the first step and before every checkpoint; may be empty.
        report: gets a record of each step and each validation, in order.
        should_stop: asked after every step; True ends the run there, with a checkpoint.
        peak_flops: FLOP/s of this process's devices at most, for the MFU; None: it isn't told.
    """

    def __init__(
        self,
        config: TrainConfig,
        forward: ForwardPass,
        data: TrainingRows,
        validation: Sequence[Batch],
        *,
        report: Callable[[Record], None],
        should_stop: Callable[[], bool] = lambda: False,
        peak_flops: float | None = None,
    ) -> None:
        self._config, self._forward, self._data = config, forward, data
        self._validation, self._report, self._should_stop = validation, report, should_stop
        self._peak_flops = peak_flops
        self._optimizer = make_optimizer(config)
        self._update = jax.jit(functools.partial(update_state, config, self._optimizer), donate_argnums=0)

    def initial_state(self, weights: Float[Array, "layers hidden outputs"]) -> TrainState:
        """Before the first step, on all devices."""
        return self._forward.everywhere(init_state(jnp.asarray(weights), self._optimizer))

    def run(self, state: TrainState, checkpoints: Checkpoints) -> TrainState:
        """Trains from a state to the configured number of steps, or until it is told to stop.

        The device is never waited for within a step: the numbers of a step are read while the next one runs, but always
        before a checkpoint, so that nothing is kept of a step that went wrong.

        Args:
            state: fresh or restored; it is donated.

        Raises:
            TrainingError: a loss or a gradient is not finite, or a checkpoint can't be written. The checkpoints up to
                then stay.
        """
        config = self._config
        first = int(state.step)
        if first == 0 and self._validation:
            self._validate(state)
        clock = _Clock()
        unread: list[tuple[int, LayerSums, dict[str, Array], float]] = []
        for step in range(first, config.steps):
            gradient, sums = self._forward.everywhere((jnp.zeros_like(state.weights), LayerSums.zeros(self._layers)))
            flops = 0.0
            for number in range(step * config.accumulation, (step + 1) * config.accumulation):
                batch = self._data.batch(number)
                flops += self._forward.flops(batch.positions[batch.segments > 0])
                gradient, sums = self._forward.learn(state.weights, self._forward.on_devices(batch), gradient, sums)
            state, norms = self._update(state, gradient, sums)
            unread.append((step + 1, sums, norms, flops))
            stop = step + 1 == config.steps or self._should_stop()
            save = stop or (step + 1) % config.save_every == 0
            while len(unread) > (0 if save else 1):
                self._report_step(*unread.pop(0), clock)
            if step == first:
                clock.restart()  # what came before was compilation
            if save:
                loss = self._validate(state) if self._validation else None
                checkpoints.save(state, loss)
                clock.restart()
            if stop:
                break
        return state

    @property
    def _layers(self) -> int:
        return self._forward.config.num_layers

    def _report_step(self, step: int, sums: LayerSums, norms: dict[str, Array], flops: float, clock: "_Clock") -> None:
        record: Record = {"kind": "train", "step": step} | describe(sums, STUDENT_QUALITY)
        record |= {name: jax.device_get(value).tolist() for name, value in norms.items()}
        self._check(record)
        tokens = round(float(jnp.max(sums.pairs)) / self._forward.config.num_kv_heads)
        tokens_per_s, flops_per_s = clock.rates(tokens, flops)
        mfu = None if self._peak_flops is None else flops_per_s / self._peak_flops
        self._report(record | {"tokens": tokens, "tokens_per_s": tokens_per_s, "mfu": mfu})

    def _validate(self, state: TrainState) -> float:
        sums = self._forward.everywhere(LayerSums.zeros(self._layers))
        for batch in self._validation:
            sums = self._forward.measure(state.weights, self._forward.on_devices(batch), sums)
        record: Record = {"kind": "validation", "step": int(state.step)} | describe(sums)
        self._check(record)
        self._report(record)
        return record["loss"]

    def _check(self, record: Record) -> None:
        if wrong := not_finite(record):
            # What the base alone decides is not finite only where the base is at fault.
            base = [name for name in wrong if name.startswith(("layer_selector_mass", "layer_teacher_mass"))]
            way_out = (
                f"{base[0]} does not depend on the Forecast: look for NaN in the base model, or give --dtype float32"
                if base
                else "A lower --learning-rate, in a new --out, is the way on; to begin it with the last checkpoint's "
                "Forecast, --resume here with that step as --steps and --export-forecast, and --init-forecast there"
            )
            named = [*[name for name in wrong if name not in base][:3], *base[:1]]
            raise TrainingError(
                f"step {record['step']}: {', '.join(named)} not finite; nothing of this step is kept. {way_out}"
            )


def update_state(
    config: TrainConfig,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    gradient: Float[Array, "layers hidden outputs"],
    sums: LayerSums,
) -> tuple[TrainState, dict[str, Array]]:
    """One step of the optimiser with the gradient of ``sum over layers of loss / weight``."""
    gradient = gradient / jnp.where(sums.weight > 0, sums.weight, 1)[:, None, None]
    norms = {
        "grad_norm": optax.tree.norm(gradient),
        "layer_grad_norm": jnp.sqrt(jnp.sum(gradient**2, axis=(1, 2))),
        "learning_rate": learning_rate(config, state.step),
    }
    return apply_gradient(state, gradient, optimizer), norms


class _Clock:
    """What is done in a second since the last restart, which leaves validations and checkpoints out."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._since, self._done = time.perf_counter(), np.zeros(2)

    def rates(self, tokens: int, flops: float) -> list[float]:
        """Of both, with so many more done by now."""
        self._done += tokens, flops
        return (self._done / (time.perf_counter() - self._since)).tolist()

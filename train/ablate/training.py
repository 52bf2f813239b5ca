"""Trains a variant's Forecast on the frozen base, and measures it on the validation rows."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32
from rich.console import Console

from sparda_jax.checkpoint import load_model
from sparda_jax.checkpoint.atomic import atomic_file
from sparda_jax.model import Decoder
from sparda_jax.train.ablate.cases import Variant
from sparda_jax.train.ablate.config import AblateConfig
from sparda_jax.train.activations import CachedForward, check_rows
from sparda_jax.train.checkpoints import Checkpoints
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.forecast import Start, fresh_weights, query_weights
from sparda_jax.train.forward import ForwardPass, LayerSums
from sparda_jax.train.log import RunLog
from sparda_jax.train.mesh import make_mesh
from sparda_jax.train.metrics import Record, describe
from sparda_jax.train.run import RunData, RunFiles, load_data
from sparda_jax.train.trainer import Trainer

WEIGHTS, RESULT = "weights.npy", "validation.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """A variant that is trained.

    Attributes:
        weights: after the last step. steps: how many.
        begun, ended: validation before the first step and after the last, by the published loss whatever the variant
            was trained with; see `describe`.
    """

    weights: Float32[np.ndarray, "layers hidden outputs"]
    steps: int
    begun: Record
    ended: Record


def train_variant(name: str, variant: Variant, config: AblateConfig, console: Console) -> Trained:
    """The variant from its folder, trained first or further if it isn't done.

    Raises:
        TrainingError: the folder holds a variant that was trained otherwise, or there is nothing to train with.
    """
    training, folder = config.training, config.out / "variants" / name
    if training is None:
        raise TrainingError(f"{name} has to be trained: give --data")
    settings = config.trained_with() | {"data": [str(path) for path in config.data]}
    if (folder / RESULT).is_file():
        return _read(folder, settings)
    model = load_model(config.model, dtype=config.dtype)
    training.check_model(model.config)
    files = RunFiles(
        model=config.model,
        data=config.data,
        validation=config.validation,
        out=folder,
        cache=config.out / "tokens",
        activations=config.activations,
    )
    data = load_data(training, model.config, files, console)
    first = _first_weights(variant, model, training.start, training.seed)
    begun = _validate(variant, model, data, first)
    identity = settings | {"fingerprint": data.fingerprint, "variant": json.loads(_plain(variant))}
    with (
        Checkpoints(folder / "checkpoints", keep=1, identity=identity) as checkpoints,
        RunLog(folder, steps=training.steps, console=console, print_every=max(training.steps // 5, 1)) as log,
    ):
        forward = _forward(variant, model, config)
        trainer = Trainer(training, forward, data.train, [], report=log)
        state = trainer.initial_state(jnp.asarray(first))
        if checkpoints.steps:
            state = checkpoints.restore(None, state)
        log.begin(int(state.step))
        state = trainer.run(state, checkpoints)
    weights = np.asarray(state.weights)
    ended = _validate(variant, model, data, weights)
    with atomic_file(folder / WEIGHTS, overwrite=True) as temporary, temporary.open("wb") as stream:
        np.save(stream, weights)
    record = {"settings": settings, "steps": training.steps, "begun": begun, "ended": ended}
    with atomic_file(folder / RESULT, overwrite=True) as temporary:
        temporary.write_text(json.dumps(record, indent=1) + "\n")
    return _read(folder, settings)


def _read(folder: Path, settings: dict[str, Any]) -> Trained:
    record = json.loads((folder / RESULT).read_text())
    for name, value in json.loads(json.dumps(settings)).items():
        if record["settings"].get(name) != value:
            raise TrainingError(
                f"{folder} was trained with {name}={record['settings'].get(name)}, not {value}; give another --out"
            )
    return Trained(
        weights=np.load(folder / WEIGHTS), steps=record["steps"], begun=record["begun"], ended=record["ended"]
    )


def _plain(variant: Variant) -> str:
    return json.dumps(dataclasses.asdict(variant))


def _first_weights(
    variant: Variant, model: Decoder, start: Start, seed: int
) -> Float32[np.ndarray, "layers hidden outputs"]:
    if start is Start.QUERIES:
        return query_weights(model, variant.design)
    return fresh_weights(model.config, seed, variant.design)


def _forward(variant: Variant, model: Decoder, config: AblateConfig) -> ForwardPass:
    assert config.training is not None
    mesh = make_mesh(jax.devices())
    options = {"objective": variant.objective, "teacher": variant.teacher, "design": variant.design}
    if config.activations is None or config.training.layers is None:
        return ForwardPass(model, mesh, **options)
    check_rows(mesh)
    return CachedForward(model, mesh, config.activations, config.training.layers, **options)


def _validate(
    variant: Variant, model: Decoder, data: RunData, weights: Float32[np.ndarray, "layers hidden outputs"]
) -> Record:
    """By the published loss and the fine teacher, so that variants can be compared."""
    forward = _measuring(variant, model)
    placed, sums = forward.everywhere((jnp.asarray(weights), LayerSums.zeros(model.config.num_layers)))
    for batch in data.validation:
        sums = forward.measure(placed, forward.on_devices(batch), sums)
    return describe(sums)


@functools.lru_cache(maxsize=1)
def _measuring(variant: Variant, model: Decoder) -> ForwardPass:
    """Kept from before the training for after it."""
    return ForwardPass(model, make_mesh(jax.devices()), design=variant.design)

"""Training in pieces: one ends when its time is up, and the next goes on as if there had been no break.

Batches and random numbers are functions of the step's number, so parameters, moments and that number are all there is
to keep. They lie in one file, with the recipe and the geometry that they belong to.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparda_jax.checkpoint import CheckpointError
from sparda_jax.checkpoint.atomic import atomic_file
from sparda_jax.model import Decoder
from sparda_jax.pretrain.batches import Batch
from sparda_jax.pretrain.recipe import Phase, Recipe
from sparda_jax.pretrain.trainer import TrainState, init_state, make_optimizer, train

STATE_FILE = "state.npz"
_SAVE_EVERY_S = 120.0
# The clock is looked at this often: each look waits for the device.
_STEPS_BETWEEN_LOOKS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Where a piece ended.

    Attributes:
        model: float32 weights. step: steps done of the whole run. finished: whether these are all.
    """

    model: Decoder
    step: int
    finished: bool


def save_state(file: Path, state: TrainState, about: dict[str, Any]) -> None:
    """Writes a state whole or not at all, in place of an earlier one; ``about`` is plain JSON."""
    arrays = {f"leaf_{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    with atomic_file(file, overwrite=True) as temporary, temporary.open("wb") as stream:
        np.savez(stream, about=np.array(json.dumps(about)), **arrays)  # pyright: ignore[reportArgumentType]


def load_state(file: Path, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """What `save_state` wrote, in the structure of ``like``.

    Raises:
        CheckpointError: the file is damaged or holds another model's state.
    """
    leaves, structure = jax.tree.flatten(like)
    try:
        with file.open("rb") as stream, np.load(stream) as stored:
            about = json.loads(str(stored["about"]))
            arrays = [stored[f"leaf_{i}"] for i in range(len(stored.files) - 1)]
    except Exception as error:  # zipfile and numpy raise many types
        raise CheckpointError(f"{file} can't be read ({error}): remove it to start anew") from error
    if [a.shape for a in arrays] != [leaf.shape for leaf in leaves]:
        raise CheckpointError(f"{file} holds the state of a model of another geometry: give another folder")
    return jax.tree.unflatten(structure, [jnp.asarray(a) for a in arrays]), about


def run_piece(
    start: Decoder,
    recipe: Recipe,
    batches_of: Callable[[Phase, int, int], Iterable[Batch]],
    folder: Path,
    *,
    seconds: float,
    dtype: jnp.dtype,
    report: Callable[[dict[str, Any]], None],
    first_step: int = 0,
) -> Piece:
    """Trains from ``folder``'s state, or from ``start`` where there is none, and leaves its state there.

    Args:
        start: float32 weights.
        batches_of, dtype, report: as in `train`.
        seconds: from now; the piece ends after the step in which they are over. The state is also saved on the way.
        first_step: of a run whose state was lost and of which ``start`` is the model: moments begin anew, and the
            learning rate rises anew to where it was.

    Raises:
        CheckpointError: the folder holds another run's state, or it is damaged.
    """
    file, began = folder / STATE_FILE, time.perf_counter()
    _, fresh = init_state(start, make_optimizer(recipe))
    about = {"recipe": dataclasses.asdict(recipe), "fresh_at": first_step}
    about = json.loads(json.dumps(about))
    state = dataclasses.replace(fresh, step=jnp.int32(first_step))
    if file.exists():
        state, stored = load_state(file, fresh)
        changed = [k for k, v in about["recipe"].items() if stored["recipe"].get(k) != v]
        if changed:
            raise CheckpointError(f"{file} is of a run with another {', '.join(changed)}: give another folder")
        about = stored
    looked, saved = int(state.step), time.perf_counter()

    def goes_on(state: TrainState) -> bool:
        nonlocal looked, saved
        looked += 1
        if looked % _STEPS_BETWEEN_LOOKS == 0:
            state.step.block_until_ready()
            if time.perf_counter() - saved > _SAVE_EVERY_S:
                save_state(file, state, about)
                saved = time.perf_counter()
        return time.perf_counter() - began < seconds

    model, state = train(
        start,
        recipe,
        batches_of,
        dtype=dtype,
        report=report,
        resumed=state,
        fresh_at=about["fresh_at"],
        goes_on=goes_on,
    )
    save_state(file, state, about)
    return Piece(model=model, step=int(state.step), finished=int(state.step) >= recipe.total_steps)

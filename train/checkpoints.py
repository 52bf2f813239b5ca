"""Training states on disk by step number: each appears whole or not at all, and belongs to one run."""

import contextlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import jax
from orbax.checkpoint import v1 as ocp

from sparda_jax.train.errors import TrainingError
from sparda_jax.train.state import TrainState

_LOSS = "validation_loss"
# In the name of a folder that orbax is still writing.
_UNFINISHED = ".orbax-checkpoint-tmp"


class Checkpoints:
    """The checkpoints of one run; a context manager.

    Args:
        folder: where they are, each in a folder named after its step. What a killed process left half-written in it is
            removed.
        keep: so many of the newest stay, and the one with the lowest validation loss.
        identity: plain JSON of what shapes the run's course, stored with each checkpoint.
    """

    def __init__(self, folder: Path, *, keep: int, identity: Mapping[str, Any]) -> None:
        policies: Any = ocp.training.preservation_policies  # orbax annotates less than it takes
        best = policies.BestN(
            get_metric_fn=lambda metrics: metrics[_LOSS], reverse=True, n=1, keep_checkpoints_without_metrics=False
        )
        self._folder, self._failed = folder, False
        if jax.process_index() == 0:
            # Orbax cleans up only what it had got far enough to mark.
            for unfinished in folder.glob(f"*{_UNFINISHED}*"):
                shutil.rmtree(unfinished)
        self._identity = json.loads(json.dumps(dict(identity)))
        self._checkpointer = ocp.training.Checkpointer(
            str(folder.absolute()),
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failed save, closing fails with the same error once more.
        with contextlib.suppress(Exception) if self._failed else contextlib.nullcontext():
            self._checkpointer.close()

    @property
    def steps(self) -> Sequence[int]:
        """The steps that can be restored, ascending."""
        return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

    @property
    def best_step(self) -> int | None:
        """The step with the lowest validation loss; None when nothing was validated."""
        metrics = {c.step: cast(dict[str, float], c.metrics) for c in self._checkpointer.checkpoints if c.metrics}
        return min(metrics, key=lambda step: metrics[step][_LOSS]) if metrics else None

    def save(self, state: TrainState, validation_loss: float | None) -> None:
        """Writes the state under its step, then removes what is not kept any more.

        Raises:
            TrainingError: it can't be written; the earlier checkpoints are as before.
        """
        step, before = int(state.step), self.steps
        try:
            self._checkpointer.save(
                step,
                state,
                force=True,
                metrics=None if validation_loss is None else {_LOSS: validation_loss},
                custom_metadata={"identity": self._identity},
            )
        except Exception as error:  # orbax and tensorstore raise many types; all mean the same here
            self._failed = True
            way_out = f"step {before[-1]} is kept: make room, then go on with --resume" if before else "make room"
            raise TrainingError(
                f"{self._folder}: the checkpoint of step {step} can't be written ({error}); {way_out}"
            ) from error

    def restore(self, step: int | None, like: TrainState) -> TrainState:
        """The state after ``step`` steps, or the newest.

        Args:
            like: a state of the same shapes, on the devices that the restored one shall be on.

        Raises:
            TrainingError: there is no such step, it can't be read, or another kind of run wrote it.
        """
        steps = self.steps
        if not steps:
            raise TrainingError(f"{self._folder} holds no checkpoint; start without --resume")
        if step is None:
            step = steps[-1]
        if step not in steps:
            raise TrainingError(f"{self._folder} holds no step {step}; there are {', '.join(map(str, steps))}")
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        try:
            stored = cast(dict[str, Any], self._checkpointer.metadata(step).custom_metadata or {})
            self._check_identity(step, stored.get("identity", {}))
            return cast(TrainState, self._checkpointer.load(step, abstract))
        except TrainingError:
            raise
        except Exception as error:
            others = ", ".join(str(other) for other in steps if other != step) or "none"
            raise TrainingError(
                f"{self._folder}: step {step} can't be read ({error}); other steps for --resume-step: {others}"
            ) from error

    def drop_after(self, step: int) -> None:
        """Removes the checkpoints of later steps, so that the run can come by them again."""
        for later in self.steps:
            if later > step:
                self._checkpointer.delete(later)

    def _check_identity(self, step: int, stored: Mapping[str, Any]) -> None:
        names = sorted(stored.keys() | self._identity.keys())
        wrong = [n for n in names if stored.get(n) != self._identity.get(n)]
        if wrong:
            lines = "".join(f"\n  {n}: {stored.get(n)} then, {self._identity.get(n)} now" for n in wrong)
            raise TrainingError(
                f"{self._folder}: step {step} is of another run:{lines}\nGo on as it was begun, or give another --out"
            )

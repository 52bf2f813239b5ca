"""Several processes, on one host or many, that train as one: each has some of the devices and reads some of the rows.

They run the same command but for the process's number, see the same files, and keep in step by themselves. Only the
first one prints and writes; checkpoints are written together.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from sparda_jax.train.data import Batch
from sparda_jax.train.errors import TrainingError


def join(coordinator: str, num_processes: int | None, process_id: int | None) -> None:
    """Waits for the other processes; before anything else asks JAX for its devices.

    Args:
        coordinator: ``host:port`` on which the first process listens.
        num_processes, process_id: how many there are, and which this one is, from 0. None: what Slurm or MPI says.

    Raises:
        TrainingError: the numbers are missing or wrong, or the others do not come.
    """
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id)
    except (ValueError, RuntimeError, TypeError) as error:
        raise TrainingError(
            f"--coordinator {coordinator} --num-processes {num_processes} --process-id {process_id}: {error}; give "
            "each process host:port of the first one, the same number of processes, and its own id from 0 on"
        ) from error


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return jax.process_index() == 0


@contextlib.contextmanager
def first_before_others(what: str) -> Iterator[None]:
    """The other processes enter once the first is through, and find what it wrote."""
    several = jax.process_count() > 1
    if several and not is_first():
        multihost_utils.sync_global_devices(what)
    yield
    if several and is_first():
        multihost_utils.sync_global_devices(what)


def own_rows(batch: Batch) -> Batch:
    """This process's rows of a batch that holds those of all."""

    def share(values: np.ndarray) -> np.ndarray:
        return np.split(values, jax.process_count())[jax.process_index()]

    return Batch(**{field.name: share(getattr(batch, field.name)) for field in dataclasses.fields(batch)})


def agreed(should_stop: Callable[[], bool]) -> Callable[[], bool]:
    """The same answer in all processes: yes as soon as one says so. Every process has to ask as often."""
    if jax.process_count() == 1:
        return should_stop
    return lambda: bool(np.any(multihost_utils.process_allgather(np.asarray(should_stop()))))

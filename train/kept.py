"""Folders that are made once and found by later runs, and by the other processes of a run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparda_jax.checkpoint.atomic import atomic_folder
from sparda_jax.checkpoint.errors import CheckpointError
from sparda_jax.train.errors import TrainingError

DESCRIPTION = "corpus.json"


def make_once(folder: Path, write: Callable[[Path], dict[str, Any]]) -> None:
    """Makes ``folder`` whole or not at all, unless it is there.

    Args:
        folder: where; its parent is the cache.
        write: fills the folder that it is given, and returns what `description` is to give back.

    Raises:
        TrainingError: it can't be written there.
    """
    if (folder / DESCRIPTION).is_file():
        return
    try:
        with atomic_folder(folder, overwrite=False, marker=DESCRIPTION) as temporary:
            text = json.dumps(write(temporary), indent=1)
            (temporary / DESCRIPTION).write_text(text + "\n")
    except CheckpointError:
        # Another process of this run may have been quicker.
        if not (folder / DESCRIPTION).is_file():
            raise
    except OSError as error:
        raise TrainingError(
            f"{folder.parent}: the tokenised text can't be kept there ({error}); make room, or name another folder "
            "with --cache"
        ) from error


def description(folder: Path) -> dict[str, Any]:
    """What `make_once` was given.

    Raises:
        OSError, ValueError: it can't be read.
    """
    return json.loads((folder / DESCRIPTION).read_text())

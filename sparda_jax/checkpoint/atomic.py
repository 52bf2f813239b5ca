"""Files and folders that appear whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from sparda_jax.checkpoint.errors import CheckpointError


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync_tree(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            _fsync(Path(parent) / name)
        _fsync(Path(parent))


@contextlib.contextmanager
def atomic_file(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yields a path to write to; it becomes ``path`` if the block ends without an error, and is removed otherwise.

    Raises:
        CheckpointError: ``path`` exists and ``overwrite`` is false.
    """
    if path.exists() and not overwrite:
        raise CheckpointError(f"{path} exists; give another name, or --overwrite to replace it")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        yield temporary
        _fsync(temporary)
        temporary.replace(path)
        _fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path, *, overwrite: bool, marker: str) -> Iterator[Path]:
    """Yields an empty folder beside ``path``; it becomes ``path`` if the block ends without an error.

    Args:
        path: the folder to make.
        overwrite: replace an existing folder, but only one that holds ``marker`` (or nothing): a mistyped path must not
            cost someone's home. It is moved aside first and removed last; a failure puts it back.
        marker: name of a file that the folders written here have.

    Raises:
        CheckpointError: ``path`` exists and may not be replaced.
    """
    path = path.resolve()  # a link stays, and what it points to is replaced
    if path.exists() and not overwrite:
        raise CheckpointError(f"{path} exists; give another folder, or --overwrite to replace it")
    if path.exists() and not (path.is_dir() and ((path / marker).is_file() or not any(path.iterdir()))):
        raise CheckpointError(f"{path} is not replaced: it holds no {marker}, so it was not written by this command")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    aside = path.with_name(f"{path.name}.old-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        _fsync_tree(temporary)
        if path.exists():
            path.rename(aside)
        try:
            temporary.rename(path)
        except OSError:
            if aside.exists():
                aside.rename(path)
            raise
        _fsync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(aside, ignore_errors=True)

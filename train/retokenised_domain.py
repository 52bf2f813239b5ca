"""One domain's data set for another tokenizer: made file by file, or shard by shard, so that a later call can go on."""

import dataclasses
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sparda_jax.checkpoint.atomic import atomic_file
from sparda_jax.train import mds
from sparda_jax.train.documents import Sample, read_samples, read_shard
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.mapped import mds_fingerprint
from sparda_jax.train.retokeniser import Retokeniser
from sparda_jax.train.sources import Source
from sparda_jax.train.tokenise import digest
from sparda_jax.train.vocabulary import RECORD_FILE

_PARTS = "parts"
# Samples that the threads share out; so many, and a shard, are in memory at a time.
_BATCH = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """What a domain has, or several."""

    samples: int
    documents: int
    tokens: int

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            samples=self.samples + other.samples,
            documents=self.documents + other.documents,
            tokens=self.tokens + other.tokens,
        )


_NOTHING = Counts(samples=0, documents=0, tokens=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Unit:
    """What is done as a whole or again: files of texts, or a shard; names and fingerprints tell it from others."""

    paths: list[Path]
    shard: mds.ShardInfo | None
    identity: list[str]

    def samples(self) -> Iterator[Sample]:
        if self.shard is not None:
            return read_shard(self.paths[0], self.shard)
        return itertools.chain.from_iterable(map(read_samples, self.paths))


def retokenise_domain(
    sources: Sequence[Source], folder: Path, domain: str, retokeniser: Retokeniser, progress: Callable[[int], None]
) -> Counts:
    """Writes the data set of a domain, unless it is complete, and says what it has.

    Args:
        sources: of the domain.
        folder: of the data set; its index is written last.
        domain, retokeniser: the domain's name, and what makes the ids.
        progress: told the bytes of the sources that are done.

    Raises:
        TrainingError: something can't be read, or ``folder`` is of other sources or another tokenizer.
    """
    units = list(_units(sources))
    plan = retokeniser.identity | {"units": [unit.identity for unit in units]}
    _check_plan(folder, plan)
    if mds.is_mds(folder):
        _tidy(folder)
        return Counts(**json.loads((folder / RECORD_FILE).read_text())["counts"])
    parts = folder / _PARTS
    parts.mkdir(parents=True, exist_ok=True)
    _write_json(folder / RECORD_FILE, plan)
    counts, entries, done = _NOTHING, [], 0
    for number, unit in enumerate(units):
        file = parts / f"{number:05}.json"
        if not file.is_file():
            writer = mds.ShardWriter(folder, f"{number:05}", domain)
            _write_json(file, _convert(unit, writer, retokeniser, done, progress))
        try:
            record = json.loads(file.read_text())
            counts += Counts(**record["counts"])
            entries += record["shards"]
            done += record["num_bytes"]
        except (ValueError, LookupError, TypeError) as error:
            raise TrainingError(f"{file} is damaged ({error!r}); remove it, and that part is made again") from error
    if not entries:
        raise TrainingError(f"domain {domain} has no text; leave it out")
    _write_json(folder / RECORD_FILE, plan | {"counts": dataclasses.asdict(counts)})
    mds.write_index(folder, entries)
    _tidy(folder)
    return counts


def _check_plan(folder: Path, plan: dict[str, Any]) -> None:
    file = folder / RECORD_FILE
    if not file.is_file():
        if mds.is_mds(folder):
            raise TrainingError(f"{folder} holds a data set that was not written by this command; name another folder")
        return
    try:
        known = json.loads(file.read_text())
        same = plan.items() <= known.items()
    except (ValueError, AttributeError) as error:
        raise TrainingError(f"{file} is damaged ({error}); remove {folder}, and it is made again") from error
    if not same:
        raise TrainingError(
            f"{folder} was made, or begun, of other sources or with other tokenizers; name another folder, or remove it"
        )


def _units(sources: Sequence[Source]) -> Iterator[_Unit]:
    files: list[Path] = []
    size = 0
    for source in sources:
        if source.path.is_dir():
            fingerprint = mds_fingerprint(source.path)
            for shard in mds.read_index(source.path):
                name = f"{source.path.name}/{shard.raw.path.relative_to(source.path).as_posix()}"
                yield _Unit(paths=[source.path], shard=shard, identity=[name, fingerprint])
            continue
        files.append(source.path)
        size += source.num_bytes
        if size >= mds.SHARD_BYTES:  # small files share a shard
            yield _of_files(files)
            files, size = [], 0
    if files:
        yield _of_files(files)


def _of_files(files: list[Path]) -> _Unit:
    return _Unit(paths=files, shard=None, identity=[text for file in files for text in (file.name, digest(file))])


def _convert(
    unit: _Unit, writer: mds.ShardWriter, retokeniser: Retokeniser, before: int, progress: Callable[[int], None]
) -> dict[str, Any]:
    """Writes a unit's shards, and returns their entries, what they hold, and the bytes that were read."""
    counts, done = _NOTHING, 0
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for batch in itertools.batched(unit.samples(), _BATCH):
            for sample, documents in zip(batch, threads.map(retokeniser.documents, batch), strict=True):
                done += sample.num_bytes
                if documents:
                    writer.add(documents)
                    tokens = sum(map(len, documents))
                    counts += Counts(samples=1, documents=len(documents), tokens=tokens)
            progress(before + done)
    return {"shards": writer.close(), "counts": dataclasses.asdict(counts), "num_bytes": done}


def _write_json(file: Path, content: dict[str, Any]) -> None:
    with atomic_file(file, overwrite=True) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


def _tidy(folder: Path) -> None:
    """Removes what only an interrupted call needs, and the unfinished files of one that was killed."""
    shutil.rmtree(folder / _PARTS, ignore_errors=True)
    for file in folder.glob("*.tmp-*"):
        file.unlink()

"""Data sets for another tokenizer: MDS shards that keep where each document begins and ends."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from sparda_jax.train.retokenised_domain import Counts, retokenise_domain
from sparda_jax.train.retokeniser import Retokeniser
from sparda_jax.train.sources import find_sources


def retokenise(
    paths: Sequence[Path],
    target: Path,
    retokeniser: Retokeniser,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Counts]:
    """Writes a data set for each domain, ``target/DOMAIN``, which `find_sources` finds.

    A call that was interrupted leaves no index; the same call again goes on behind the last file or shard that was
    done, and passes over domains that are complete.

    Args:
        paths: see `find_sources`.
        target: folder to write into.
        retokeniser: makes the ids.
        progress: told the bytes of the sources that are done, and all of them.

    Returns:
        what each domain has, also those that were complete before.

    Raises:
        TrainingError: something can't be read, or ``target`` holds what was made of other sources or for another
            tokenizer.
    """
    sources = find_sources(paths)
    total, done, counts = sum(source.num_bytes for source in sources), 0, {}
    for domain in dict.fromkeys(source.domain for source in sources):
        own = [source for source in sources if source.domain == domain]
        base = done
        counts[domain] = retokenise_domain(
            own, target / domain, domain, retokeniser, lambda more, base=base: progress(base + more, total)
        )
        done += sum(source.num_bytes for source in own)
        progress(done, total)
    return counts


def report(paths: Sequence[Path], target: Path, retokeniser: Retokeniser, console: Console) -> None:
    """Calls `retokenise`, with a bar while it works and a line for each domain at the end.

    Raises:
        TrainingError: see `retokenise`.
    """
    columns = (TextColumn("retokenise"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    began = time.monotonic()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("")
        counts = retokenise(
            paths, target, retokeniser, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    for domain, found in counts.items():
        console.print(
            f"{domain}: {found.samples:,} samples, {found.documents:,} documents, {found.tokens:,} tokens",
            soft_wrap=True,
        )
    console.print(f"{target}: {len(counts)} domains, {time.monotonic() - began:.1f} s", soft_wrap=True)

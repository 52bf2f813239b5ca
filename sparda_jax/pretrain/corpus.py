"""Freely licensed English from Debian packages: download, clean, split into documents, hold out one per cent.

`python -m sparda_jax.pretrain.corpus --out DIR` (Debian, `apt-get update` done before) writes `documents.jsonl`, one
document per line with its source, licence and split, and `manifest.json` with package versions, licences, sizes and
hashes.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparda_jax.pretrain.readers import READERS, is_prose
from sparda_jax.pretrain.sources import SOURCES, Source

MIN_DOCUMENT_CHARS = 400
MAX_DOCUMENT_CHARS = 120_000
MAX_REPEATS = 2
"""A paragraph seen more often than this (page furniture, licence notices) is dropped from then on."""
HELD_OUT_PER_CENT = 1


@dataclass(frozen=True, kw_only=True)
class Document:
    """One cleaned document: paragraphs joined by newlines, beginning with a letter and ending without white space."""

    source: str
    licence: str
    split: str
    text: str


def download(package: str, cache: Path) -> tuple[Path, str]:
    """Downloads a package with `apt-get download` and unpacks it below `cache`.

    Args:
        package: Debian package name.
        cache: folder for the .deb files (`debs/`) and the unpacked trees (`unpacked/`); what is there is not fetched
            again.

    Returns:
        The folder of the unpacked package, and the package's version.

    Raises:
        RuntimeError: the package could not be had.
    """
    debs, root = cache / "debs", cache / "unpacked" / package
    debs.mkdir(parents=True, exist_ok=True)
    found = sorted(debs.glob(f"{package}_*.deb"))
    if not found:
        result = subprocess.run(["apt-get", "download", package], cwd=debs, capture_output=True, text=True, check=False)
        found = sorted(debs.glob(f"{package}_*.deb"))
        if not found:
            raise RuntimeError(
                f"package {package}: apt-get download failed ({result.stderr.strip()}); run `apt-get update` first"
            )
    if not root.exists():
        unpacking = root.with_name(f"{package}.part")  # renamed when whole, so that a killed run leaves no half package
        shutil.rmtree(unpacking, ignore_errors=True)
        unpacking.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["dpkg", "-x", str(found[-1]), str(unpacking)], check=True)
        unpacking.rename(root)
    version = subprocess.run(["dpkg-deb", "-f", str(found[-1]), "Version"], capture_output=True, text=True, check=True)
    return root, version.stdout.strip()


def split_of(text: str) -> str:
    """`eval` for one per cent of the documents, chosen by hash so that the choice never moves; else `train`."""
    return "eval" if int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) % 100 < HELD_OUT_PER_CENT else "train"


def _documents_of(source: Source, root: Path, seen: Counter[bytes]) -> Iterator[str]:
    files = sorted({p for pattern in source.patterns for p in root.glob(pattern) if p.is_file()})
    files = [p for p in files if not any(part in str(p.relative_to(root)) for part in source.exclude)]
    if not files:
        raise RuntimeError(f"package {source.package}: no file matches {source.patterns}; its layout has changed")
    for paragraphs in READERS[source.reader](root, files):
        kept, size = [], 0
        for paragraph in paragraphs:
            if not is_prose(paragraph):
                continue
            digest = hashlib.blake2b(paragraph.encode(), digest_size=8).digest()
            seen[digest] += 1
            if seen[digest] > MAX_REPEATS:
                continue
            kept.append(paragraph)
            size += len(paragraph)
            if size > MAX_DOCUMENT_CHARS:
                yield from _joined(kept)
                kept, size = [], 0
        yield from _joined(kept)


def _joined(paragraphs: list[str]) -> Iterator[str]:
    text = "\n".join(paragraphs)
    start = next((i for i, c in enumerate(text) if c.isalpha()), len(text))
    text = text[start:].rstrip()
    if len(text) >= MIN_DOCUMENT_CHARS:
        yield text


def _thinned(texts: list[str], limit_bytes: int) -> list[str]:
    """At most `limit_bytes`, dropping documents in the order of their hashes and keeping the original order."""
    ranked = sorted(range(len(texts)), key=lambda i: hashlib.sha256(texts[i].encode()).digest())
    total, kept = 0, set()
    for index in ranked:
        total += len(texts[index].encode())
        if total > limit_bytes:
            break
        kept.add(index)
    return [text for i, text in enumerate(texts) if i in kept]


def collect(out: Path, cache: Path) -> dict[str, Any]:
    """Builds `documents.jsonl` and `manifest.json` in `out` from all `SOURCES`, and returns the manifest."""
    out.mkdir(parents=True, exist_ok=True)
    seen: Counter[bytes] = Counter()
    rows = []
    download("bible-kjv", cache)  # the program that reads bible-kjv-text; no text is taken from it
    with (out / "documents.jsonl").open("w", encoding="utf-8") as stream:
        for source in SOURCES:
            root, version = download(source.package, cache)
            texts = _thinned(list(_documents_of(source, root, seen)), source.limit_bytes)
            digest = hashlib.sha256()
            for text in texts:
                digest.update(text.encode())
                document = Document(source=source.package, licence=source.licence, split=split_of(text), text=text)
                stream.write(json.dumps(asdict(document), ensure_ascii=False) + "\n")
            size = sum(len(text.encode()) for text in texts)
            rows.append(
                {
                    "package": source.package,
                    "version": version,
                    "licence": source.licence,
                    "documents": len(texts),
                    "bytes": size,
                    "sha256": digest.hexdigest(),
                }
            )
            print(
                f"{source.package:28} {version:28} {len(texts):6} documents {size / 1e6:7.2f} MB  {source.licence}",
                flush=True,
            )
    manifest: dict[str, Any] = {"bytes": sum(row["bytes"] for row in rows), "packages": rows}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def read_documents(path: Path) -> Iterator[Document]:
    """The documents of a `documents.jsonl` file."""
    with path.open(encoding="utf-8") as stream:
        for line in stream:
            yield Document(**json.loads(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path(".data/corpus"), help="folder for documents.jsonl and manifest.json"
    )
    parser.add_argument("--cache", type=Path, default=Path(".data/packages"), help="folder for downloaded packages")
    arguments = parser.parse_args()
    manifest = collect(arguments.out, arguments.cache)
    print(f"{manifest['bytes'] / 1e6:.1f} MB in {arguments.out}")


if __name__ == "__main__":
    main()

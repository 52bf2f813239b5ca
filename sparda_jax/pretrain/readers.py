"""Readers that turn the files of a Debian package into clean paragraphs of English, with the standard library only.

Each reader takes the folder of an unpacked package and its files and yields documents, a document being a list of
paragraphs.
"""

import gzip
import re
import subprocess
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path

Paragraphs = list[str]
Reader = Callable[[Path, list[Path]], Iterator[Paragraphs]]

_SKIPPED_TAGS = frozenset(
    "head script style nav header footer pre form button svg table info aside code-block comment".split()
)
_BLOCK_TAGS = frozenset(
    "p li dd dt h1 h2 h3 h4 h5 h6 blockquote div section article body br hr ul ol dl title desc item td tr screen "
    "page note steps list terms media figure".split()
)
_TYPOGRAPHY = str.maketrans(
    {
        "‘": "'",
        "’": "'",
        "“": '"',
        "”": '"',
        "–": "-",
        "—": " - ",
        "…": "...",
        "\xa0": " ",
        "¶": "",
        "\xad": "",
        "•": " ",
    }
)


def clean(text: str) -> str:
    """Plain punctuation, NFC, single spaces, no control characters."""
    text = unicodedata.normalize("NFC", text).translate(_TYPOGRAPHY)
    return "".join(c for c in " ".join(text.split()) if c.isprintable())


def is_prose(paragraph: str) -> bool:
    """True for a sentence-like paragraph: 40 characters or more, mostly letters and spaces, nearly all ASCII."""
    if len(paragraph) < 40:
        return False
    letters = sum(c.isalpha() or c == " " for c in paragraph)
    return letters >= 0.82 * len(paragraph) and sum(not c.isascii() for c in paragraph) <= 0.03 * len(paragraph)


def read_text(path: Path) -> str:
    """The text of a plain or gzip (also dictzip) file."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    return data.decode("utf-8", errors="replace").replace("�", "")


class _BlockParser(HTMLParser):
    """Collects the text of block elements; code, tables and navigation are left out."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: Paragraphs = []
        self._pieces: list[str] = []
        self._skip_depth: dict[str, int] = {}

    def _flush(self) -> None:
        text = clean("".join(self._pieces))
        if text:
            self.blocks.append(text)
        self._pieces = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _SKIPPED_TAGS:
            self._skip_depth[tag] = self._skip_depth.get(tag, 0) + 1
        if tag in _BLOCK_TAGS or tag in _SKIPPED_TAGS:
            self._flush()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _BLOCK_TAGS:
            self._flush()

    def handle_endtag(self, tag: str) -> None:
        if self._skip_depth.get(tag, 0) > 0:
            self._skip_depth[tag] -= 1
        if tag in _BLOCK_TAGS or tag in _SKIPPED_TAGS:
            self._flush()

    def handle_data(self, data: str) -> None:
        if not any(self._skip_depth.values()):
            self._pieces.append(data)

    def close(self) -> None:
        super().close()
        self._flush()


def html_blocks(markup: str) -> Paragraphs:
    """The text of the block elements of an HTML (or Mallard) page, in order."""
    parser = _BlockParser()
    parser.feed(markup)
    parser.close()
    return parser.blocks


def _read_html(root: Path, files: list[Path]) -> Iterator[Paragraphs]:
    for path in files:
        yield html_blocks(read_text(path))


def _read_pod(root: Path, files: list[Path]) -> Iterator[Paragraphs]:
    for path in files:
        paragraphs = []
        for block in read_text(path).split("\n\n"):
            if not block or block[0] in " \t=":  # indented code and directives
                continue
            while re.search(r"[A-Z]<[^<>]*>", block):
                block = re.sub(r"L<(?:[^<>|]*\|)?([^<>]*)>", r"\1", block)
                block = re.sub(r"[XZ]<[^<>]*>", "", block)
                block = re.sub(r"E<[^<>]*>", " ", block)
                block = re.sub(r"[A-Z]<([^<>]*)>", r"\1", block)
            paragraphs.append(clean(block))
        yield paragraphs


def _read_bible(root: Path, files: list[Path]) -> Iterator[Paragraphs]:
    """The data file has a compressed format of its own; the package `bible-kjv` holds the program that reads it."""
    program = root.parent / "bible-kjv" / "usr" / "bin" / "bible"
    command = [str(program), "-l9999", "-p", str(files[0].parent), "gen1:1-rev22:21"]
    output = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, text=True).stdout
    book, paragraphs = "", []
    for line in output.splitlines():
        heading = re.match(r"^(\S.*?) \d+$", line)
        if heading and heading[1] != book:
            if paragraphs:
                yield paragraphs
            book, paragraphs = heading[1], []
        verse = re.match(r"^\s*\d+ (.*)$", line)
        if verse:
            paragraphs.append(clean(verse[1]))
    yield paragraphs


def _grouped(entries: Iterable[str], *, size: int) -> Iterator[Paragraphs]:
    """Dictionary entries in documents of `size` entries."""
    group: Paragraphs = []
    for entry in entries:
        group.append(entry)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _read_gcide(root: Path, files: list[Path]) -> Iterator[Paragraphs]:
    def entries() -> Iterator[str]:
        for block in read_text(files[0]).split("\n\n"):
            block = re.sub(r"\[[^\[\]]*\]", "", re.sub(r"\\[^\\]*\\", "", block))  # sources, etymology, pronunciation
            block = re.sub(
                r"\([^\s()]*[\"`^*-][^\s()]*\)", "", block
            )  # pronunciation again, its letters lost in conversion
            block = re.sub(r"[{}?*]|--[A-Z][\w .&]*$", "", block)
            yield re.sub(r" ([,.;:])", r"\1", clean(block))

    yield from _grouped((e for e in entries() if is_prose(e)), size=60)


def _read_wordnet(root: Path, files: list[Path]) -> Iterator[Paragraphs]:
    def entries() -> Iterator[str]:
        for block in re.split(r"\n(?=\S)", read_text(files[0])):
            word, _, body = block.partition("\n")
            body = re.sub(r"\[(?:syn|ant|also)[^\]]*\]", "", body.replace("{", "").replace("}", ""))
            body = re.sub(r"^\s*(?:n|v|adj|adv)? ?\d*:", "", clean(body))
            yield re.sub(r" ([,.;:])", r"\1", clean(f"{word}: {body}"))

    yield from _grouped((e for e in entries() if is_prose(e)), size=60)


def _read_foldoc(root: Path, files: list[Path]) -> Iterator[Paragraphs]:
    def entries() -> Iterator[str]:
        for block in read_text(files[0]).split("\n\n"):
            yield clean(re.sub(r"[{}]|<[^<>]*>|^\s*\d+\. ", "", block))

    yield from _grouped((e for e in entries() if is_prose(e)), size=60)


def _read_fortune(root: Path, files: list[Path]) -> Iterator[Paragraphs]:
    for path in files:
        yield from _grouped((clean(block.replace("\b", "")) for block in read_text(path).split("\n%\n")), size=60)


def _read_endless_sky(root: Path, files: list[Path]) -> Iterator[Paragraphs]:
    for path in files:
        yield [clean(line) for line in re.findall(r"`([^`]*)`", read_text(path))]


def _read_wesnoth(root: Path, files: list[Path]) -> Iterator[Paragraphs]:
    for path in files:
        yield [
            clean(re.sub(r"<[^<>]*>", "", line.replace('""', "'")))
            for line in re.findall(r'_ *"([^"]*)"', read_text(path))
        ]


READERS: dict[str, Reader] = {
    "html": _read_html,
    "pod": _read_pod,
    "bible": _read_bible,
    "gcide": _read_gcide,
    "wordnet": _read_wordnet,
    "foldoc": _read_foldoc,
    "fortune": _read_fortune,
    "endless_sky": _read_endless_sky,
    "wesnoth": _read_wesnoth,
}

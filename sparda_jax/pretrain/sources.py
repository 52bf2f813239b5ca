"""The Debian packages that the text of the bundled model comes from, with their licences.

Every package is in Debian main, so it meets the Debian Free Software Guidelines; the licence named here is the one
that the package's copyright file gives for the text that is taken.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Source:
    """One package and how its text is read.

    Attributes:
        package: Debian package name.
        licence: licence of the text taken.
        reader: name of the reader in `corpus.READERS`.
        patterns: globs below the unpacked package; files are read in sorted order.
        exclude: substrings of a path that rule a file out.
        limit_bytes: most bytes of clean text to keep; documents are dropped by hash, so the kept part is spread evenly.
    """

    package: str
    licence: str
    reader: str
    patterns: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    limit_bytes: int = 8_000_000


_GPL2 = "GPL-2.0-or-later"
_FORTUNE_FILES = (
    "art education food fortunes humorists literature people platitudes science wisdom work computers".split()
)

SOURCES: tuple[Source, ...] = (
    Source(package="bible-kjv-text", licence="public domain", reader="bible", patterns=("usr/lib/bible.data",)),
    Source(
        package="dict-gcide",
        licence=_GPL2,
        reader="gcide",
        patterns=("usr/share/dictd/gcide.dict.dz",),
        limit_bytes=14_000_000,
    ),
    Source(
        package="dict-wn",
        licence="WordNet-3.0",
        reader="wordnet",
        patterns=("usr/share/dictd/wn.dict.dz",),
        limit_bytes=5_000_000,
    ),
    Source(
        package="dict-foldoc",
        licence="GFDL-1.1-no-invariants-or-later",
        reader="foldoc",
        patterns=("usr/share/dictd/foldoc.dict.dz",),
    ),
    Source(
        package="fortunes-min",
        licence="BSD-3-Clause",
        reader="fortune",
        patterns=tuple(f"usr/share/games/fortunes/{name}" for name in _FORTUNE_FILES),
    ),
    Source(
        package="fortunes",
        licence="BSD-3-Clause",
        reader="fortune",
        patterns=tuple(f"usr/share/games/fortunes/{name}" for name in _FORTUNE_FILES),
    ),
    Source(
        package="endless-sky-data",
        licence="GPL-3.0-or-later",
        reader="endless_sky",
        patterns=("usr/share/games/endless-sky/data/**/*.txt",),
    ),
    Source(
        package="wesnoth-1.16-data",
        licence=_GPL2,
        reader="wesnoth",
        patterns=("usr/share/games/wesnoth/1.16/data/**/*.cfg",),
    ),
    Source(package="git-doc", licence="GPL-2.0-only", reader="html", patterns=("usr/share/doc/git-doc/**/*.html",)),
    Source(
        package="perl-doc",
        licence="GPL-1.0-or-later OR Artistic-1.0-Perl",
        reader="pod",
        patterns=("usr/share/perl/**/*.pod",),
        exclude=("perltoc", "perlcn", "perljp", "perlko", "perltw"),
    ),
    Source(
        package="python3.11-doc",
        licence="PSF-2.0",
        reader="html",
        patterns=("usr/share/doc/python3.11/html/**/*.html",),
        exclude=("genindex", "py-modindex", "search.html", "_sources", "contents.html", "changelog.html"),
    ),
    Source(
        package="postgresql-doc-15",
        licence="PostgreSQL",
        reader="html",
        patterns=("usr/share/doc/postgresql-doc-15/html/*.html",),
    ),
    Source(
        package="linux-doc-6.1",
        licence="GPL-2.0-only",
        reader="html",
        patterns=("usr/share/doc/linux-doc-6.1/html/**/*.html",),
        exclude=("translations", "devicetree", "genindex", "_sources", "/hwmon/", "/gpu/amdgpu"),
        limit_bytes=12_000_000,
    ),
    Source(
        package="rust-doc",
        licence="MIT OR Apache-2.0",
        reader="html",
        patterns=tuple(
            f"usr/share/doc/rust-doc/html/{book}/*.html"
            for book in ("book", "reference", "nomicon", "cargo", "rustc", "edition-guide", "rust-by-example")
        ),
        exclude=("print.html",),
    ),
    Source(
        package="apache2-doc",
        licence="Apache-2.0",
        reader="html",
        patterns=("usr/share/doc/apache2-doc/manual/en/**/*.html",),
    ),
    Source(
        package="sqlite3-doc",
        licence="public domain",
        reader="html",
        patterns=("usr/share/doc/sqlite3/**/*.html",),
        exclude=("keyword_index", "sitemap"),
    ),
    Source(
        package="cmake-doc",
        licence="BSD-3-Clause",
        reader="html",
        patterns=("usr/share/doc/cmake-data/html/**/*.html",),
        exclude=("_sources", "genindex"),
    ),
    Source(
        package="libreoffice-help-en-us",
        licence="MPL-2.0",
        reader="html",
        patterns=("usr/share/libreoffice/help/en-US/text/**/*.html",),
    ),
    Source(
        package="gnome-user-docs",
        licence="CC-BY-SA-3.0",
        reader="html",
        patterns=("usr/share/help/C/**/*.page",),
    ),
    Source(
        package="debian-handbook",
        licence="GPL-2.0-or-later OR CC-BY-SA-3.0",
        reader="html",
        patterns=("usr/share/doc/debian-handbook/html/en-US/*.html",),
    ),
    Source(
        package="debian-reference-en",
        licence=_GPL2,
        reader="html",
        patterns=("usr/share/debian-reference/*.html",),
    ),
    Source(
        package="installation-guide-amd64",
        licence="GPL-2.0-only",
        reader="html",
        patterns=("usr/share/doc/installation-guide-amd64/en/*.html",),
    ),
    Source(
        package="debian-policy",
        licence=_GPL2,
        reader="html",
        patterns=(
            "usr/share/doc/debian-policy/policy.html/*.html",
            "usr/share/doc/debian-policy/perl-policy.html/*.html",
        ),
        exclude=("genindex",),
    ),
    Source(
        package="developers-reference",
        licence=_GPL2,
        reader="html",
        patterns=("usr/share/developers-reference/*.html",),
        exclude=("genindex",),
    ),
    Source(
        package="harden-doc",
        licence="GPL-2.0-only",
        reader="html",
        patterns=("usr/share/doc/harden-doc/html/en-US/*.html",),
    ),
    Source(
        package="aptitude-doc-en",
        licence=_GPL2,
        reader="html",
        patterns=("usr/share/doc/aptitude/**/*.html",),
    ),
    Source(
        package="exim4-doc-html",
        licence=_GPL2,
        reader="html",
        patterns=("usr/share/doc/exim4-doc-html/**/*.html",),
    ),
    Source(
        package="zsh-doc", licence="zsh (MIT-like)", reader="html", patterns=("usr/share/doc/zsh-common/html/*.html",)
    ),
    Source(package="mutt", licence=_GPL2, reader="html", patterns=("usr/share/doc/mutt/html/*.html",)),
)

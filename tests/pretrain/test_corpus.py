"""Cleaning and splitting of the corpus."""

from sparda_jax.pretrain.corpus import split_of
from sparda_jax.pretrain.readers import clean, html_blocks, is_prose
from sparda_jax.pretrain.sources import SOURCES


def test_html_keeps_paragraphs_and_drops_code_and_navigation() -> None:
    page = (
        "<html><head><title>t</title><style>p{}</style></head><body><nav>Up | Next</nav><h1>Chapter&nbsp;one</h1>"
        "<p>A <b>bold</b> word,\n and more.</p><pre>x = <code>1</code></pre>"
        "<ul><li>First</li><li>Second</li></ul></body></html>"
    )
    assert html_blocks(page) == ["Chapter one", "A bold word, and more.", "First", "Second"]


def test_unclosed_paragraphs_do_not_run_together() -> None:
    assert html_blocks("<p>one<p>two<br>three") == ["one", "two", "three"]


def test_clean_and_prose() -> None:
    assert clean("“It’s”\x00 a\t test\xa0…") == '"It\'s" a test ...'
    assert is_prose("This sentence is long enough to be kept as a piece of text.")
    assert not is_prose("Too short.")
    assert not is_prose("x = [1, 2, 3]; y = {4: 5, 6: 7}; z = (x, y)[0] + 12345")


def test_split_holds_out_about_one_per_cent() -> None:
    held_out = sum(split_of(f"document {i}") == "eval" for i in range(20_000))
    assert 140 <= held_out <= 260


def test_every_source_names_its_licence() -> None:
    assert len({source.package for source in SOURCES}) == len(SOURCES)
    assert all(source.licence and source.patterns for source in SOURCES)

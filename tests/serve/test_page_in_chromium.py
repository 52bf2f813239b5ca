"""The page in a headless Chromium: live numbers, a prompt and its answer, errors, and nothing that could run."""

import json
import time
from collections.abc import Callable, Iterator

import pytest

from sparda_jax.serve.access import Access
from tests.serve import fakes
from tests.serve.browser import Browser, browser
from tests.serve.fakes import FakeRunner, Served, serve, wait_until

pytestmark = pytest.mark.browser
MARKUP = '<b>bold</b><img src=x onerror="window.ran = 1"><script>window.ran = 1</script>&amp; é🙂'
# The page's next answers are this text, three bytes a time.
CUT_STREAM = """
const bytes = new TextEncoder().encode(arguments[0]);
window.fetch = async (path) => new Response(new ReadableStream({ start(stream) {
  for (let i = 0; i < bytes.length; i += 3) stream.enqueue(bytes.slice(i, i + 3));
  stream.close();
  window.sent ||= path.startsWith("v1");
} }));
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture
def served() -> Iterator[Served]:
    runner = FakeRunner(max_model_len=5000)
    with serve(runner, max_queue=5) as server:
        yield server


@pytest.fixture(autouse=True)
def _no_complaints(chromium: Browser) -> Iterator[None]:
    chromium.complaints()
    yield
    # A status that is no success is told there, too; the tests that make one look for it themselves.
    found = [line for line in chromium.complaints() if "Failed to load resource" not in line]
    assert not found


def until_shown(chromium: Browser, element: str, fits: Callable[[str], bool]) -> str:
    wait_until(lambda: fits(chromium.text(element)))
    return chromium.text(element)


def test_live_numbers(chromium: Browser, served: Served) -> None:
    chromium.open(served.url)
    until_shown(chromium, "status", lambda text: text == "ready")
    assert chromium.text("model") == "tiny"
    assert (chromium.text("decoding"), chromium.text("lanes"), chromium.text("queued")) == ("0", "4", "0 of 5")
    assert chromium.text("pool-blocks") == "10,000"
    assert not chromium.is_shown("key-field")
    served.runner.step_seconds = 0.01
    chromium.type("prompt", "go on")
    chromium.type("max-tokens", "4000")
    chromium.click("send")
    until_shown(chromium, "decoding", lambda text: text == "1")
    until_shown(chromium, "tokens-rate", lambda text: text not in ("–", "0"))
    assert chromium.run("return document.getElementById('lanes-bar').getBoundingClientRect().width") > 10
    assert float(chromium.text("tokens-total").replace(",", "")) > 0
    assert chromium.text("ttft").endswith("s")
    wait_until(lambda: " " in chromium.run("return document.getElementById('tokens-line').getAttribute('points')"))
    chromium.click("stop")
    until_shown(chromium, "measured", lambda text: text.startswith("stopped; first token after "))
    wait_until(lambda: served.engine.stats().running == 0)
    until_shown(chromium, "requests", lambda text: text == "chat.completions4991")


def test_an_answer_is_text_and_nothing_else(chromium: Browser, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the server streams it, some letters at a time; and in one piece, which the network cuts anywhere."""
    monkeypatch.setitem(fakes.ANSWERS, "markup", MARKUP)
    chromium.open(served.url)
    chromium.type("prompt", "markup")
    chromium.click("send")
    measured = until_shown(chromium, "measured", lambda text: " out" in text)
    assert chromium.text("answer") == MARKUP
    assert "first token after" in measured
    assert "tokens/s" in measured
    event = json.dumps({"choices": [{"delta": {"content": MARKUP}}]}, ensure_ascii=False)
    chromium.run(CUT_STREAM, f": keep-alive\n\ndata: {event}\n\ndata: [DONE]\n\n")
    chromium.click("send")
    wait_until(lambda: chromium.run("return window.sent"))
    until_shown(chromium, "answer", lambda text: text == MARKUP)
    assert chromium.run("return document.getElementById('answer').children.length") == 0
    time.sleep(0.3)
    assert chromium.run("return window.ran ?? null") is None
    # Even a script that got into the page would not run; the browser says so.
    chromium.run("const s = document.createElement('script'); s.text = 'window.ran = 1'; document.body.append(s)")
    assert chromium.run("return window.ran ?? null") is None
    (complaint,) = chromium.complaints()
    assert "Content Security Policy" in complaint


def test_what_is_refused_is_told(chromium: Browser, served: Served) -> None:
    chromium.open(served.url)
    chromium.type("prompt", "hello")
    chromium.type("max-tokens", "9000")
    chromium.click("send")
    text = until_shown(chromium, "measured", lambda text: text != "")
    assert text.startswith("400: the prompt has")
    assert chromium.run("return document.getElementById('measured').className") == "bad"
    chromium.type("max-tokens", "50")
    chromium.type("temperature", "0")
    chromium.type("prompt", "hello, this fails")
    chromium.click("send")
    until_shown(chromium, "measured", lambda text: "a device said no" in text)
    chromium.type("prompt", "hello")
    chromium.click("send")
    until_shown(chromium, "answer", lambda text: text == "hello there")


def test_the_key(chromium: Browser) -> None:
    with serve(access=Access(api_key="the-key")) as served:
        chromium.open(served.url)
        wait_until(lambda: chromium.is_shown("key-field"))
        chromium.type("prompt", "hello")
        chromium.click("send")
        until_shown(chromium, "measured", lambda text: text.startswith("401: the API key is missing or wrong"))
        chromium.type("key", "the-key")
        chromium.click("send")
        until_shown(chromium, "answer", lambda text: text == "hello there")


def test_a_server_that_goes_away(chromium: Browser) -> None:
    with serve() as served:
        chromium.open(served.url)
        until_shown(chromium, "status", lambda text: text == "ready")
    until_shown(chromium, "status", lambda text: text.startswith("no answer"))


@pytest.mark.parametrize("width", [320, 700, 1400])
def test_nothing_sticks_out(chromium: Browser, served: Served, width: int) -> None:
    chromium.resize(width, 900)
    chromium.open(served.url)
    until_shown(chromium, "status", lambda text: text == "ready")
    assert chromium.run("return innerWidth") == width
    assert chromium.run("return document.documentElement.scrollWidth") <= width

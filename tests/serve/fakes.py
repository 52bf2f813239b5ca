"""A model of a few lines in place of the real one, and a server around it: the engine and all above it are real."""

import contextlib
import dataclasses
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn

from sparda_jax.sampling import SamplingParams
from sparda_jax.serve.api import ServerInfo, create_app
from sparda_jax.serve.engine import Engine
from sparda_jax.tokenizer import Tokenizer
from tests.serve.tiny_tokenizer import CHAT_TEMPLATE, EOS, IM_END, train_backend

MODEL = "tiny"
CHUNK = 8
TOKENIZER = Tokenizer(
    train_backend(),
    {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": CHAT_TEMPLATE},
)
# What the fake model answers to a prompt, by a word in the prompt; the end-of-sequence token follows.
ANSWERS = {
    "number": "the special magic number is 1234567.",
    "emoji": "a🙂é 日本 🙂",
    "hello": "hello there",
}


@dataclasses.dataclass
class FakeStats:
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        return {"decode": {"tokens": self.tokens, "read_fraction": 0.5}}


class FakeSequence:
    """Prefills `CHUNK` tokens a step, then answers by `ANSWERS` (greedy) or by its seed (temperature above 0)."""

    def __init__(self, runner: "FakeRunner", prompt: Sequence[int], params: SamplingParams) -> None:
        self._runner, self._prompt, self._params = runner, list(prompt), params
        self.prefilled = 0
        self.steps = 0
        text = TOKENIZER.decode(prompt)
        answer = next((a for word, a in ANSWERS.items() if word in text), None)
        if params.temperature > 0:
            answer = hashlib.sha256(f"{params.seed} {params.top_p} {params.top_k}".encode()).hexdigest()[:12]
        self._answer = None if answer is None else [*TOKENIZER.encode(answer, add_bos=False), EOS]
        if "turn" in text:
            self._answer = [*TOKENIZER.encode("done", add_bos=False), IM_END]
        self._text = text

    @property
    def stats(self) -> FakeStats:
        return FakeStats(self.steps)

    def advance(self) -> int | None:
        self._runner.log.append(self)
        if self._runner.step_seconds:
            time.sleep(self._runner.step_seconds)
        if self._runner.hold is not None:
            assert self._runner.hold.wait(30)
        if self.prefilled < len(self._prompt):
            self.prefilled = min(self.prefilled + CHUNK, len(self._prompt))
            if self.prefilled < len(self._prompt):
                return None
        if "fails" in self._text and self.steps == 2:
            raise RuntimeError("a device said no")
        if "fatal" in self._text:
            raise self._runner.fatal()
        token = self._answer[self.steps] if self._answer is not None and self.steps < len(self._answer) else 70
        self.steps += 1
        return token


class FakeRunner:
    """`hold`, where set, stops every step until it is released; `log` lists the sequence of each step."""

    def __init__(self, max_model_len: int = 200) -> None:
        self.max_model_len = max_model_len
        self.hold: threading.Event | None = None
        self.step_seconds = 0.0
        self.log: list[FakeSequence] = []
        self.fatal: Callable[[], Exception] = RuntimeError

    def start(self, prompt: Sequence[int], params: SamplingParams) -> FakeSequence:
        if TOKENIZER.decode(prompt).endswith("refused"):
            raise ValueError("prompt is one that the runner refuses")
        return FakeSequence(self, prompt, params)


@dataclasses.dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    runner: FakeRunner
    engine: Engine


@contextlib.contextmanager
def running_engine(runner: FakeRunner, **options: Any) -> Iterator[Engine]:
    """A started engine over a fake model."""
    engine = Engine(runner, eos_token_ids=[EOS, IM_END], **options)
    engine.start()
    try:
        yield engine
    finally:
        if runner.hold is not None:
            runner.hold.set()
        engine.close()


@contextlib.contextmanager
def serve(runner: FakeRunner | None = None, **options: Any) -> Iterator[Served]:
    """A live uvicorn on a free loopback port, in a thread."""
    runner = runner or FakeRunner()
    with running_engine(runner, **options) as engine, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        info = ServerInfo(model=MODEL, mode="sparse", vocab_size=TOKENIZER.vocab_size, temperature=0.0)
        app = create_app(engine, TOKENIZER, info)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", runner, engine)
        finally:
            if runner.hold is not None:
                runner.hold.set()
            server.should_exit = True
            thread.join(20)


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Polls until the condition holds; fails the test when it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.005)

"""A model of a few lines in place of the real one, and a server around it: the engine and all above it are real."""

import contextlib
import dataclasses
import hashlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import uvicorn

from sparda_jax.logprobs import Logprobs
from sparda_jax.sampling import SamplingParams
from sparda_jax.serve.access import OPEN, Access
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


def fake_logprobs(tokens: Sequence[int], likeliest: int) -> Logprobs:
    """Of even tokens, which are the likeliest ones in their place, and odd ones, which their lists don't hold."""
    rows, values = [], []
    for token in tokens:
        listed = [(token + token % 2 + place) % TOKENIZER.vocab_size for place in range(likeliest)]
        rows.append([token, *listed])
        values.append([-0.5 if token % 2 == 0 else -9.5, *(-0.5 - place for place in range(likeliest))])
    return Logprobs(ids=np.array(rows, np.int32), values=np.array(values, np.float32))


class FakeSequence:
    """Prefills `CHUNK` tokens a time, then answers by `ANSWERS` (greedy) or by its seed (temperature above 0),
    or with any of the tokens that are allowed."""

    def __init__(self, prompt: Sequence[int], params: SamplingParams) -> None:
        self.prompt, self.prefilled, self.steps = list(prompt), 0, 0
        self.text = TOKENIZER.decode(prompt)
        answer = next((a for word, a in ANSWERS.items() if word in self.text), None)
        if params.temperature > 0:
            answer = hashlib.sha256(f"{params.seed} {params.top_p} {params.top_k}".encode()).hexdigest()[:12]
        self.answer = None if answer is None else [*TOKENIZER.encode(answer, add_bos=False), EOS]
        if "turn" in self.text:
            self.answer = [*TOKENIZER.encode("done", add_bos=False), IM_END]
        self.emitted = 0
        self.params, self.newest = params, -1
        self.allowed: np.ndarray | None = None
        self.random = random.Random(params.seed or 0)

    @property
    def stats(self) -> FakeStats:
        return FakeStats(self.emitted)

    def take_logprobs(self) -> tuple[Logprobs | None, Logprobs | None]:
        params, of_token, of_prompt = self.params, None, None
        if params.logprobs is not None:
            of_token = fake_logprobs([self.newest], params.logprobs)
        if params.prompt_logprobs is not None and self.emitted == 1:
            of_prompt = fake_logprobs(self.prompt[1:], params.prompt_logprobs)
        return of_token, of_prompt

    def next(self) -> int:
        """The next token of the answer."""
        if self.allowed is not None:
            bits = np.unpackbits(self.allowed.view(np.uint8), bitorder="little")
            return self.random.choice(np.flatnonzero(bits).tolist())
        token = self.answer[self.steps] if self.answer is not None and self.steps < len(self.answer) else 70
        self.steps += 1
        return token


class FakeRunner:
    """An executor of a few lines. `hold`, where set, stops every chunk and step until it is released; `log` lists the
    sequence of each chunk, and of each lane in each step. What it is asked is checked: lanes are free before a sequence
    comes, and a sequence is released once.
    """

    def __init__(self, max_model_len: int = 200, *, num_lanes: int = 4, num_blocks: int = 10_000) -> None:
        self.max_model_len = max_model_len
        self.num_lanes, self.num_blocks, self.block_size = num_lanes, num_blocks, 64
        self.staging_tokens = 1 << 20
        self.hold: threading.Event | None = None
        self.step_seconds = 0.0
        self.log: list[FakeSequence] = []
        self.fatal: Callable[[], Exception] = RuntimeError
        self.lanes: dict[int, FakeSequence] = {}
        self.live: set[FakeSequence] = set()
        self.started: list[SamplingParams] = []
        self._unread: list[list[tuple[FakeSequence, int]]] = []

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        if TOKENIZER.decode(prompt).endswith("refused"):
            raise ValueError("prompt is one that the runner refuses")

    def start(self, prompt: Sequence[int], params: SamplingParams) -> FakeSequence:
        if TOKENIZER.decode(prompt).endswith("turned away"):
            raise ValueError("an array had the wrong shape")
        sequence = FakeSequence(prompt, params)
        self.started.append(params)
        self.live.add(sequence)
        return sequence

    def allow(self, sequence: FakeSequence, mask: np.ndarray) -> None:
        sequence.allowed = mask

    def prefill(self, sequence: FakeSequence) -> int | None:
        self.log.append(sequence)
        self._pause()
        if "fails" in sequence.text:
            raise RuntimeError("a device said no")
        sequence.prefilled = min(sequence.prefilled + CHUNK, len(sequence.prompt))
        if sequence.prefilled < len(sequence.prompt):
            return None
        if "fatal" in sequence.text:
            raise self.fatal()
        return sequence.next()

    def place(self, lane: int, sequence: FakeSequence) -> None:
        assert lane not in self.lanes
        assert sequence not in self.lanes.values()
        self.lanes[lane] = sequence

    def park(self, sequence: FakeSequence) -> None:
        self.lanes = {lane: other for lane, other in self.lanes.items() if other is not sequence}

    def step(self) -> None:
        self.log.extend(self.lanes.values())
        self._pause()
        self._unread.append([(sequence, sequence.next()) for sequence in self.lanes.values()])

    def read(self, unread: int = 0) -> list[tuple[FakeSequence, int]]:
        ready = self._unread[: len(self._unread) - unread]
        self._unread = self._unread[len(ready) :]
        return [pair for step in ready for pair in step]

    def fed(self, sequence: FakeSequence, token: int) -> None:
        assert sequence in self.live
        sequence.emitted, sequence.newest = sequence.emitted + 1, token

    def release(self, sequence: FakeSequence) -> None:
        self.live.remove(sequence)
        self.park(sequence)

    def note_cache(self) -> None:
        pass

    def cache_stats(self) -> dict[str, tuple[float, str]]:
        return {"cache_blocks": (self.num_blocks, "Blocks.")}

    def _pause(self) -> None:
        if self.step_seconds:
            time.sleep(self.step_seconds)
        if self.hold is not None:
            assert self.hold.wait(30)


@dataclasses.dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    runner: FakeRunner
    engine: Engine


@contextlib.contextmanager
def running_engine(runner: FakeRunner, *, max_active: int | None = None, **options: Any) -> Iterator[Engine]:
    """A started engine over a fake model; with ``max_active``, so many of its lanes."""
    if max_active is not None:
        runner.num_lanes = max_active
    engine = Engine(runner, eos_token_ids=[EOS, IM_END], **options)
    engine.start()
    try:
        yield engine
    finally:
        if runner.hold is not None:
            runner.hold.set()
        engine.close()


@contextlib.contextmanager
def serve(runner: FakeRunner | None = None, access: Access = OPEN, **options: Any) -> Iterator[Served]:
    """A live uvicorn on a free loopback port, in a thread."""
    runner = runner or FakeRunner()
    with running_engine(runner, **options) as engine, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        info = ServerInfo(model=MODEL, mode="sparse", vocab_size=TOKENIZER.vocab_size, temperature=0.0)
        app = create_app(engine, TOKENIZER, info, access)
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

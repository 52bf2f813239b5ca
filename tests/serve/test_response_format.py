"""Answers that must be JSON: a model with random weights, which left alone writes none, and a schema for each request.

An answer is judged by an own reading of its schema, never by the library that kept it to that.
"""

import asyncio
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from sparda_jax.library import SparDA
from sparda_jax.serve.api import ServerInfo, create_app
from sparda_jax.serve.engine import Engine
from sparda_jax.serve.executor import Executor
from sparda_jax.serve.grammar import Grammars
from sparda_jax.serve.requests import EngineError
from tests.serve.fakes import MODEL, TOKENIZER, serve
from tests.serve.harness import MAX_MODEL_LEN, TIMEOUT, pool_of
from tests.serve.in_process import executor_of, ids, until
from tests.serve.tiny_tokenizer import EOS, IM_END

Json = dict[str, Any]


@pytest.fixture(scope="module")
def model(scored_checkpoint: Path) -> SparDA:
    return SparDA.from_pretrained(scored_checkpoint, mode="sparse", max_model_len=MAX_MODEL_LEN)


@pytest.fixture(scope="module")
def executor(model: SparDA) -> Executor:
    """Fewer lanes than requests, so that they take turns."""
    return executor_of(model, max_active=3, slots=5, host_pool_gib=pool_of(60))


def leaf(rng: random.Random) -> Json:
    return rng.choice(
        [
            {"type": "integer", "minimum": rng.randint(-5, 5), "maximum": rng.randint(6, 99)},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": rng.sample(["red", "green", 3, None, "the sky is blue"], 3)},
            {"type": "string", "pattern": "^[a-f]{2,5}$"},
            {"type": "string", "maxLength": rng.randint(1, 6)},
        ]
    )


def random_schema(rng: random.Random) -> Json:
    """An object whose parts are short, one of them a list."""
    names = rng.sample(["a", "bb", "number", "the sun", "é"], rng.randint(1, 2))
    properties = {name: leaf(rng) for name in names}
    properties["list"] = {"type": "array", "items": leaf(rng), "minItems": rng.randint(0, 1), "maxItems": 2}
    required = [name for name in properties if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def fits(value: Any, schema: Json) -> bool:
    """Whether a value is one of a schema's, of the kinds above."""
    match schema.get("type"):
        case None:
            return any(value == one and type(value) is type(one) for one in schema["enum"])
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            least = re.search(schema.get("pattern", ""), value) if isinstance(value, str) else None
            return least is not None and len(value) <= schema.get("maxLength", 99)
        case "array":
            if not isinstance(value, list) or not schema["minItems"] <= len(value) <= schema["maxItems"]:
                return False
            return all(fits(item, schema["items"]) for item in value)
        case _:
            known = schema["properties"]
            if not isinstance(value, dict) or not set(schema["required"]) <= set(value) <= set(known):
                return False
            return all(fits(item, known[name]) for name, item in value.items())


def asking_for(schema: Json) -> Json:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}}


def chosen(answer: Json) -> list[tuple[str, str]]:
    return [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]


@pytest.fixture
def client(model: SparDA, executor: Executor) -> Iterator[Any]:
    """Posts bodies of completions to a server over the real device code, all at once; the whole answers."""
    engine = Engine(executor, eos_token_ids=[EOS, IM_END], quantum=4)
    engine.start()
    info = ServerInfo(model=MODEL, mode="sparse", vocab_size=model.config.vocab_size, temperature=0.0)
    transport = httpx.ASGITransport(app=create_app(engine, model.tokenizer, info))

    async def post(bodies: tuple[Json, ...]) -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=TIMEOUT) as http:
            answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
        assert all(answer.status_code < 500 for answer in answers), [answer.text for answer in answers]
        await until(lambda: engine.stats().running == engine.stats().waiting == 0)
        assert engine.stats().free_blocks == executor.num_blocks
        return answers

    def ask(*bodies: Json) -> list[httpx.Response]:
        return asyncio.run(post(bodies))

    asyncio.run(until_ready(engine))
    try:
        yield ask
    finally:
        engine.close()


async def until_ready(engine: Engine) -> None:
    while not (await engine.health()).ok:
        await asyncio.sleep(0.005)


def requests_of(rng: random.Random) -> list[tuple[Json, Json | None]]:
    """Bodies, each with its schema: greedy and drawn, with penalties, and two that ask for no JSON."""
    found: list[tuple[Json, Json | None]] = []
    for place in range(6):
        body: Json = {"prompt": ids(rng, rng.choice([3, 70, 270])), "max_tokens": 300, "seed": place}
        body |= rng.choice([{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8, "frequency_penalty": 0.3}])
        schema = random_schema(rng) if place % 3 else None
        found.append(
            (body | ({"max_tokens": 40, "ignore_eos": True} if schema is None else asking_for(schema)), schema)
        )
    return found


def test_every_answer_fits_its_schema_alone_and_in_company(executor: Executor, client: Any) -> None:
    """Three lanes for six requests, which give up their lanes after some tokens."""
    requests = requests_of(random.Random(5))
    parked = executor.usage.parked
    together = client(*(body for body, _ in requests))
    assert executor.usage.parked > parked
    for (body, schema), answer in zip(requests, together, strict=True):
        assert answer.status_code == 200, answer.text
        (alone,) = client(body)
        assert chosen(alone.json()) == chosen(answer.json())
        ((text, reason),) = chosen(answer.json())
        if schema is None:
            assert reason == "length"
            continue
        assert reason == "stop", text
        assert fits(json.loads(text), schema), (text, schema)


def test_several_answers_streams_stops_and_log_probabilities(model: SparDA, client: Any) -> None:
    schema = {"enum": [f"{color} {number}" for color in ("red", "blue") for number in range(10, 99)]}
    body = asking_for(schema) | {"prompt": "the number", "temperature": 1.0, "seed": 3}
    whole, streamed, stopped = client(
        body | {"n": 4, "logprobs": 2}, body | {"n": 4, "stream": True}, body | {"stop": ["e"]}
    )
    texts = [text for text, _ in chosen(whole.json())]
    assert all(json.loads(text) in schema["enum"] for text in texts)
    assert len(set(texts)) > 1
    for choice in whole.json()["choices"]:
        assert "".join(choice["logprobs"]["tokens"]).startswith(choice["text"])
    pieces = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    choices = [choice for piece in pieces for choice in piece["choices"]]
    assert ["".join(c["text"] for c in choices if c["index"] == i) for i in range(4)] == texts
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"] * 4
    assert chosen(stopped.json()) == [(texts[0][: texts[0].index("e")], "stop")]


def test_an_answer_that_is_cut_says_so(client: Any) -> None:
    body = asking_for({"type": "array", "items": {"type": "boolean"}, "minItems": 50}) | {"prompt": "a"}
    (answer,) = client(body | {"max_tokens": 7})
    assert answer.json()["usage"]["completion_tokens"] == 7
    ((text, reason),) = chosen(answer.json())
    assert reason == "length"
    assert text.startswith("[")


def test_both_ends_of_a_sequence_may_end_an_answer(client: Any) -> None:
    """A number may always go on, so that it ends by one of the model's own ends, also where they would not count."""
    for end in (EOS, IM_END):
        pushed = {"logit_bias": {str(end): 100, "16": 50}, "prompt": "a", "max_tokens": 30}
        for more in ({}, {"ignore_eos": True}):
            (answer,) = client(asking_for({"type": "integer"}) | pushed | more)
            ((text, reason),) = chosen(answer.json())
            assert reason == "stop"
            assert re.fullmatch(r"-?\d", text)


def test_any_object(client: Any) -> None:
    """Whatever it begins, it is the beginning of an object; closed by a bias, it is one."""
    plain = {"response_format": {"type": "json_object"}, "prompt": "a", "max_tokens": 20}
    closing, text = client(plain | {"logit_bias": {"96": 100}}, plain | {"response_format": {"type": "text"}})
    assert chosen(closing.json()) == [("{}", "stop")]
    assert not chosen(text.json())[0][0].startswith("{")


def test_min_tokens_is_refused(client: Any) -> None:
    (answer,) = client({"prompt": "a", "min_tokens": 5, "response_format": {"type": "json_object"}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_tokens")


def test_the_official_client_asks_for_json() -> None:
    """A fake model that writes any of the tokens that are allowed."""
    rng = random.Random(8)
    with serve() as served, openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0) as client:
        for seed in range(5):
            schema = random_schema(rng)
            answer = client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "hello"}],
                response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
                seed=seed,
            )
            choice = answer.choices[0]
            assert choice.finish_reason in ("stop", "length")
            assert choice.message.content is not None
            if choice.finish_reason == "stop":
                assert fits(json.loads(choice.message.content), schema)


def test_a_token_that_may_not_come_fails_in_one_line() -> None:
    grammar = Grammars(TOKENIZER, vocab_size=TOKENIZER.vocab_size, eos_token_ids=[EOS]).compile({"type": "object"}, "f")
    with pytest.raises(EngineError, match=r"^response_format could not be kept to: .*\Z"):
        grammar.accept(TOKENIZER.encode("O", add_bos=False)[0])

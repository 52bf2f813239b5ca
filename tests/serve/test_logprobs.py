"""Log probabilities as the official client reads them, whole and streamed, of chats and texts; the model is a fake."""

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.serve.fakes import ANSWERS, MODEL, TOKENIZER, Served, fake_logprobs, serve
from tests.serve.tiny_tokenizer import EOS

WORDS = ["number", "emoji", "hello"]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(max_active=3, max_queue=32) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0, timeout=30) as made:
        yield made


def answer_of(word: str) -> list[int]:
    return [*TOKENIZER.encode(ANSWERS[word], add_bos=False), EOS]


def chat(client: openai.OpenAI, word: str, **options: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": word}], logprobs=True, **options
    )


def data_of(token: int) -> bytes:
    """Of this tokenizer, by its own table."""
    return b"</s>" if token == EOS else TOKENIZER.token_bytes(token)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("likeliest", [None, 0, 3, 20])
def test_a_chats_tokens(client: openai.OpenAI, word: str, likeliest: int | None) -> None:
    options = {} if likeliest is None else {"top_logprobs": likeliest}
    choice = chat(client, word, **options).choices[0]
    tokens, rows = answer_of(word), fake_logprobs(answer_of(word), likeliest or 0)
    content = choice.logprobs.content
    assert [bytes(entry.bytes) for entry in content] == [data_of(token) for token in tokens]
    # A character is there as soon as it is complete, so the texts make up the answer.
    assert "".join(entry.token for entry in content) == choice.message.content + "</s>"
    assert not any("\ufffd" in entry.token for entry in content)
    for entry, ids, values in zip(content, rows.ids.tolist(), rows.values.tolist(), strict=True):
        assert entry.logprob == values[0]
        assert [other.logprob for other in entry.top_logprobs] == values[1:]
        assert [bytes(other.bytes) for other in entry.top_logprobs] == [TOKENIZER.token_bytes(i) for i in ids[1:]]
    assert choice.logprobs.refusal is None


@pytest.mark.parametrize("word", WORDS)
def test_a_streamed_chat_has_the_same_tokens(client: openai.OpenAI, word: str) -> None:
    whole = chat(client, word, top_logprobs=2).choices[0]
    chunks = list(chat(client, word, top_logprobs=2, stream=True, stream_options={"include_usage": True}))
    *chunks, usage = chunks
    assert usage.usage.completion_tokens == len(answer_of(word))
    parts = [chunk.choices[0].logprobs.content for chunk in chunks if chunk.choices[0].logprobs]
    assert len(parts) > 3
    assert list(itertools.chain(*parts)) == whole.logprobs.content
    # Each chunk's tokens make up its text.
    for chunk in chunks:
        choice = chunk.choices[0]
        if choice.logprobs:
            texts = "".join(entry.token for entry in choice.logprobs.content)
            assert texts.removesuffix("</s>") == choice.delta.content


def test_without_asking_there_are_none(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    assert client.chat.completions.create(**options).choices[0].logprobs is None
    assert client.chat.completions.create(**options, logprobs=False).choices[0].logprobs is None
    assert client.completions.create(model=MODEL, prompt="hello", echo=True).choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("word", WORDS)
def test_a_texts_tokens(client: openai.OpenAI, word: str, stream: bool) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": word, "logprobs": 2}
    if stream:
        chunks = [chunk.choices[0] for chunk in client.completions.create(**options, stream=True)]
        text = "".join(chunk.text for chunk in chunks)
        found = {
            name: [x for chunk in chunks if chunk.logprobs for x in getattr(chunk.logprobs, name)]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
    else:
        choice = client.completions.create(**options).choices[0]
        text, found = choice.text, choice.logprobs.model_dump()
    tokens = answer_of(word)
    rows = fake_logprobs(tokens, 2)
    assert found["token_logprobs"] == rows.values[:, 0].tolist()
    assert "".join(found["tokens"]) == text + "</s>"
    offsets = [0, *itertools.accumulate(map(len, found["tokens"]))]
    assert found["text_offset"] == offsets[:-1]
    for token, text, best, ids in zip(tokens, found["tokens"], found["top_logprobs"], rows.ids.tolist(), strict=True):
        assert best[text] == (-0.5 if token % 2 == 0 else -9.5)
        # An odd token comes on top of the likeliest ones; parts of characters have the same text.
        texts = {text, *(data_of(i).decode(errors="replace") for i in ids[1:] if i != token)}
        assert set(best) == texts
        assert max(best.values()) == -0.5


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompts_tokens(client: openai.OpenAI, as_ids: bool, max_tokens: int, stream: bool) -> None:
    """As an evaluation of likelihoods asks: ids or text, echo, hardly a new token."""
    text = "say hello to 日本"
    prompt = TOKENIZER.encode(text)
    options: dict[str, Any] = {"model": MODEL, "prompt": prompt if as_ids else text, "max_tokens": max_tokens}
    options |= {"logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    if stream:
        events = [event.choices[0] for event in client.completions.create(**options, stream=True)]
        assert events[0].text == text
        parts = [event.logprobs.model_dump() for event in events if event.logprobs]
        found = {name: [x for part in parts for x in part[name]] for name in parts[0]}
        shown, reason = "".join(event.text for event in events), events[-1].finish_reason
    else:
        answer = client.completions.create(**options)
        choice, found = answer.choices[0], answer.choices[0].logprobs.model_dump()
        shown, reason = choice.text, choice.finish_reason
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), max_tokens)
    new = answer_of("hello")[:max_tokens]
    assert (shown, reason) == (text + TOKENIZER.decode(new), "length")
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys(found, len(prompt) + max_tokens)
    assert (found["token_logprobs"][0], found["top_logprobs"][0], found["tokens"][0]) == (None, None, "<s>")
    rows = fake_logprobs([*prompt[1:], *new], 1)
    assert found["token_logprobs"][1:] == rows.values[:, 0].tolist()
    for token, best in zip([*prompt[1:], *new], found["top_logprobs"][1:], strict=True):
        greedy = max(best.values()) == (-0.5 if token % 2 == 0 else -9.5)
        assert greedy == (token % 2 == 0)
    assert "".join(found["tokens"][1:]) == shown
    for token, offset in zip(found["tokens"][1:], found["text_offset"][1:], strict=True):
        assert shown[offset:].startswith(token)


def test_a_prompt_of_one_token(client: openai.OpenAI) -> None:
    found = client.completions.create(model=MODEL, prompt=[70], echo=True, logprobs=5, max_tokens=0).choices[0]
    assert found.logprobs is not None
    assert found.logprobs.token_logprobs == [None]
    assert found.text == TOKENIZER.decode([70])


def test_answers_of_several_prompts_keep_their_own(client: openai.OpenAI) -> None:
    prompts = [TOKENIZER.encode(text) for text in ("hello", "the number is", "say")]
    answer = client.completions.create(model=MODEL, prompt=prompts, echo=True, logprobs=1, max_tokens=0, n=2)
    assert [choice.text for choice in answer.choices] == [TOKENIZER.decode(p) for p in prompts for _ in range(2)]
    for choice, prompt in zip(answer.choices, [p for p in prompts for _ in range(2)], strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[1:] == fake_logprobs(prompt[1:], 1).values[:, 0].tolist()


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_keeps_the_tokens_that_completed_it(client: openai.OpenAI, stream: bool) -> None:
    """As in vLLM: the text ends before the stop string, the tokens with the one that completed it."""
    answer = chat(client, "number", stop="magic", stream=stream)
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        content = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        text = "".join(choice.delta.content or "" for choice in choices)
    else:
        content, text = answer.choices[0].logprobs.content, answer.choices[0].message.content
    tokens = answer_of("number")
    needed = next(k for k in range(len(tokens)) if "magic" in TOKENIZER.decode(tokens[:k]))
    assert text == ANSWERS["number"][: ANSWERS["number"].index("magic")]
    assert [bytes(entry.bytes) for entry in content] == [data_of(token) for token in tokens[:needed]]


def test_no_stop_string_is_looked_for_within_min_tokens(client: openai.OpenAI) -> None:
    first = len(TOKENIZER.encode("the special", add_bos=False))
    for min_tokens, shown in ((0, ""), (first, "the special magic number is 123")):
        stops = ["the", "4567"]
        answer = chat(client, "number", stop=stops, extra_body={"min_tokens": min_tokens})
        assert answer.choices[0].message.content == shown


def test_all_options_reach_the_model(served: Served) -> None:
    """With the model's own ends of a sequence among the tokens that min_tokens holds back."""
    body = {"prompt": "hello", "max_tokens": 9, "temperature": 0.5, "min_p": 0.25, "presence_penalty": -1}
    body |= {"frequency_penalty": 2, "repetition_penalty": 1.25, "logit_bias": {"7": -100, "8": 1.5}, "min_tokens": 4}
    body |= {"stop_token_ids": [9], "logprobs": 3, "echo": True, "seed": 5}
    assert httpx.post(f"{served.url}/v1/completions", json=body).status_code == 200
    params = served.runner.started[-1]
    assert (params.min_p, params.presence_penalty, params.frequency_penalty) == (0.25, -1, 2)
    assert (params.repetition_penalty, params.logit_bias) == (1.25, ((7, -100.0), (8, 1.5)))
    assert (params.min_tokens, params.logprobs, params.prompt_logprobs) == (4, 3, 3)
    assert set(params.stop_token_ids) == {9, *served.engine._eos}

"""The official client is the judge of every shape: a live server on a loopback port, a fake model behind it."""

import concurrent.futures
from collections.abc import Iterator

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.fakes import ANSWERS, MODEL, TOKENIZER, Served, serve
from tests.serve.tiny_tokenizer import EOS

ASK = [{"role": "user", "content": "what is the number?"}]
NUMBER = ANSWERS["number"]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(max_active=3, max_queue=32) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0, timeout=30) as made:
        yield made


def chat(client: openai.OpenAI, text: str, **options):
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": text}], **options)


def test_chat_answer_and_usage(client: openai.OpenAI) -> None:
    answer = chat(client, "what is the number?")
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (NUMBER, "assistant", "stop")
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    prompt = len(TOKENIZER.encode_chat(ASK))
    generated = len(TOKENIZER.encode(NUMBER, add_bos=False)) + 1  # the end-of-sequence token counts
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, generated)
    assert answer.usage.total_tokens == prompt + generated


def test_any_eos_id_ends_an_answer(client: openai.OpenAI) -> None:
    assert chat(client, "turn").choices[0].message.content == "done"


@pytest.mark.parametrize("text", ["number", "emoji", "hello"])
def test_streamed_chat_equals_the_whole_answer(client: openai.OpenAI, text: str) -> None:
    chunks = list(chat(client, text, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWERS[text]
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)
    assert not any("\ufffd" in (chunk.choices[0].delta.content or "") for chunk in chunks)


def test_stream_usage_comes_last_and_equals_the_whole_answers(client: openai.OpenAI) -> None:
    chunks = list(chat(client, "number", stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == chat(client, "number").usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_raw_events_end_with_done(served: Served) -> None:
    body = {"prompt": "hello", "stream": True, "max_tokens": 2}
    response = httpx.post(f"{served.url}/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")
    assert '"usage"' not in response.text


def test_max_tokens_gives_finish_reason_length(client: openai.OpenAI) -> None:
    for options in ({"max_tokens": 3}, {"max_completion_tokens": 3}):
        answer = chat(client, "number", **options)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3


def test_without_max_tokens_the_context_is_the_limit(client: openai.OpenAI, served: Served) -> None:
    answer = chat(client, "number", extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == served.runner.max_model_len


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_at_every_position(client: openai.OpenAI, stream: bool) -> None:
    """Every substring of four characters, so every way to be split over tokens."""
    for start in range(len(NUMBER) - 3):
        stop = NUMBER[start : start + 4]
        wanted = NUMBER[: NUMBER.index(stop)]
        if stream:
            chunks = list(chat(client, "number", stop=stop, stream=True))
            text, reason = (
                "".join(c.choices[0].delta.content or "" for c in chunks),
                chunks[-1].choices[0].finish_reason,
            )
        else:
            choice = chat(client, "number", stop=[stop]).choices[0]
            text, reason = choice.message.content, choice.finish_reason
        assert (text, reason) == (wanted, "stop"), stop


def test_a_held_back_prefix_is_shown_at_the_end(client: openai.OpenAI) -> None:
    assert chat(client, "number", stop="7.!").choices[0].message.content == NUMBER
    assert chat(client, "emoji", stop=["🙂!", "é 日本!"]).choices[0].message.content == ANSWERS["emoji"]


def test_usage_counts_the_tokens_up_to_the_stop_string(client: openai.OpenAI) -> None:
    answer = chat(client, "number", stop="magic")
    assert answer.usage is not None
    ids = TOKENIZER.encode(NUMBER, add_bos=False)
    needed = next(k for k in range(len(ids)) if "magic" in TOKENIZER.decode(ids[:k]))
    assert answer.usage.completion_tokens == needed


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_ends_an_answer_like_the_models_own(client: openai.OpenAI, stream: bool) -> None:
    ids = TOKENIZER.encode(ANSWERS["emoji"], add_bos=False)
    for position in (0, 1, len(ids) // 2, len(ids) - 1):
        first = ids.index(ids[position])
        extra = {"stop_token_ids": [ids[position], EOS], "ignore_eos": True}
        answer = chat(client, "emoji", extra_body=extra, stream=stream)
        if stream:
            chunks = list(answer)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert chunks[-1].choices[0].finish_reason == "stop"
        else:
            text = answer.choices[0].message.content
            assert answer.choices[0].finish_reason == "stop"
            assert answer.usage.completion_tokens == first + 1
        assert text == TOKENIZER.decode(ids[:first])
    last = chat(client, "number", max_tokens=1, extra_body={"stop_token_ids": TOKENIZER.encode(NUMBER)[1:2]})
    assert last.choices[0].finish_reason == "stop"  # though it is the last one allowed


def test_n_answers_have_seeds_of_their_own_and_are_reproducible(client: openai.OpenAI) -> None:
    options = {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 40}
    first, again = chat(client, "anything", **options), chat(client, "anything", **options)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in again.choices]
    assert texts[1] == chat(client, "anything", **(options | {"n": 1, "seed": 8})).choices[0].message.content
    assert first.usage is not None
    assert first.usage.prompt_tokens == len(TOKENIZER.encode_chat([{"role": "user", "content": "anything"}]))
    streamed = [""] * 3
    for chunk in chat(client, "anything", stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_completion_of_text_ids_and_batches(client: openai.OpenAI) -> None:
    ids = TOKENIZER.encode("the number")
    answer = client.completions.create(model=MODEL, prompt="the number", max_tokens=40)
    assert (answer.object, answer.choices[0].text, answer.choices[0].finish_reason) == (
        "text_completion",
        NUMBER,
        "stop",
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)
    assert client.completions.create(model=MODEL, prompt=ids).choices[0].text == NUMBER
    both = client.completions.create(model=MODEL, prompt=["hello", "the number"])
    assert [choice.text for choice in both.choices] == [ANSWERS["hello"], NUMBER]
    assert [choice.index for choice in both.choices] == [0, 1]
    both = client.completions.create(model=MODEL, prompt=[ids, TOKENIZER.encode("hello")], n=2)
    assert [choice.text for choice in both.choices] == [NUMBER, NUMBER, ANSWERS["hello"], ANSWERS["hello"]]


@pytest.mark.parametrize("prompt", ["say hello", TOKENIZER.encode("say hello")])
def test_echo_repeats_the_prompt_outside_of_the_stop_search(client: openai.OpenAI, prompt: str | list[int]) -> None:
    options = {"model": MODEL, "prompt": prompt, "echo": True, "stop": "say"}
    whole = client.completions.create(**options)
    assert whole.choices[0].text == "say hello" + ANSWERS["hello"]
    streamed = client.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text


def test_text_parts_and_the_developer_role(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "what is"}, {"type": "text", "text": "the number?"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    answer = client.chat.completions.create(model=MODEL, messages=messages)
    as_text = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is\nthe number?"}]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode_chat(as_text))


def test_neutral_values_change_nothing(client: openai.OpenAI) -> None:
    answer = chat(
        client, "number", tools=[], logit_bias={}, logprobs=False, presence_penalty=0, frequency_penalty=0.0,
        response_format={"type": "text"}, user="me", metadata={"a": "b"}, store=True, temperature=0, top_p=1,
        service_tier="auto", extra_body={"top_k": -1, "repetition_penalty": 1.0, "min_p": 0, "min_tokens": 0},
    )  # fmt: skip
    assert answer.choices[0].message.content == NUMBER


def test_stats_come_on_request_only(client: openai.OpenAI) -> None:
    extra = {"return_stats": True}
    wanted = {"mode": "sparse", "choices": [{"index": 0, "decode": {"tokens": 3, "read_fraction": 0.5}}]}
    assert chat(client, "number", max_tokens=3, extra_body=extra).model_extra == {"sparda": wanted}
    *others, last = chat(client, "number", max_tokens=3, stream=True, extra_body=extra)
    assert last.model_extra == {"sparda": wanted}
    assert not any(chunk.model_extra for chunk in others)
    assert not chat(client, "number", max_tokens=3).model_extra


def test_models_are_listed(client: openai.OpenAI, served: Served) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == [MODEL]
    assert client.models.retrieve(MODEL).model_extra == {"max_model_len": served.runner.max_model_len}
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_unknown_model_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=ASK)  # type: ignore[arg-type]
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_a_failing_request_is_500_and_the_next_one_works(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="a device said no"):
        chat(client, "this fails")
    with pytest.raises(openai.APIError, match="a device said no"):
        list(chat(client, "this fails", stream=True))
    assert chat(client, "number").choices[0].message.content == NUMBER


def test_a_prompt_that_the_runner_refuses_is_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="refused")
    assert caught.value.param == "prompt"


def test_many_clients_at_once_get_their_own_answers(client: openai.OpenAI) -> None:
    words = [*ANSWERS] * 6
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda word: chat(client, word).choices[0].message.content, words))
    assert texts == [ANSWERS[word] for word in words]


@settings(max_examples=15)
@given(st.text(min_size=1, max_size=30))
def test_any_text_survives_the_way_through(client: openai.OpenAI, text: str) -> None:
    echoed = client.completions.create(model=MODEL, prompt=text, echo=True, max_tokens=1)
    assert echoed.choices[0].text.startswith(text)

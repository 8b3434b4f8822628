"""Requests of the OpenAI API and what is answered: shapes, texts, errors by name. Against a real server."""

import json
from typing import Any

import pytest

from medusa_cli.serve.policy import Policy, digest_of
from tests.serve.conftest import Served, serving

CHAT, WORDS = "/v1/chat/completions", "/v1/completions"
HI = {"model": "tiny", "messages": [{"role": "user", "content": "w5 w6 w7"}], "temperature": 0, "max_tokens": 8}
GO = {"model": "tiny", "prompt": "w5 w6 w7", "temperature": 0, "max_tokens": 8}


def chat_ids(served: Served, content: str = "w5 w6 w7") -> list[int]:
    return list(served.target.tokenizer(f"w1 {content} w2 ")["input_ids"])


def text_of(served: Served, ids: list[int]) -> str:
    ends = served.target.stop_ids
    return str(served.target.tokenizer.decode([token for token in ids if token not in ends], skip_special_tokens=True))


def events(body: str) -> list[Any]:
    """The documents of a stream; the last line says that it is whole."""
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_chat_is_answered_with_the_models_own_text(served: Served) -> None:
    answer = served.post(CHAT, HI)
    assert answer.status_code == 200
    document = answer.json()
    wanted = served.plain(chat_ids(served), 8)
    (choice,) = document["choices"]
    assert choice["message"] == {"role": "assistant", "content": text_of(served, wanted), "refusal": None}
    assert choice["finish_reason"] == "length"
    assert (document["object"], document["model"]) == ("chat.completion", "tiny")
    assert document["usage"]["completion_tokens"] == 8
    assert document["usage"]["prompt_tokens"] == len(chat_ids(served))
    assert document["usage"]["total_tokens"] == 8 + len(chat_ids(served))
    assert document["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert set(document["speculation"]) == {"num_steps", "num_draft_tokens", "num_accepted_tokens"}
    assert document["id"].startswith("chatcmpl-")


@pytest.mark.parametrize("prompt", ["w5 w6 w7", ["w5 w6 w7"], [5, 6, 7], [[5, 6, 7]]])
def test_a_prompt_is_text_or_ids(served: Served, prompt: Any) -> None:
    document = served.post(WORDS, GO | {"prompt": prompt}).json()
    assert document["choices"][0]["text"] == text_of(served, served.plain([5, 6, 7], 8))
    assert document["object"] == "text_completion"


def test_several_prompts_and_choices_come_in_order(served: Served) -> None:
    document = served.post(WORDS, GO | {"prompt": ["w5", "w9 w4"], "n": 2}).json()
    texts = [choice["text"] for choice in document["choices"]]
    first, second = (text_of(served, served.plain(ids, 8)) for ids in ([5], [9, 4]))
    assert texts == [first, first, second, second]
    assert [choice["index"] for choice in document["choices"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("extra", [{}, {"stream_options": {"include_usage": True}}, {"n": 3}])
def test_a_stream_joins_to_the_whole_answer(served: Served, extra: dict[str, Any]) -> None:
    whole = served.post(CHAT, {**HI, **{name: value for name, value in extra.items() if name == "n"}}).json()
    answer = served.post(CHAT, {**HI, "stream": True, **extra})
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = events(answer.text)
    for index, choice in enumerate(whole["choices"]):
        mine = [each for chunk in chunks for each in chunk["choices"] if each["index"] == index]
        assert "".join(each["delta"].get("content", "") for each in mine) == choice["message"]["content"]
        assert mine[0]["delta"]["role"] == "assistant"
        assert [each["finish_reason"] for each in mine if each["finish_reason"]] == ["length"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    if "stream_options" in extra:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == whole["usage"]
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
    else:
        assert not any("usage" in chunk for chunk in chunks)


def test_a_stream_of_words_joins_too(served: Served) -> None:
    chunks = events(served.post(WORDS, GO | {"stream": True}).text)
    joined = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert joined == text_of(served, served.plain([5, 6, 7], 8))


def test_a_stop_string_ends_a_text_and_is_no_part_of_it(served: Served) -> None:
    ids = served.plain([5, 6, 7], 8)
    word = f"w{ids[3]}"
    document = served.post(WORDS, GO | {"stop": [word]}).json()
    assert document["choices"][0]["finish_reason"] == "stop"
    assert document["choices"][0]["text"].strip() == text_of(served, ids).split(word)[0].strip()


def test_without_guesses_the_text_is_the_same_and_nothing_is_drafted(served: Served) -> None:
    loop = GO | {"max_tokens": 40}
    guessed, plain = (served.post(WORDS, loop | {"speculate": on}).json() for on in (True, False))
    assert guessed["choices"] == plain["choices"]
    assert plain["speculation"]["num_draft_tokens"] == 0
    assert plain["speculation"]["num_steps"] == 39


def test_a_seed_gives_the_same_text_again_and_none_another(served: Served) -> None:
    asked = GO | {"temperature": 1.5, "max_tokens": 20}
    first, again, other = (served.post(WORDS, asked | {"seed": seed}).json()["choices"] for seed in (3, 3, 4))
    assert first == again != other
    unseeded = {served.post(WORDS, asked).json()["choices"][0]["text"] for _ in range(3)}
    assert len(unseeded) > 1


def test_logprobs_are_the_targets_own(served: Served) -> None:
    document = served.post(CHAT, HI | {"logprobs": True, "top_logprobs": 3}).json()
    places = document["choices"][0]["logprobs"]["content"]
    wanted = served.plain(chat_ids(served), 8)
    assert [place["token"] for place in places] == [f"w{token}" for token in wanted]
    for place in places:
        assert len(place["top_logprobs"]) == 3
        assert place["top_logprobs"][0]["logprob"] == place["logprob"] <= 0, "greedy takes the likeliest"
        assert bytes(place["bytes"]).decode() == place["token"]
    older = served.post(WORDS, GO | {"logprobs": 2}).json()["choices"][0]["logprobs"]
    assert len(older["tokens"]) == len(older["token_logprobs"]) == len(older["top_logprobs"]) == 8
    assert older["text_offset"][0] == 0
    streamed = events(served.post(WORDS, GO | {"logprobs": 2, "stream": True}).text)
    offsets = [
        each for chunk in streamed for each in (chunk["choices"][0]["logprobs"] or {"text_offset": []})["text_offset"]
    ]
    assert offsets == older["text_offset"], "they count on from chunk to chunk"
    streamed = events(served.post(CHAT, HI | {"logprobs": True, "stream": True}).text)
    told = [each for chunk in streamed for each in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [each["logprob"] for each in told] == [place["logprob"] for place in places]


def test_a_bias_decides_and_penalties_keep_a_text_from_repeating(served: Served) -> None:
    biased = served.post(WORDS, GO | {"logit_bias": {"42": 100}}).json()
    assert biased["choices"][0]["text"].split() == ["w42"] * 8
    often = GO | {"logit_bias": {"42": 3, "43": 3}, "max_tokens": 12, "ignore_eos": True}
    free, held = (served.post(WORDS, often | {"frequency_penalty": each}).json() for each in (0, 2))
    repeats = [
        len(each["choices"][0]["text"].split()) - len(set(each["choices"][0]["text"].split())) for each in (free, held)
    ]
    assert repeats[1] < repeats[0]


ACCEPTED: list[dict[str, Any]] = [
    {"max_completion_tokens": 3},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 0.7, "min_p": 0.1},
    {"temperature": 2},
    {"presence_penalty": 1.0},
    {"frequency_penalty": -1.0},
    {"repetition_penalty": 1.2},
    {"logit_bias": {}},
    {"seed": 7},
    {"stop": "w3"},
    {"stop": ["w3", "w4", "w8", "w9"]},
    {"user": "me"},
    {"metadata": {"a": "b"}},
    {"ignore_eos": True},
    {"tools": []},
    {"tool_choice": "none"},
    {"response_format": {"type": "text"}},
    {"modalities": ["text"]},
    {"store": False},
    {"service_tier": "auto"},
    {"parallel_tool_calls": True},
    {"n": 4},
    {"model": None},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "w5"}, {"type": "text", "text": " w6"}]}]},
    {"messages": [{"role": "system", "content": "w4"}, {"role": "user", "content": "w5"}]},
    {"messages": [{"role": "developer", "content": "w4"}, {"role": "user", "content": "w5", "name": "ada"}]},
    {
        "messages": [
            {"role": "user", "content": "w5"},
            {"role": "assistant", "content": "w6"},
            {"role": "user", "content": "w7"},
        ]
    },
    {"messages": [{"role": "tool", "content": "w5", "tool_call_id": "x"}]},
]
REFUSED: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "other"}, 404, "model"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": 3}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_p": 1.5}, 400, "top_p"),
    ({"top_k": -3}, 400, "top_k"),
    ({"min_p": 2}, 400, "min_p"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": 2.5}, 400, "max_tokens"),
    ({"max_tokens": "8"}, 400, "max_tokens"),
    ({"n": 0}, 400, "n"),
    ({"n": 1000}, 400, "n"),
    ({"stop": ""}, 400, None),
    ({"stop": ["a"] * 5}, 400, None),
    ({"stop": 3}, 400, "stop"),
    ({"stream_options": {"include_usage": True}}, 400, None),
    ({"top_logprobs": 3}, 400, None),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"1000000": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"3": 101}}, 400, "logit_bias.3"),
    ({"presence_penalty": 3}, 400, "presence_penalty"),
    ({"seed": 1.5}, 400, "seed"),
    ({"nonsense": 1}, 400, "nonsense"),
    ({"messages": []}, 400, "messages"),
    ({"messages": "hi"}, 400, "messages"),
    ({"messages": None}, 400, "messages"),
    ({"messages": [{"content": "w5"}]}, 400, "messages.0.role"),
    ({"messages": [{"role": "robot", "content": "w5"}]}, 400, "messages.0.role"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": "w5 " * 200}]}, 400, None),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, 400, "response_format"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, 400, "messages"),
    ({"audio": {"voice": "x"}}, 400, "audio"),
    ({"store": True}, 400, "store"),
]


@pytest.mark.parametrize("extra", ACCEPTED, ids=json.dumps)
def test_what_is_accepted(served: Served, extra: dict[str, Any]) -> None:
    answer = served.post(CHAT, HI | extra)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == extra.get("n", 1)
    streamed = served.post(CHAT, HI | extra | {"stream": True})
    assert streamed.status_code == 200
    assert events(streamed.text)


@pytest.mark.parametrize(
    ("extra", "status", "param"), REFUSED, ids=lambda value: json.dumps(value) if isinstance(value, dict) else None
)
def test_what_is_refused_by_name(served: Served, extra: dict[str, Any], status: int, param: str | None) -> None:
    answer = served.post(CHAT, HI | extra)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["type"] in ("invalid_request_error", "not_found_error")
    assert "Traceback" not in answer.text


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"3", b"\xff\xfe", b"[" * 20_000, b'{"messages": NaN}'])
def test_what_is_no_json_object_is_refused(served: Served, body: bytes) -> None:
    with served.client() as client:
        answer = client.post(CHAT, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_models_health_and_what_is_not_there(served: Served) -> None:
    with served.client() as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert client.get("/v1/models/tiny").json() == model
        assert model["id"] == "tiny"
        assert client.get("/v1/models/other").status_code == 404
        assert client.get("/health").json() == {"status": "ok"}
        for path in ("/v1", "/v2/models", "/docs", "/openapi.json"):
            assert client.get(path).status_code == 404
            assert client.get(path).json()["error"]["message"]
        assert client.get(CHAT).status_code == 405


def test_the_metrics_count_what_was_done(served: Served) -> None:
    with served.client() as client:

        def read(name: str) -> float:
            lines = client.get("/metrics").text.splitlines()
            return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

        names = ("medusa:generation_tokens_total", "medusa:prompt_tokens_total", "medusa:request_success_total",
                 "medusa:time_to_first_token_seconds_count", "medusa:e2e_request_latency_seconds_count",
                 "medusa:request_generation_tokens_sum", "medusa:request_prompt_tokens_sum",
                 "medusa:request_queue_time_seconds_count", "medusa:request_prompt_tokens_count")  # fmt: skip
        before = [read(name) for name in names]
        served.post(WORDS, GO)
        assert [read(name) - value for name, value in zip(names, before, strict=True)] == [8, 3, 1, 1, 1, 8, 3, 1, 1]
        assert read("medusa:spec_decode_num_draft_tokens_total") >= read("medusa:spec_decode_num_accepted_tokens_total")
        assert read("medusa:num_requests_running") == 0


# --- limits ---


def test_a_key_is_asked_for() -> None:
    with serving(Policy(keys=[digest_of("first"), digest_of("second")])) as served:
        for key, status in ((None, 401), ("wrong", 401), ("firs", 401), ("first", 200), ("second", 200)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            answer = served.post(CHAT, HI, headers=headers)
            assert answer.status_code == status
            if status == 401:
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert "first" not in answer.text
        with served.client() as client:
            assert client.get("/health").status_code == 200, "a probe has no key"
            assert client.get("/v1/models").status_code == 401


def test_a_body_that_is_too_large_is_refused() -> None:
    with serving(Policy(body_bytes=2000)) as served:
        answer = served.post(CHAT, HI | {"user": "x" * 3000})
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        assert served.post(CHAT, HI).status_code == 200


def test_cors_is_off_unless_asked_for(served: Served) -> None:
    ask = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    with served.client() as client:
        assert "access-control-allow-origin" not in client.options(CHAT, headers=ask).headers
    with serving(Policy(origins=["http://page.example"])) as other, other.client() as client:
        assert client.options(CHAT, headers=ask).headers["access-control-allow-origin"] == "http://page.example"


def test_while_the_model_is_loaded_it_says_so(served: Served) -> None:
    service, served.state.service = served.state.service, None
    try:
        with served.client() as client:
            assert client.get("/health").status_code == 503
            answer = client.post(CHAT, json=HI)
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            assert client.get("/metrics").status_code == 200
    finally:
        served.state.service = service

"""Requests that ask for more than may ever wait, or that would cost much before they are refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from medusa_cli.decode import text
from medusa_cli.decode.chat import ends_of
from medusa_cli.serve import schema, service
from medusa_cli.serve.errors import ApiError
from medusa_cli.serve.schema import ChatRequest, CompletionRequest, Wanted
from tests.serve.conftest import Served
from tests.serve.test_api import CHAT, GO, HI, WORDS


@pytest.mark.parametrize(
    "asked", [{"prompt": ["w5"] * 21}, {"prompt": [[5]] * 7, "n": 3}, {"prompt": [[5]] * 200_000}], ids=range(3)
)
def test_more_texts_than_may_ever_wait_are_refused_before_any_is_looked_at(
    served: Served, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "Stream", None)
    monkeypatch.setattr(service.Service, "_prompts", None)
    answer = served.post(WORDS, GO | asked)
    assert answer.status_code == 400, "429 would have the client ask again for what it never gets"
    error = answer.json()["error"]
    assert "texts were asked for, and 20 may be written or wait" in error["message"]
    assert error["code"] == "too_many_texts"


def test_as_many_texts_as_may_wait_are_written(served: Served) -> None:
    answer = served.post(WORDS, GO | {"prompt": [[5]] * 20, "max_tokens": 2})
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == 20


def test_the_texts_of_a_request_share_what_is_known_of_the_vocabulary(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    real = text.Vocabulary.__init__

    def counted(self: text.Vocabulary, *args: Any) -> None:
        made.append(1)
        real(self, *args)

    monkeypatch.setattr(text.Vocabulary, "__init__", counted)
    document = served.post(CHAT, HI | {"n": 4, "max_tokens": 3, "stop": ["w9", "w11"]}).json()
    assert len(document["choices"]) == 4
    assert len(made) <= 2, "one for the words, one for the stop strings"
    ends = ends_of(served.target, 4)
    assert ends.stream()._vocabulary is ends.stream()._vocabulary


@pytest.mark.parametrize("path", [f"{CHAT}/", f"{WORDS}/", "/v1/models/"])
def test_a_path_with_a_slash_too_many_is_not_sent_elsewhere(served: Served, path: str) -> None:
    answer = served.post(path, HI)
    assert answer.status_code in (404, 405)
    assert answer.json()["error"]["message"]


MANY = 5000
_ODD = {str(each): 5 for each in range(MANY)}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [None] * MANY}),
        (CompletionRequest, {"prompt": [5] * MANY + ["x"]}),
        (CompletionRequest, {"prompt": [[None] * MANY]}),
        (CompletionRequest, {"prompt": "w5", "stop": [5] * MANY}),
        (CompletionRequest, {"prompt": "w5", "metadata": _ODD}),
        (CompletionRequest, {"prompt": "w5", "logit_bias": dict.fromkeys(_ODD, "x")}),
        (CompletionRequest, {"prompt": "w5", **_ODD}),
        (ChatRequest, {"messages": [{"role": "x", "content": 5}] * MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "x", "text": 5}] * MANY}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": "w5", **_ODD}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": "w5", **_ODD}]}]}),
    ],
    ids=range(11),
)
def test_a_fault_repeated_without_end_is_found_once(
    kind: type[Wanted], body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault costs a sentence while nobody else is served: a million of them cost seconds."""
    counts: list[int] = []
    told = schema._told

    def counted(error: ValidationError) -> ApiError:
        counts.append(error.error_count())
        return told(error)

    monkeypatch.setattr(schema, "_told", counted)
    with pytest.raises(ApiError) as caught:
        schema.parsed(kind, body)
    assert caught.value.status == 400
    assert counts[0] < 10


def test_a_token_of_more_digits_than_python_reads_is_none(served: Served) -> None:
    answer = served.post(CHAT, HI | {"logit_bias": {"5" * 5000: 1}})
    assert answer.status_code == 400
    assert "is no token of this model" in answer.json()["error"]["message"]


def test_a_bias_for_many_tokens_is_taken(served: Served) -> None:
    bias = {str(token): -1 for token in range(97)}
    assert served.post(CHAT, HI | {"logit_bias": bias}).status_code == 200

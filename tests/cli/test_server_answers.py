"""`medusa train-heads` with answers of a server: what is asked, learnt and kept, and what its failures leave behind."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from medusa_cli.pipeline import server_answers
from tests.chat_server import Body, Says, chat_server, completion
from tests.cli.harness import FEW, Done, Medusa, said, talk, train_args

KEY = "sk-secret-123"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waits between tries, and no key of the developer's."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    real = server_answers.Server
    monkeypatch.setattr(server_answers, "Server", lambda **values: real(**values, first_wait=0.001))


def echo(body: Body) -> Says:
    return completion(f"You said {body['messages'][-1]['content']}. " * 2, usage={"completion_tokens": 9})


def learnt_texts(tiny: Path, run: Path) -> list[str]:
    """The learnt text of each sample that was read."""
    from transformers import AutoTokenizer

    tokenizer, store = AutoTokenizer.from_pretrained(tiny), run / "written" / "read"
    ids, learnt = (np.fromfile(store / n, t) for n, t in (("ids.i32", np.int32), ("supervised.u8", np.uint8)))
    texts, start = [], 0
    for line in (store / "samples.jsonl").open():
        past = start + json.loads(line)["length"]
        texts.append(tokenizer.decode(ids[start:past][learnt[start:past] > 0]))
        start = past
    return texts


def test_a_server_s_answers_are_learnt_with_the_target_s_own_hidden_states(
    train_on_data: Callable[..., Done], write_data: Callable[..., Path], tiny: Path, tmp_path: Path
) -> None:
    write_data(*(talk(n) for n in range(6)))
    with chat_server(echo) as heard:
        done = train_on_data("--answers-from", heard.url, "data.server_temperature=0.5", "--json")
    assert done.code == 0, done.err
    assert sorted(heard.asked) == sorted(f"What is {n}.0?" for n in range(6))
    wanted = {f"You said What is {n}.0?. " * 2 + "<|im_end|>" for n in range(6)}
    assert set(learnt_texts(tiny, tmp_path / "run")) == wanted
    import torch

    from medusa_cli.config.recipe import TargetSettings
    from medusa_cli.model.loading.load import load_target
    from medusa_cli.train.corpus import Corpus

    corpus = Corpus.open(tmp_path / "run/written/read")
    target = load_target(TargetSettings(model=str(tiny), dtype="float32"))
    ids = torch.from_numpy(corpus.ids_T[: corpus.offsets_S[1]].astype(np.int64))[None]
    hidden_TH = target.model.model(ids).last_hidden_state[0]
    np.testing.assert_allclose(corpus.hidden_TH[: ids.shape[1]], hidden_TH.detach().numpy(), atol=2e-2)

    answers = done.document["answers"]
    assert answers == json.loads((tmp_path / "run/provenance.json").read_text())["answers"]
    lengths = answers.pop("lengths")
    assert lengths["longest"] >= lengths["median"] > 10
    assert answers.pop("perplexity") > 8
    assert len(answers.pop("template")) == 16
    assert answers == {
        "by": "a server", "url": heard.url, "model": "big", "temperature": 0.5, "max_tokens": 40,
        "finish_reasons": {"stop": 6},
    }  # fmt: skip
    assert "warning: the model finds the server's answers unlikely: perplexity " in done.err
    assert "--answers-from self" in done.err


def test_each_turn_is_asked_with_what_was_said_before_and_only_its_own_answer_is_learnt(
    train_on_data: Callable[..., Done], write_data: Callable[..., Path], tiny: Path, tmp_path: Path
) -> None:
    write_data(talk(0, turns=2), talk(1))
    with chat_server(echo) as heard:
        done = train_on_data("--answers-from", heard.url, "--max-seq-length", 240)
    assert done.code == 0, done.err
    assert sorted(len(body["messages"]) for body in heard.bodies) == [1, 1, 3]
    (longest,) = [body["messages"] for body in heard.bodies if len(body["messages"]) == 3]
    assert [message["content"] for message in longest] == ["What is 0.0?", said(0), "What is 0.1?"]
    wanted = [f"You said What is {n}?. " * 2 + "<|im_end|>" for n in ("0.0", "0.1", "1.0")]
    assert sorted(learnt_texts(tiny, tmp_path / "run")) == wanted


def test_the_end_of_an_answer_the_server_cut_off_is_not_learnt(
    train_on_data: Callable[..., Done], write_data: Callable[..., Path], tiny: Path, tmp_path: Path
) -> None:
    write_data(*(talk(n) for n in range(4)))
    with chat_server(lambda body: completion(f"On and on {body['messages'][0]['content']}", "length")) as heard:
        assert train_on_data("--answers-from", heard.url).code == 0
    assert sorted(learnt_texts(tiny, tmp_path / "run")) == [f"On and on What is {n}.0?" for n in range(4)]


def test_a_server_that_fails_midway_is_asked_again_only_for_what_is_missing(
    train_on_data: Callable[..., Done], write_data: Callable[..., Path], tmp_path: Path
) -> None:
    write_data(*(talk(n) for n in range(6)))
    answered = threading.Semaphore(3)

    def dying(body: Body) -> Says:
        return echo(body) if answered.acquire(blocking=False) else Says({"error": "out of memory"}, 500)

    with chat_server(dying) as heard:
        done = train_on_data("--answers-from", heard.url, "data.server_tries=2")
    assert done.code == 1
    assert done.err.count("\n hint: ") == 1
    assert "failed 2 times in a row: HTTP 500: out of memory" in done.err
    file = tmp_path / "run/written/server/answers.jsonl"
    before = file.read_text()
    kept = [json.loads(line)["key"] for line in before.splitlines()]
    assert len(kept) == 3
    # another port: the same answers are wanted from the same model
    with chat_server(echo) as again:
        assert train_on_data("--answers-from", again.url).code == 0
    assert len(again.bodies) == 3
    assert file.read_text().startswith(before)
    assert len({json.loads(line)["key"] for line in file.open()}) == 6


def test_a_damaged_file_of_answers_is_told(
    train_on_data: Callable[..., Done], write_data: Callable[..., Path], tmp_path: Path
) -> None:
    write_data(*(talk(n) for n in range(3)))
    file = tmp_path / "run/written/server/answers.jsonl"
    file.parent.mkdir(parents=True)
    for content in ("[1]\n", '{"key": 3}\n', "no json\n"):
        file.write_text(content)
        done = train_on_data("--answers-from", "http://localhost:9/v1")
        assert done.code == 1
        assert f"{file} is damaged" in done.err


def test_when_all_is_answered_the_server_is_not_needed(
    train_on_data: Callable[..., Done], write_data: Callable[..., Path]
) -> None:
    write_data(*(talk(n) for n in range(4)))
    with chat_server(echo) as heard:
        assert train_on_data("--answers-from", heard.url).code == 0
    assert train_on_data("--answers-from", heard.url, "--resume-from-checkpoint").code == 0


def test_answers_of_another_model_are_not_mixed_in(
    train_on_data: Callable[..., Done], write_data: Callable[..., Path], tmp_path: Path
) -> None:
    write_data(*(talk(n) for n in range(4)))
    run = ("--answers-from",)
    with chat_server(echo) as heard:
        assert train_on_data(*run, heard.url, "--num-samples", 2).code == 0
    for file in (tmp_path / "run/checkpoints").iterdir():
        file.unlink()
    with chat_server(echo, models=("other",)) as heard:
        refused = train_on_data(*run, heard.url)
    assert refused.code == 1
    assert "holds answers of big; the server has other" in refused.err
    assert not heard.bodies


def test_refused_prompts_are_counted_or_fail(
    train_on_data: Callable[..., Done], write_data: Callable[..., Path]
) -> None:
    write_data(*(talk(n) for n in range(5)))

    def picky(body: Body) -> Says:
        bad = "What is 3" in body["messages"][-1]["content"]
        return Says({"error": {"message": "no threes"}}, 400) if bad else echo(body)

    with chat_server(picky) as heard:
        failed = train_on_data("--answers-from", heard.url, "--on-bad-row", "fail")
        assert failed.code == 1
        assert "row 4: the server refuses it (HTTP 400: no threes)\n hint: " in failed.err
        done = train_on_data("--answers-from", heard.url, "--json")
    assert done.code == 0, done.err
    assert (done.document["data"]["prompts refused or lost"], done.document["data"]["samples"]) == (1, 4)


def test_a_server_that_answers_nothing_usable_is_told_before_training(
    train_on_data: Callable[..., Done], write_data: Callable[..., Path], tmp_path: Path
) -> None:
    write_data(*(talk(n) for n in range(3)))
    with chat_server(lambda body: completion("")) as heard:
        done = train_on_data("--answers-from", heard.url)
    assert done.code == 1
    assert (
        "the server answered none of 3 prompts; 3 without a usable answer: 3 an empty answer (first: row " in done.err
    )
    with chat_server(lambda body: Says(b"\x00\xff nonsense")) as heard:
        done = train_on_data("--answers-from", heard.url, "data.server_tries=2")
    assert done.code == 1
    assert "failed 2 times in a row: it answers with what is no JSON" in done.err
    assert not (tmp_path / "run/checkpoints").exists()


def test_prompts_of_the_model_s_own_go_to_the_server_too_once_it_listens(
    medusa: Medusa, tiny: Path, tmp_path: Path
) -> None:
    args = train_args(tiny, tmp_path / "run", *FEW, "--num-samples", 6, "data.server_tries=1", "--json")
    with chat_server(echo) as gone:
        pass
    refused = medusa(*args, "--answers-from", gone.url)
    assert refused.code == 1
    assert not (tmp_path / "run/written/prompts.jsonl").exists(), "prompts are written for nobody"
    with chat_server(echo) as heard:
        done = medusa(*args, "--answers-from", heard.url)
    assert done.code == 0, done.err
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "run/written/prompts.jsonl").open()]
    assert set(heard.asked) <= set(prompts)
    assert done.document["answers"]["by"] == "a server"


def test_the_key_is_sent_and_written_nowhere(
    train_on_data: Callable[..., Done], write_data: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY + "\n")
    write_data(*(talk(n) for n in range(4)))
    first = threading.Event()

    def quoting(body: Body) -> Says:
        if first.is_set():
            return echo(body)
        first.set()
        return Says({"error": f"not so fast, {KEY}"}, 429)

    with chat_server(quoting) as heard:
        broken = train_on_data("--answers-from", heard.url, "data.server_tries=1", "data.rows=1")
        done = train_on_data("--answers-from", heard.url, "-v")
    assert (broken.code, "not so fast, ***" in broken.err) == (1, True)
    assert done.code == 0, done.err
    assert heard.keys == {f"Bearer {KEY}"}
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert len(files) > 10
    assert not [file for file in files if KEY.encode() in file.read_bytes()]
    assert KEY not in done.out + done.err + broken.out + broken.err


@pytest.mark.parametrize("key", ["a\nb", "schlüssel"])
def test_a_key_no_header_can_hold_is_told_without_showing_it(
    key: str, train_on_data: Callable[..., Done], write_data: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    write_data(talk(1))
    with chat_server(echo) as heard:
        done = train_on_data("--answers-from", heard.url)
    assert (done.code, "OPENAI_API_KEY" in done.err, key in done.err) == (1, True, False)
    assert not heard.paths


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hush@host/v1", "https://host/v1?key=hush", "http://host/v1#hush", "ftp://host/hush",
        "hush", "http://", "http://host:hush/v1", "http://[hush/v1", "http://host:0/hush", "http://a b/hush",
    ],
)  # fmt: skip
def test_a_url_that_is_none_or_holds_a_secret_is_refused_and_not_repeated(
    url: str, train_on_data: Callable[..., Done], tmp_path: Path
) -> None:
    done = train_on_data("--answers-from", url)
    assert done.code == 1
    assert done.err.startswith("error: data.answers_from")
    assert "hush" not in done.err
    assert not (tmp_path / "run").exists()

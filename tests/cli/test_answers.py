"""`medusa train-heads` with answers of the data or of the model itself: what is learnt, warned of, recorded."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.cli.harness import FEW, Done, Medusa, said, talk, train_args


def test_the_model_answers_the_prompts_of_a_data_set_that_has_answers(
    train_on_data: Callable[..., Done], write_data: Callable[..., Path], tmp_path: Path
) -> None:
    write_data(talk(0, turns=2), *(talk(n) for n in range(1, 5)))
    done = train_on_data("--answers-from", "self", "--json", "--max-seq-length", 200)
    assert done.code == 0, done.err
    assert done.document["answers"]["by"] == "the model"
    assert done.document["answers"]["temperature"] == 0
    stored = [json.loads(line)["key"] for line in (tmp_path / "run/written/answers/samples.jsonl").open()]
    assert sorted(stored) == ["row 1", "row 1, turn 2", "row 2", "row 3", "row 4", "row 5"]
    assert not (tmp_path / "run/written/read").exists()
    assert "unlikely" not in done.err


def test_given_answers_the_model_would_hardly_say_bring_a_warning_that_quiet_does_not_hide(
    train_on_data: Callable[..., Done], write_data: Callable[..., Path]
) -> None:
    write_data(*(talk(n) for n in range(6)))
    done = train_on_data("--json")
    assert done.code == 0, done.err
    figure = done.document["answers"]["perplexity"]
    assert (
        f"warning: the model finds the answers of the data set unlikely: perplexity {figure:.1f}, above 8." in done.err
    )


def test_a_folder_answered_by_one_is_not_gone_on_with_by_another(
    train_on_data: Callable[..., Done], write_data: Callable[..., Path]
) -> None:
    write_data(*(talk(n) for n in range(4)))
    assert train_on_data().code == 0
    refused = train_on_data("--answers-from", "self", "--resume-from-checkpoint")
    assert refused.code == 1
    assert "is a run with other settings: data.answers_from" in refused.err


def test_a_run_from_before_a_setting_was_known_goes_on(
    train_on_data: Callable[..., Done], write_data: Callable[..., Path], tmp_path: Path
) -> None:
    write_data(*(talk(n) for n in range(4)))
    assert train_on_data().code == 0
    file = tmp_path / "run/run.json"
    mark = json.loads(file.read_text())
    del mark["data"]["answers_from"]
    file.write_text(json.dumps(mark))
    assert train_on_data("--resume-from-checkpoint").code == 0


def test_bad_rows_are_counted_or_fail(train_on_data: Callable[..., Done], write_data: Callable[..., Path]) -> None:
    file = write_data(*(talk(n) for n in range(4)), {"messages": [{"role": "tool", "content": "x"}]}, talk(9))
    failed = train_on_data("--on-bad-row", "fail")
    assert failed.code == 1
    assert f"{file}, row 5, field messages[0].role: unknown role 'tool'" in failed.err
    done = train_on_data("--json")
    assert done.code == 0, done.err
    counts = done.document["data"]
    assert (counts["rows read"], counts["rows left out"], counts["samples"]) == (6, 1, 5)


def test_an_answer_cut_away_by_the_longest_length_is_skipped_and_the_run_stays_finite(
    train_on_data: Callable[..., Done], write_data: Callable[..., Path], tmp_path: Path
) -> None:
    long = {"prompt": "What is the sea? " * 40, "response": "Blue."}
    write_data(*(talk(n) for n in range(4)), long, {"prompt": "What?", "response": said(7) * 9})
    done = train_on_data("--json")
    assert done.code == 0, done.err
    counts = done.document["data"]
    assert (counts["rows left out"], counts["rows without an answer to learn"], counts["rows shortened"]) == (1, 1, 1)
    assert counts["samples"] == 5
    losses = [json.loads(line).get("loss") for line in (tmp_path / "run/train.jsonl").open()]
    assert all(np.isfinite(loss) for loss in losses if loss is not None)


def test_plain_text_asks_nothing_of_anyone(train_on_data: Callable[..., Done], write_data: Callable[..., Path]) -> None:
    write_data(*({"text": said(n)} for n in range(4)))
    done = train_on_data("--answers-from", "self")
    assert done.code == 1
    assert "plain text asks nothing\n hint: leave --answers-from out" in done.err


def test_a_tokenizer_with_more_tokens_than_the_model_is_told_before_training(
    medusa: Medusa, tiny: Path, write_data: Callable[..., Path], tmp_path: Path
) -> None:
    import shutil

    from transformers import AutoTokenizer

    grown = Path(shutil.copytree(tiny, tmp_path / "grown"))
    tokenizer = AutoTokenizer.from_pretrained(grown)
    tokenizer.add_tokens([f"<extra {n}>" for n in range(300)])
    tokenizer.save_pretrained(grown)
    prompts = [{"prompt": f"<extra 250> {n}"} for n in range(4)]
    for rows in ([{**row, "response": "Blue. " * 5} for row in prompts], prompts):
        file = write_data(*rows)
        done = medusa(*train_args(grown, tmp_path / f"run{len(rows[0])}", *FEW, "--dataset", file))
        assert done.code == 1, done.err
        assert "('<extra 250>') is beyond the 304 embeddings of " in done.err
        assert "resize the model's embeddings" in done.err


def test_a_template_without_the_assistant_s_words_is_told_before_training(
    medusa: Medusa, tiny: Path, write_data: Callable[..., Path], tmp_path: Path
) -> None:
    import shutil

    deaf = Path(shutil.copytree(tiny, tmp_path / "deaf"))
    (deaf / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] != 'assistant' %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    )
    done = medusa(*train_args(deaf, tmp_path / "run", *FEW, "--dataset", write_data(talk(1), talk(2))))
    assert done.code == 1
    assert "2 the chat template leaves the assistant's words out (first: row 1)" in done.err
    assert not (tmp_path / "run/checkpoints").exists()

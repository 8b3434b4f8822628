"""`medusa bench` on a tiny model: real arms, one document."""

import json
from pathlib import Path

import pytest

from medusa_cli.bench import build
from tests.cli.harness import Done, run_here
from tests.tools import docs_page

ARM_KEYS = [
    "dtype", "runner",
    "output_throughput", "step_throughput", "duration", "total_output_tokens", "num_steps", "tokens_per_step",
    "spec_decode_acceptance_rate", "spec_decode_acceptance_length", "spec_decode_num_drafts",
    "spec_decode_draft_tokens", "spec_decode_accepted_tokens", "spec_decode_per_position_acceptance_rates",
    "latency_ms", "time_split", "categories", "results",
]  # fmt: skip
KEYS = [
    "model", "dtype", "device", "runner", "threads", "ours", "arms", "speedup", "speedup_spread", "identical",
    "divergences", "verdict", "run",
]  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"id": f"q{n}", "category": f"c{n % 2}", "turns": [f"What is {word}?"]} for n, word in enumerate("abc")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def bench(tiny: Path, trained, prompts: Path):
    def run(*args: object) -> Done:
        # how fast a tiny model is says nothing, so guesses are made whether they pay or not
        given = ("--dtype", "float32", "--heads", trained.folder, "--prompts", prompts, "-n", 24, "--speculate", "on")
        return run_here("bench", "-m", tiny, *given, *args)

    return run


@pytest.fixture(scope="module")
def done(bench) -> Done:
    return bench("--compare", "greedy,hf-greedy@float32", "--num-warmups", 1, "--require-identical", "--json")


def test_every_arm_writes_the_same_and_the_gate_passes(done: Done) -> None:
    assert done.code == 0, done.err
    report = done.document
    alike = {"same": 3, "of": 3}
    assert report["identical"]["greedy"] == report["identical"]["hf-greedy@float32"] == alike
    assert report["divergences"] == []
    assert "Every reply is the same, token by token." in report["verdict"]


def test_the_document_has_exactly_the_names_of_the_contract(done: Done) -> None:
    report = done.document
    assert list(report) == KEYS
    # the plain name stands for the faster of an arm's dtypes
    assert report["ours"] == "medusa"
    assert report["arms"]["medusa"]["time_split"]["prefill"] > 0, "prompts are read before a step is taken"
    assert list(report["arms"]) == ["medusa", "greedy", "hf-greedy@float32", "hf-greedy"]
    for arm in report["arms"].values():
        assert list(arm) == ARM_KEYS
        assert list(arm["latency_ms"]) == ["p50", "p90", "p99"]
        assert list(arm["time_split"]) == ["prefill", "draft", "verify", "accept", "keep", "other"]
        assert {name for values in arm["categories"].values() for name in values} == {
            "output_throughput",
            "tokens_per_step",
        }
        assert list(arm["results"][0]) == ["id", "category", "token_ids", "finish_reason", "num_steps", "duration"]


def test_our_loop_without_guesses_takes_a_step_a_token_and_heads_take_fewer(done: Done) -> None:
    arms = done.document["arms"]
    assert arms["greedy"]["num_steps"] == arms["hf-greedy@float32"]["num_steps"] == 3 * 23
    assert arms["medusa"]["num_steps"] < 3 * 23
    assert arms["medusa"]["tokens_per_step"] > arms["greedy"]["tokens_per_step"] == 1


def test_the_table_and_the_verdict_are_for_people(bench) -> None:
    shown = bench("--num-prompts", 1, "--num-warmups", 0)
    assert shown.code == 0
    assert {"medusa", "greedy"} <= {line.split()[0] for line in shown.out.splitlines() if line.strip()}


def test_a_speed_up_nobody_reaches_exits_3(bench) -> None:
    failed = bench("--num-prompts", 1, "--num-warmups", 0, "--min-speedup", 1000)
    assert failed.code == 3
    assert "error: speed-up of medusa over greedy is" in failed.err
    assert failed.err.count("\n hint: ") == 1


def test_the_packaged_prompts_are_used_when_none_are_named(tiny: Path, trained) -> None:
    flags = ("--heads", trained.folder, "--num-prompts", 1, "-n", 2, "--num-warmups", 0, "--json")
    assert run_here("bench", "-m", tiny, "--dtype", "float32", *flags).code == 0


def test_other_drafters_are_arms_and_subjects(bench) -> None:
    done = bench("--drafter", "mixed", "--compare", "medusa,ngram,greedy", "--require-identical", "--json")
    assert done.code == 0, done.err
    report = done.document
    assert list(report["arms"]) == ["mixed", "medusa", "ngram", "greedy"]
    assert set(report["speedup"]) == {"medusa", "ngram", "greedy"}
    assert all(one == {"same": 3, "of": 3} for one in report["identical"].values())
    assert report["arms"]["mixed"]["tokens_per_step"] > 1


def test_prompt_lookup_of_transformers_is_an_arm_and_a_picture_shows_it(bench, tmp_path: Path) -> None:
    picture = tmp_path / "bench.svg"
    done = bench("--compare", "greedy,hf-prompt-lookup@float32", "--repeats", 2, "--plot", picture, "--json")
    assert done.code == 0, done.err
    lookup = done.document["arms"]["hf-prompt-lookup@float32"]
    assert done.document["identical"]["hf-prompt-lookup@float32"] == {"same": 3, "of": 3}
    assert lookup["spec_decode_num_drafts"] > 0
    assert picture.stat().st_size > 5_000


def test_a_bench_that_was_killed_goes_on_with_the_same_text(bench, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    whole = bench("-o", folder, "--json").document
    # as a kill in the middle of the last batch leaves it
    (folder / "bench.json").unlink()
    (folder / "trials.jsonl").write_bytes((folder / "trials.jsonl").read_bytes()[:-30])
    done = bench("-o", folder, "--json")
    assert done.code == 0, done.err
    texts = [[row["token_ids"] for row in arm["results"]] for arm in done.document["arms"].values()]
    assert texts == [[row["token_ids"] for row in arm["results"]] for arm in whole["arms"].values()]
    assert done.document["run"]["date"] == whole["run"]["date"]
    assert done.document["identical"] == whole["identical"]


def test_what_real_benches_kept_becomes_the_page_the_same_each_time(bench, tmp_path: Path) -> None:
    folders = [tmp_path / "heads", tmp_path / "mixed"]
    assert bench("-o", folders[0], "--compare", "greedy,hf-greedy@float32").code == 0
    done = bench("-o", folders[1], "--drafter", "mixed", "--compare", "greedy", "--json")
    assert done.code == 0, done.err
    doc = tmp_path / "page.md"
    doc.write_text("by hand\n<!-- bench:begin speed -->\n<!-- bench:end speed -->\nby hand too\n")
    docs_page.write_page(folders, doc, None)
    once = doc.read_text()
    assert once.startswith("by hand\n")
    assert once.endswith("\nby hand too\n")
    runner = done.document["runner"]
    assert f"| what | medusa, {runner} | mixed, {runner} |" in once
    assert "| replies equal to `greedy` | 3 of 3 | 3 of 3 |" in once
    assert "| replies equal to `hf-greedy@float32` | 3 of 3 | |" in once
    docs_page.write_page(folders, doc, None)
    assert doc.read_text() == once


def test_heads_trained_anew_in_the_same_folder_are_another_bench(bench, trained, tmp_path: Path) -> None:
    assert bench("-o", tmp_path / "kept", "--num-prompts", 1).code == 0
    tree = trained.folder / "tree.json"
    before = tree.read_text()
    tree.write_text(before + "\n")
    try:
        done = bench("-o", tmp_path / "kept", "--num-prompts", 1)
    finally:
        tree.write_text(before)
    assert done.code == 1
    assert "is a bench with other settings: heads" in done.err


@pytest.mark.parametrize(("possible", "runner"), [(True, "auto"), (False, "auto"), (True, "eager")])
def test_a_compiled_runner_that_was_never_built_is_named_in_the_verdict_and_only_then(
    bench, monkeypatch: pytest.MonkeyPatch, possible: bool, runner: str
) -> None:
    monkeypatch.setattr(build, "could_compile", lambda target: possible)
    done = bench("--compare", "greedy", "--num-prompts", 1, "--runner", runner, "--json")
    assert done.code == 0, done.err
    assert ("isn't built here: --runner compiled builds it once" in done.document["verdict"]) == (
        possible and runner == "auto"
    )

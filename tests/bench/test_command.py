"""The command: names and flags, one document on stdout, exit codes. The models are fakes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import medusa_cli.assemble
from medusa_cli.assemble import DrafterChoice
from medusa_cli.bench import build
from medusa_cli.bench.baselines import Reply
from medusa_cli.cli.bench import arm_names
from medusa_cli.util import busy
from tests.bench.fakes_bench import RULE, SETUP, FakeArm, FakeClock, reply
from tests.cli.harness import Done, run_here


class World:
    """Fake models: what each arm writes, how long it takes, and what was asked to be built."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.replies: dict[str, Reply] = {"medusa": reply([3, 3], 8, draft_depth=3)}
        self.seconds = {"medusa": 1.0}
        self.plain = [1, 2, 3]
        self.built: list[tuple[Any, ...]] = []
        self.asked_for_room: list[tuple[int, int]] = []
        self.corrected: list[str] = []

    def make_room(self, prompts: Sequence[Sequence[int]], num_rows: int) -> None:
        self.asked_for_room.append((len(prompts), num_rows))

    def build(self, settings: Any, choice: DrafterChoice, names: Sequence[str], max_new_tokens: int) -> build.Bench:
        self.built.append((settings, choice, list(names), max_new_tokens))
        arms = [
            FakeArm(name, self.clock, lambda _, name=name: self.replies.get(name, reply([1] * 6)),
                    self.seconds.get(name, 2.0))
            for name in ("medusa", *names)
        ]  # fmt: skip
        return build.Bench(
            "medusa", arms, RULE, SETUP, 32_000, lambda text: [1, 2], lambda text: list(self.plain),
            lambda prompt, ids: torch.tensor([9.0, 0.0] * 20), self.make_room, self.clock, ["note: fakes."], "abc",
            lambda: self.corrected.append("costs"),
        )  # fmt: skip


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(build, "build_arms", made.build)
    monkeypatch.setattr(medusa_cli.assemble, "check_choice", lambda choice, model: None)
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "prompts.jsonl"
    made.write_text("".join(json.dumps({"id": f"q{n}", "category": f"c{n % 2}", "turns": [f"Why {n}?"]}) + "\n"
                            for n in range(4)))  # fmt: skip
    return made


def _run(*arguments: object) -> Done:
    return run_here("bench", *arguments)


def test_json_prints_one_document_and_nothing_else_on_stdout(world: World, file: Path) -> None:
    done = _run("--prompts", file, "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert report["speedup"]["greedy"] == pytest.approx(2.0)
    assert [row["id"] for row in report["arms"]["medusa"]["results"]] == ["q0", "q1", "q2", "q3"]
    assert set(report["arms"]["medusa"]["categories"]) == {"c0", "c1"}
    assert done.err == "bench\n"


def test_room_for_the_cache_is_asked_for_before_anything_runs(world: World, file: Path) -> None:
    assert _run("--prompts", file, "--batch-size", 3, "-q").code == 0
    assert world.asked_for_room == [(4, 3)]


def test_without_json_the_table_and_the_verdict_are_printed(world: World, file: Path) -> None:
    done = _run("--prompts", file, "--quiet")
    assert done.out.split()[0] == "arm"
    assert "Faster: medusa is 2.00x as fast as greedy" in done.out
    assert "note: fakes." in done.out
    assert done.err == ""


def test_three_arms_get_the_same_prompts_and_a_column_of_sameness(world: World, file: Path) -> None:
    world.replies["hf-greedy"] = reply([1] * 5)
    names = ["medusa", "greedy", "hf-greedy", "hf-prompt-lookup"]
    lines = _run("--compare", ",".join(names[1:]), "--prompts", file, "--quiet").out.splitlines()
    shown = [line.split() for line in lines if line.strip()]
    assert shown[0][-1] == "same"
    same = {words[0]: " ".join(words[-3:]) for words in shown[1:6] if words[0] in names[1:]}
    assert same == {"greedy": "4 of 4", "hf-greedy": "0 of 4", "hf-prompt-lookup": "4 of 4"}
    world.replies.pop("hf-greedy")
    done = _run("--compare", ",".join(names[1:]), "--prompts", file, "--json")
    report = json.loads(done.out)
    asked = [[row["id"] for row in arm["results"]] for arm in report["arms"].values()]
    assert len(asked) == 4
    assert all(ids == asked[0] for ids in asked)
    assert report["identical"] == {name: {"same": 4, "of": 4} for name in ("greedy", "hf-greedy", "hf-prompt-lookup")}


def test_the_document_is_also_written_to_a_file(world: World, file: Path, tmp_path: Path) -> None:
    done = _run("--prompts", file, "--output-json", tmp_path / "report.json", "--json")
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(done.out)


def test_flags_reach_the_models(world: World, file: Path) -> None:
    done = _run("--prompts", file, "-m", "tiny", "--heads", "h", "--tree", "2x1", "--dtype", "float32", "-n", 7)
    assert done.code == 0, done.err
    settings, choice, names, max_new_tokens = world.built[0]
    assert (settings.model, settings.dtype, names, max_new_tokens) == ("tiny", "float32", ["greedy"], 7)
    assert choice == DrafterChoice("medusa", "h", "2x1", None)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hf-greddy", "Did you mean hf-greedy?"),
        ("lookup", "Did you mean hf-prompt-lookup?"),
        ("llamacpp", "Did you mean llama-cpp?"),
        ("llama-cpp@float32", "only hf arms take a dtype"),
        ("greedy@float32", "only hf arms take a dtype"),
        ("hf-greedy@int3", "only hf arms take a dtype"),
        (",", "names no arm"),
    ],
)
def test_an_arm_that_does_not_exist_is_a_usage_error_before_any_model(world: World, name: str, said: str) -> None:
    with pytest.raises(typer.BadParameter, match=said.replace("?", r"\?")):
        arm_names(name)
    assert _run("--compare", name).code == 2
    assert world.built == []


def test_arms_named_twice_run_once() -> None:
    assert arm_names("greedy, hf-greedy@bfloat16,greedy") == ["greedy", "hf-greedy@bfloat16"]


def test_a_speed_up_below_the_gate_exits_3_after_the_report(world: World, file: Path) -> None:
    assert _run("--prompts", file, "--min-speedup", 1.9, "--json").code == 0
    done = _run("--prompts", file, "--min-speedup", 2.1, "--json")
    assert done.code == 3
    assert json.loads(done.out)["speedup"]["greedy"] == pytest.approx(2.0)
    assert "error: speed-up of medusa over greedy is 2.000x" in done.err


def test_a_mismatch_exits_3_only_when_identity_is_required(world: World, file: Path) -> None:
    world.replies["medusa"] = reply([3, 3], 8, first=11)
    assert _run("--prompts", file).code == 0
    done = _run("--prompts", file, "--require-identical")
    assert done.code == 3
    assert "prompt q0: medusa and greedy part at token 0" in done.err


def test_random_looking_prompts_need_a_flag_and_leave_a_warning(world: World, file: Path) -> None:
    world.plain = list(range(0, 30_000, 97))
    refused = _run("--prompts", file)
    assert refused.code == 1
    assert "--allow-random-prompts" in refused.err.partition(" hint: ")[2]
    allowed = _run("--prompts", file, "--allow-random-prompts", "--json")
    assert "look like random tokens" in allowed.document["verdict"]


def test_a_prompt_repeated_is_noted_in_the_verdict(world: World, tmp_path: Path) -> None:
    file = tmp_path / "same.jsonl"
    file.write_text('{"id": "a", "prompt": "Why?"}\n{"id": "b", "prompt": "Why?"}\n')
    assert "the same prompt is there 2 times (a, b)" in _run("--prompts", file, "--json").document["verdict"]


@pytest.mark.parametrize(
    ("code", "flags"),
    [
        (1, ("--plot", "picture.txt")),
        (1, ("--plot", "/no/such/folder/a.png")),
        (2, ("--output-json", "/no/such/folder/a.json")),
    ],
)
def test_a_place_that_can_not_be_written_is_said_before_the_run(
    world: World, file: Path, code: int, flags: tuple[str, str]
) -> None:
    done = _run("--prompts", file, *flags)
    assert done.code == code
    assert done.err.count("\n hint: ") == 1
    assert world.built == []


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_is_drawn(world: World, file: Path, tmp_path: Path, ending: str) -> None:
    picture = tmp_path / f"bench.{ending}"
    done = _run("--compare", "greedy,hf-greedy@bfloat16", "--prompts", file, "--plot", picture)
    assert done.code == 0, done.err
    assert picture.stat().st_size > 10_000


def test_a_bench_of_replies_without_steps_still_draws(world: World, file: Path, tmp_path: Path) -> None:
    nothing = Reply([], "length", 0, [], [])
    world.replies = {"medusa": nothing, "greedy": nothing}
    done = _run("--prompts", file, "--plot", tmp_path / "bench.svg")
    assert done.code == 0, done.err
    assert "No verdict" in done.out


def test_a_folder_keeps_what_is_measured_and_an_interrupted_run_goes_on(
    world: World, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--prompts", file, "--output-dir", tmp_path / "kept", "--num-warmups", 0)
    real, calls = FakeArm.generate, []

    def interrupted(arm: FakeArm, prompts: Sequence[list[int]]) -> list[Reply]:
        calls.append(arm.name)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return real(arm, prompts)

    monkeypatch.setattr(FakeArm, "generate", interrupted)
    stopped = _run(*flags)
    assert stopped.code == 130
    assert f"what was measured is in {tmp_path / 'kept'}: the same command goes on" in stopped.err
    done = _run(*flags, "--json")
    assert done.code == 0, done.err
    assert len(calls) == 6 + 4, "two of four prompts were written by both arms"
    assert done.document["speedup"]["greedy"] == pytest.approx(2.0)
    assert json.loads((tmp_path / "kept" / "bench.json").read_text()) == done.document


def test_a_folder_that_is_complete_is_told_without_loading_a_model(world: World, file: Path, tmp_path: Path) -> None:
    flags = ("--prompts", file, "-o", tmp_path / "kept")
    first = _run(*flags, "--json")
    again = _run(*flags, "--json", "--min-speedup", 9)
    assert again.document == first.document
    assert again.code == 3, "gates hold all the same"
    assert len(world.built) == 1
    assert "another --output-dir measures again" in again.err


@pytest.mark.parametrize("flags", [("-n", 7), ("--repeats", 2), ("--compare", "ngram"), ("--runner", "eager")])
def test_a_folder_of_another_bench_is_refused_before_a_model_is_loaded(
    world: World, file: Path, tmp_path: Path, flags: tuple[object, ...]
) -> None:
    assert _run("--prompts", file, "-o", tmp_path / "kept").code == 0
    done = _run("--prompts", file, "-o", tmp_path / "kept", *flags)
    assert done.code == 1
    assert "is a bench with other settings" in done.err
    assert len(world.built) == 1


def test_other_words_under_the_same_name_are_other_prompts(world: World, file: Path, tmp_path: Path) -> None:
    assert _run("--prompts", file, "-o", tmp_path / "kept").code == 0
    file.write_text(file.read_text().replace("Why 3?", "Why not 3?"))
    assert "other settings: prompts" in _run("--prompts", file, "-o", tmp_path / "kept").err


def test_an_interrupted_run_that_keeps_nothing_says_what_would(
    world: World, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(arm: FakeArm, prompts: Sequence[list[int]]) -> list[Reply]:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeArm, "generate", interrupted)
    done = _run("--prompts", file)
    assert done.code == 130
    assert "nothing is kept: with --output-dir the same command goes on" in done.err


def test_the_document_says_when_where_and_how_it_was_measured(world: World, file: Path) -> None:
    run = _run("--prompts", file, "--repeats", 2, "--json").document["run"]
    assert set(run) == {
        "date", "machine", "versions", "command", "prompts", "num_prompts", "max_new_tokens", "batch_size", "repeats",
        "contention",
    }  # fmt: skip
    assert (run["num_prompts"], run["max_new_tokens"], run["batch_size"], run["repeats"]) == (4, 128, 1, 2)
    assert set(run["versions"]) == {"medusa", "python", "torch", "transformers"}


def test_warm_ups_repeats_and_the_number_of_prompts_are_what_every_arm_runs(
    world: World, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = FakeArm.generate, []

    def counted(arm: FakeArm, prompts: Sequence[list[int]]) -> list[Reply]:
        calls.append(arm.name)
        return real(arm, prompts)

    monkeypatch.setattr(FakeArm, "generate", counted)
    done = _run("--prompts", file, "--num-warmups", 3, "--repeats", 2, "--num-prompts", 2, "--json")
    assert {name: calls.count(name) for name in calls} == {"medusa": 3 + 2 * 2, "greedy": 3 + 2 * 2}
    assert [row["id"] for row in done.document["arms"]["medusa"]["results"]] == ["q0", "q2"]
    assert done.document["arms"]["greedy"]["duration"] == pytest.approx(2 * 2 * 2.0), "warm-ups aren't counted"


@pytest.mark.parametrize("waiting", [0.0, 1.3])
def test_a_busy_machine_is_told_and_corrects_nothing_that_is_remembered(
    world: World, file: Path, monkeypatch: pytest.MonkeyPatch, waiting: float
) -> None:
    monkeypatch.setattr(busy.Meter, "read", lambda self: busy.Contention(waiting, 0.0, 8.1, 2))
    report = json.loads(_run("--prompts", file, "--json").out)
    said = (
        "Warning: the machine was busy: our threads waited 130 % of the time for one of the 2 cores; "
        "8.1 processes ran or waited, as a mean of the last minute"
    )
    assert (said in report["verdict"]) == (waiting > 1)
    assert report["run"]["contention"]["busy"] == (waiting > 1)
    assert world.corrected == ([] if waiting else ["costs"])

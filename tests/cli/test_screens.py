"""What terminals of 80 and 120 columns show: every line fits, words and figures stay whole, the least goes first."""

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from medusa_cli.bench.compare import compare
from medusa_cli.bench.report import build_report, table
from medusa_cli.cli import drawing
from medusa_cli.cli.app import COMMANDS, main
from medusa_cli.cli.console import Console, span
from medusa_cli.config.catalog import recipes
from tests.bench.fakes_bench import RUN, SETUP, FakeClock, reply, timed
from tests.tiny_folders import save_tiny

CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
TALK = "loss 2.345  heads 0.45 0.31 0.22  1.62 tokens a step, 1.13x  12,345 tokens/s"


@pytest.fixture(params=[80, 120])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> int:
    """A terminal so wide."""
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda stream: True)  # both streams are of it
    return int(request.param)


def lines_of(text: str) -> list[str]:
    """The lines a terminal would have shown, one drawn over another included."""
    return [line.rstrip() for line in re.split(r"[\r\n]+", CODES.sub("", text)) if line.strip()]


def test_the_training_line_keeps_bar_count_and_time_and_what_else_fits(columns: int, capsys: Any) -> None:
    with Console().progress("training", 304) as progress:
        progress.advance(120, TALK)
        time.sleep(0.3)  # the bar draws itself anew ten times a second
    frames = [line for line in lines_of(capsys.readouterr().err) if "120/304" in line]
    assert frames
    for frame in frames:
        assert len(frame) <= columns
        assert frame.startswith("training ━")
        assert re.search(r"120/304 (\d:\d\d:\d\d|-:--:--)", frame)
        shown = frame[re.search(r"(\d:\d\d:\d\d|-:--:--)", frame).end() :].strip()  # type: ignore[union-attr]
        assert TALK.startswith(shown)
        assert shown in {TALK[: match.start()] for match in re.finditer("  ", TALK)}, "parts are shown whole"


@pytest.mark.parametrize(
    ("room", "shown"), [(4, ""), (10, "loss 2.345"), (32, "loss 2.345  heads 0.45 0.31 0.22"), (99, TALK)]
)
def test_a_note_is_cut_between_its_parts(room: int, shown: str) -> None:
    assert drawing.fitting(TALK, room) == shown


def test_a_line_of_log_is_broken_between_words(columns: int, capsys: Any) -> None:
    sentence = (
        "step 4: held-out prompts decode at 1.62 tokens a step (chain of all heads), 1.13x plain decoding projected"
    )
    Console().info(sentence)
    shown = lines_of(capsys.readouterr().err)
    assert all(len(line) <= columns for line in shown)
    assert " ".join(shown) == sentence


@pytest.mark.usefixtures("columns")
def test_what_is_waited_for_is_named_and_goes_when_it_is_there(capsys: Any) -> None:
    console = Console()
    with console.waiting("loading tiny"):
        console.info("a line of log")
    console.info("after it")
    screen: list[str] = [""]
    for part in re.split(r"(\r|\n|\x1b\[2K)", capsys.readouterr().err):
        if part == "\n":
            screen.append("")
        else:
            screen[-1] = "" if part == "\x1b[2K" else screen[-1] + part.strip("\r")
    assert screen == ["a line of log", "after it", ""]
    with Console(quiet=True).waiting("loading tiny"):
        pass
    assert capsys.readouterr().err == ""


def test_the_table_of_a_bench_fits_and_breaks_no_word(columns: int, capsys: Any) -> None:
    names = ("mixed", "greedy", "hf-greedy@float32", "hf-greedy@bfloat16", "hf-prompt-lookup", "llama-cpp")
    seconds = dict.fromkeys(names, 11.0) | {"mixed": 5.0}
    trials = timed(FakeClock(), {name: [reply([1] * 11)] * 3 for name in names}, seconds)
    report = build_report(SETUP, trials, "mixed", compare(trials, "mixed", "float32", lambda ids: None), [], RUN)
    shown = table(report)
    Console().table(shown.headers, shown.rows, spare=shown.spare)
    seen = capsys.readouterr()
    lines = lines_of(seen.out)
    assert all(len(line) <= columns for line in lines)
    assert len(lines) == 2 + len(names), "no cell is wrapped"
    assert "2.20x as fast (2.20 to 2.20)" in lines[3]
    assert lines[0].split()[:4] == ["arm", "tokens/s", "mixed", "is"]
    assert lines[0].split()[-1] == "same"
    left_out = {80: "left out for want of room: in steps, kept, ms p50, p90, p99; --json has all columns", 120: ""}
    assert " ".join(seen.err.split()) in (left_out[columns], left_out[80].replace("in steps, kept, ", ""))
    assert ("p90" in lines[0]) == (columns == 120)


def test_verbose_and_pipes_get_every_column(columns: int, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names, row = [f"column {n}" for n in range(8)], ["some words in it"] * 8
    Console(verbose=True).table(names, [row], spare=names[4:])
    assert lines_of(capsys.readouterr().out)[0].count("column") == 8
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda stream: False)
    monkeypatch.delenv("COLUMNS")
    Console().table(names, [row], spare=names[4:])
    assert " ".join(names) == " ".join(capsys.readouterr().out.splitlines()[0].split())


def test_the_list_of_recipes_fits_a_screen(columns: int, capsys: Any) -> None:
    assert main(["recipes", "ls"]) == 0
    lines = lines_of(capsys.readouterr().out)
    assert len(lines) <= 22
    assert all(len(line) <= columns for line in lines)
    assert {line.split()[0] for line in lines} >= set(recipes())
    assert "what" in lines[0].split(), "what people look for"
    assert ("hardware" in lines[0]) == (columns == 120)
    (demo,) = [line for line in lines if line.startswith("demo ")]
    assert re.search(r"A first pair of heads for smollm2-135m.* …$", demo)


def test_a_pipe_is_as_wide_as_columns_says_and_else_without_bounds(
    columns: int, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda stream: False)
    assert main(["recipes", "ls"]) == 0
    seen = capsys.readouterr()
    assert all(len(line) <= columns for line in (seen.out + seen.err).splitlines())
    monkeypatch.setenv("COLUMNS", "many")
    assert main(["recipes", "ls"]) == 0
    assert "small enough to watch: the model writes its own training text." in capsys.readouterr().out


def test_what_stands_behind_a_label_goes_on_below_itself(columns: int, capsys: Any) -> None:
    text = "the compiled runner is not built here: --runner compiled builds it, and auto takes it from then on " * 2
    Console().say(f"{'quicker':<14} {text}", indent=15)
    first, *more = lines_of(capsys.readouterr().out)
    assert more
    assert all(len(line) <= columns and line.startswith(" " * 15 + line.strip()[0]) for line in more)
    assert " ".join(line[15:] for line in (first, *more)) == text.strip()


def test_the_report_of_doctor_fits_the_terminal(columns: int, capsys: Any, tmp_path: Path) -> None:
    short = Path(os.path.relpath(save_tiny(tmp_path / "m")))
    assert main(["doctor", "--device", "cpu", "--runner", "eager", str(short)]) == 0
    lines = lines_of(capsys.readouterr().out)
    assert all(len(line) <= columns for line in lines if str(short) not in line)


def test_counts_have_their_thousands_apart(capsys: Any) -> None:
    Console().table(("what", "at most"), [("tokens", 20480), ("disk", 1234.5)])
    assert [line.split()[-1] for line in lines_of(capsys.readouterr().out)[2:]] == ["20,480", "1,234"]


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.0058, "6 ms"), (0.0, "1 ms"), (0.43, "430 ms"), (0.96, "1.0 s"), (91.8, "91.8 s")]
)
def test_a_short_time_is_told_in_milliseconds_and_never_as_nothing(seconds: float, said: str) -> None:
    assert span(seconds) == said


def test_the_names_of_models_and_what_is_kept_fit_a_screen(columns: int, capsys: Any) -> None:
    for args in (["models"], ["cache", "ls"]):
        assert main(args) == 0
        lines = lines_of(capsys.readouterr().out)
        assert len(lines) <= 22
        assert all(len(line) <= columns for line in lines)


@pytest.mark.parametrize("module", [None, *COMMANDS])
def test_help_fits_the_terminal(module: str | None, columns: int, capsys: Any) -> None:
    name = module.rpartition(".")[2].strip("_").replace("_", "-") if module else None
    assert main([name, "--help"] if name else ["--help"]) == 0
    assert all(len(line) <= columns for line in lines_of(capsys.readouterr().out))

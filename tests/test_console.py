"""The console: which stream, how often, and nothing read as markup."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from medusa_cli.cli.console import Console
from medusa_cli.errors import MedusaError


@dataclass
class Report:
    rate: float
    file: Path


class Clock:
    """Time that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_results_go_to_stdout_and_logs_to_stderr(capsys):
    console = Console()
    console.out("text")
    console.stream("piece")
    console.info("log")
    console.debug("detail")
    console.warn("careful")
    assert capsys.readouterr() == ("text\npiece", "log\nwarning: careful\n")


def test_marked_runs_stand_between_signs_and_are_coloured_on_a_terminal_that_takes_colour(capsys, monkeypatch):
    runs = [("What? ", False), ("Blue.", True), ("\n", False)]
    monkeypatch.delenv("NO_COLOR", raising=False)
    Console().marked(runs)
    assert capsys.readouterr().out == "What? \u27e6Blue.\u27e7\n\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    Console().marked(runs)
    assert capsys.readouterr().out == "What? \x1b[32m\u27e6Blue.\u27e7\x1b[0m\n\n"
    monkeypatch.setenv("NO_COLOR", "1")
    Console().marked(runs)
    Console(json=True).marked(runs)
    assert capsys.readouterr().out == "What? \u27e6Blue.\u27e7\n\n"


def test_quiet_keeps_warnings_and_results(capsys):
    console = Console(quiet=True)
    console.info("log")
    console.warn("careful")
    console.out("text")
    with console.progress("train", 2) as progress:
        progress.advance(2)
    assert capsys.readouterr() == ("text\n", "warning: careful\n")


def test_json_leaves_stdout_to_the_document(capsys):
    console = Console(json=True)
    console.out("text")
    console.stream("piece")
    console.table(["a"], [[1]])
    console.print_json({"report": Report(float("nan"), Path("x")), 1: (2, float("inf"))})
    assert json.loads(capsys.readouterr().out) == {"report": {"rate": None, "file": "x"}, "1": [2, None]}


def test_a_second_document_is_a_bug():
    console = Console(json=True)
    console.print_json(1)
    with pytest.raises(AssertionError, match="one document"):
        console.print_json(2)


def test_without_the_flag_the_document_goes_to_the_file_only(tmp_path, capsys):
    Console().print_json({"text": "한"}, tmp_path / "x.json")
    assert capsys.readouterr().out == ""
    assert json.loads((tmp_path / "x.json").read_text()) == {"text": "한"}
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_a_file_that_can_t_be_written_is_a_user_s_mistake(tmp_path):
    with pytest.raises(MedusaError, match="can't write"):
        Console().print_json(1, tmp_path / "missing" / "x.json")


def test_a_piped_table_is_literal_text_and_never_cut(capsys):
    Console().table(["arm", "tok/s"], [["[red]a[/red]", 12.345], ["b" * 200, None]], title="On [bold]")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "On [bold]"
    assert any(line.split() == ["[red]a[/red]", "12.35"] for line in lines)
    assert any(line.split() == ["b" * 200, "-"] for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_numbers_are_right_aligned_and_words_left(capsys):
    Console().table(["arm", "speed-up"], [["a", "12.0x"], ["bb", 1.5]])
    *_, first, second = capsys.readouterr().out.splitlines()
    assert len(first) > len("a")
    assert first.index("a") == second.index("bb")
    assert first.endswith("12.0x")
    assert second.endswith(" 1.50")


def test_progress_without_a_terminal_is_a_line_each_ten_seconds(capsys):
    clock = Clock()
    with Console(clock=clock).progress("train", 30) as progress:
        for _ in range(30):
            clock.now += 1
            progress.advance(note="loss [2]")
    assert capsys.readouterr().err.splitlines() == [
        "train",
        "train: 10/30, 0:20 left, loss [2]",
        "train: 20/30, 0:10 left, loss [2]",
        "train: 30/30, loss [2]",
    ]


def test_the_time_left_goes_by_what_this_run_has_done(capsys):
    clock = Clock()
    with Console(clock=clock).progress("train", 100, 90) as progress:
        clock.now += 10
        progress.advance(5)
    assert capsys.readouterr().err.splitlines() == ["train", "train: 95/100, 0:10 left"]


def test_a_short_job_logs_only_its_name(capsys):
    with Console(clock=Clock()).progress("load") as progress:
        progress.advance(0)
        progress.advance()
    assert capsys.readouterr().err == "load\n"

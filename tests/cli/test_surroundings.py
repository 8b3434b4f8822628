"""The program in odd surroundings: full logs, other locales, interrupts while it starts, Python without docstrings."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_cli.cli.streams import as_written
from tests.cli.harness import ROOT, in_two_lines, run_here

# what a German or a bare C locale on an old system is to Python
PLAIN_C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
INTERRUPTED = """
import os, runpy, signal, sys

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
runpy.run_module("medusa_cli", run_name="__main__", alter_sys=True)
"""


def run(*args: object, stderr: int = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, by whom interrupts are heard."""
    return subprocess.run(
        [sys.executable, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize("module", ["typer", "medusa_cli.cli.console", "medusa_cli.cli.app"])
def test_an_interrupt_while_the_program_starts_is_no_traceback(module: str) -> None:
    done = run("-c", INTERRUPTED, module)
    assert done.returncode in (130, -signal.SIGINT)
    assert (done.stdout, done.stderr.replace("interrupted\n", "")) == ("", "")


def test_an_interrupt_that_a_shell_s_background_job_ignores_stays_ignored() -> None:
    ignoring = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN){INTERRUPTED}"
    done = run("-c", ignoring, "typer")
    assert done.returncode == 2, "it goes on, and finds that typer is no command"
    assert "no such command 'typer'" in done.stderr


def test_a_log_that_can_not_be_written_costs_no_result(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    copied = run("-m", "medusa_cli", "recipes", "cp", "demo", tmp_path / "mine.yaml", stderr=full)
    listed = run("-m", "medusa_cli", "recipes", "show", "demo", stderr=full)
    wrong = run("-m", "medusa_cli", "recipes", "show", "no-such", stderr=full)
    os.close(full)
    assert copied.returncode == 0
    assert (tmp_path / "mine.yaml").read_text() == listed.stdout
    assert (wrong.returncode, wrong.stdout) == (1, "")


def test_a_prompt_of_utf_8_is_one_in_any_locale() -> None:
    done = run("-m", "medusa_cli", "generate", "Grüße, 世界", "-m", "/no/such/model", **PLAIN_C)
    assert done.returncode == 1
    assert "error: no such model folder or file" in done.stderr


def test_a_word_that_is_no_utf_8_stays_as_it_came() -> None:
    assert as_written("caf\udcc3\udca9") == "café"
    assert as_written("caf\udce9") == "caf\udce9"
    assert as_written("café") == "café"
    assert as_written(None) is None


def test_python_without_docstrings_is_refused_in_words_and_still_helps() -> None:
    refused = run("-OO", "-m", "medusa_cli", "generate", "Hi", "-m", "/no/such/model")
    assert refused.returncode == 1
    assert in_two_lines(refused.stderr)
    assert "-OO" in refused.stderr
    assert run("-OO", "-m", "medusa_cli", "--version").returncode == 0


@pytest.mark.parametrize("name", ["", " "])
def test_doctor_takes_no_empty_name_for_the_default_model(name: str) -> None:
    done = run_here("doctor", name)
    assert done.code == 1
    assert "error: no model is named: the name is empty" in done.err

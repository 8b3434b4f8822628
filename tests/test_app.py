"""The program as a user meets it: what it says, on which stream, and the exit code."""

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from medusa_cli import __version__
from medusa_cli.cli.app import COMMANDS, main
from medusa_cli.cli.flags import RecipeFlags
from medusa_cli.config.loading import load_recipe
from medusa_cli.config.recipe import TargetSettings
from tests.tools.docs_text import cli_reference, package_map

ROOT = Path(__file__).parents[1]

ECHO = '''
from typing import Annotated
import typer
from medusa_cli.cli import options
from medusa_cli.cli.console import GateFailed
from medusa_cli.errors import MedusaError

def command(
    what: Annotated[str, typer.Argument()],
    overrides: options.Overrides = None,
    *,
    target: options.Target,
    output: options.Output,
) -> None:
    """Echo a word.

    Or fail in the way the word says.
    """
    match what:
        case "user":
            raise MedusaError("no such [red]file[/red]\\n: \\x1b[31mx", "make one")
        case "gate":
            raise GateFailed("the speed-up is 0.9, below 1.5", "train longer")
        case "bug":
            raise ValueError("boom")
        case "disk":
            raise OSError(28, "No space left on device", "heads.safetensors")
        case "interrupt":
            raise KeyboardInterrupt
        case "flood":
            for number in range(100_000):
                print(number)
    said = [what, target["target.model"], target["target.dtype"], overrides]
    output.console.print_json(said, output.output_json)
'''


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with a command that fails in the way it is told to."""
    (tmp_path / "echo_word.py").write_text(ECHO)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "echo_word", raising=False)
    return "echo_word"


def run(echo: str, *args: str) -> int:
    return main(["echo-word", *args], commands=[echo])


def test_the_help_of_the_program_lists_each_command_with_its_first_line(echo, capsys):
    assert main(["--help"], commands=[echo]) == 0
    out = capsys.readouterr().out
    assert "echo-word  Echo a word." in out
    assert "Or fail" not in out
    assert "\x1b" not in out


def test_no_command_is_a_usage_error_that_shows_the_help_on_stderr(capsys):
    assert main([]) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith("Usage: medusa")


def test_the_version_is_the_package_s(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"medusa {__version__}\n"


def test_a_user_s_mistake_is_two_plain_lines_and_exit_1(echo, capsys):
    assert run(echo, "user") == 1
    assert capsys.readouterr() == ("", "error: no such [red]file[/red] : \\x1b[31mx\n hint: make one\n")


def test_a_failed_gate_exits_3(echo, capsys):
    assert run(echo, "gate") == 3
    assert capsys.readouterr().err == "error: the speed-up is 0.9, below 1.5\n hint: train longer\n"


def test_a_full_disk_is_no_bug(echo, capsys):
    assert run(echo, "disk") == 1
    assert capsys.readouterr().err.startswith("error: No space left on device: heads.safetensors\n hint: ")


def test_an_interrupt_is_one_line_and_exit_130(echo, capsys):
    assert run(echo, "interrupt") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_bug_is_told_without_a_traceback(echo, capsys):
    assert run(echo, "bug") == 70
    err = capsys.readouterr().err
    assert err.startswith("error: this is a bug in medusa: ValueError: boom\n hint: report it")
    assert err.count("\n") == 2


@pytest.mark.parametrize("way", ["flag", "environment"])
def test_a_bug_shows_its_traceback_on_request(way, echo, capsys, monkeypatch):
    if way == "environment":
        monkeypatch.setenv("MEDUSA_TRACEBACK", "1")
    assert run(echo, "bug", *(["--verbose"] if way == "flag" else [])) == 70
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):")


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        (["echo-wrod"], "no such command 'echo-wrod'", "did you mean 'echo-word'? see medusa --help"),
        (["--versoin"], "no such option: --versoin", "did you mean --version? see medusa --help"),
        (
            ["echo-word", "x", "--modle", "y"],
            "no such option: --modle",
            "did you mean --model? see medusa echo-word --help",
        ),
        (["echo-word"], "missing argument 'what'", "see medusa echo-word --help"),
        (
            ["echo-word", "x", "--dtype", "half"],
            "invalid value for '--dtype': 'half' is not one of 'auto', 'float32', 'bfloat16', 'float16', 'int8'",
            "see medusa echo-word --help",
        ),
        (
            ["echo-word", "x", "--output-json", "nowhere/x.json"],
            "invalid value for '--output-json': can't write nowhere/x.json",
            "see medusa echo-word --help",
        ),
    ],
)
def test_a_usage_error_is_two_lines_and_exit_2(args, error, hint, echo, capsys):
    assert main(args, commands=[echo]) == 2
    assert capsys.readouterr() == ("", f"error: {error}\n hint: {hint}\n")


def test_json_is_one_document_on_stdout_and_in_the_file(echo, capsys, tmp_path):
    file = tmp_path / "out.json"
    assert run(echo, "x", "--json", "--output-json", str(file), "train.epochs=3", "-m", "m") == 0
    out = capsys.readouterr().out
    assert file.read_text() == out
    assert "".join(out.split()) == '["x","m",null,["train.epochs=3"]]'


@pytest.mark.parametrize("module", [["-m", "medusa_cli"], ["-c", "from medusa_cli.cli.app import main; main()"]])
def test_the_program_runs_as_a_module_too(module):
    run = subprocess.run([sys.executable, *module, "--version"], capture_output=True, text=True, cwd=ROOT)
    assert (run.returncode, run.stdout) == (0, f"medusa {__version__}\n")


@pytest.mark.parametrize("word", ["flood", "x"])
def test_a_reader_that_goes_away_hears_no_complaint(word, echo, tmp_path):
    program = f"from medusa_cli.cli.app import main; exit(main(['echo-word', '{word}', '--json'], ['{echo}']))"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, env=environment)
    os.close(writer)
    assert (run.returncode, run.stderr) == (1, b"")


def test_a_setting_s_flag_takes_what_the_recipe_takes_and_says_its_default():
    flags = {flag.name: flag.annotation for flag in RecipeFlags("target.runner", "data.streaming").parameters()}
    assert {name: get_args(kind)[0] for name, kind in flags.items()} == {
        "runner": TargetSettings.model_fields["runner"].annotation | None,
        "streaming": bool | None,
    }


def test_a_flag_beats_the_environment_beats_the_recipe_beats_the_default(tmp_path, monkeypatch):
    file = tmp_path / "recipe.yaml"
    file.write_text("target: {model: from-file, dtype: float16, runner: packed}")
    monkeypatch.setenv("MEDUSA_TARGET_MODEL", "from-environment")
    monkeypatch.setenv("MEDUSA_TARGET_DTYPE", "float32")
    target = load_recipe(file, values={"target.model": "from-flag", "target.runner": None, "seed": 3}).target
    assert (target.model, target.dtype, target.runner, target.device) == ("from-flag", "float32", "packed", "auto")


def test_the_help_states_the_recipe_s_defaults(echo, capsys):
    run(echo, "--help")
    assert f"[default: {TargetSettings().model}]" in capsys.readouterr().out


def test_docs_cli_md_is_what_help_says():
    assert (ROOT / "docs/cli.md").read_text() == cli_reference(), "run `make docs`"


@pytest.mark.parametrize("module", COMMANDS)
def test_each_command_answers_to_help(module, capsys):
    assert main([module.rpartition(".")[2].strip("_").replace("_", "-"), "--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: medusa ")


def test_the_map_has_a_line_for_each_file_with_something_to_say():
    lines = [line for line in package_map().splitlines() if line.startswith("- `")]
    assert any(line.startswith("- `app.py`: ") for line in lines)
    assert all(line.partition("`: ")[2] for line in lines)


END = (
    "import sys, atexit, medusa_cli.cli.app as app, medusa_cli.__main__ as program\n"
    "app.main = lambda: (print('said', end=''), 3)[1]\n"
    "class Heavy:\n    def __del__(self, out=sys.stdout): out.write(' taken apart'), out.flush()\n"
    "heavy = Heavy()\n"
    "atexit.register(lambda: print(' at exit', end=''))\n"
    "{before}\n"
    "sys.exit(program.run())\n"
)


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("", "said at exit"),
        (
            "import threading, time\n"
            "threading.Thread(target=lambda: (time.sleep(0.2), print(' thread', end=''))).start()",
            "said thread at exit",
        ),
        ("sys.setprofile(lambda *_: None)", "said at exit taken apart"),
    ],
)
def test_the_end_says_all_runs_what_waits_for_it_and_takes_nothing_apart(before: str, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", END.format(before=before)], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (3, said), done.stderr

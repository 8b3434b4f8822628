"""The `medusa` program: its commands, its exit codes, and how a mistake is told.

0 fine · 1 error · 2 usage · 3 a gate failed · 70 a bug of ours · 130 interrupted · 143 told to end

This file imports no torch, and a command's module only when that command is asked for: `medusa --help` answers at once.
A command module imports torch inside its `command` function.
"""

import ast
import errno
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from medusa_cli import __version__
from medusa_cli.cli.console import GateFailed, print_error
from medusa_cli.cli.streams import open_streams, settle_stdout
from medusa_cli.errors import MedusaError, is_panic
from medusa_cli.util.busy import spin_briefly
from medusa_cli.util.process_rank import follows

# Modules with a function `command`, in the order of the help; medusa_cli.cli.train_heads is `medusa train-heads`, and
# import_ is `medusa import`.
# A module with SUBCOMMANDS, functions named as they are called, is a group of them, and `command` says what it is for.
COMMANDS: tuple[str, ...] = (
    "medusa_cli.cli.train_heads",
    "medusa_cli.cli.generate",
    "medusa_cli.cli.chat",
    "medusa_cli.cli.bench",
    "medusa_cli.cli.serve",
    "medusa_cli.cli.inspect_tree",
    "medusa_cli.cli.doctor",
    "medusa_cli.cli.export",
    "medusa_cli.cli.import_",
    "medusa_cli.cli.recipes",
    "medusa_cli.cli.models",
    "medusa_cli.cli.cache",
)

EXIT_ERROR, EXIT_USAGE, EXIT_GATE, EXIT_BUG = 1, 2, 3, 70
# as shells count a process that a signal ended
EXIT_INTERRUPTED, EXIT_TOLD_TO_END = 130, 143

EPILOG = (
    "A setting is taken from its flag, else from MEDUSA_SECTION_NAME in the environment, else from --config, else its "
    "default. Results go to stdout, progress and logs to stderr. Exit codes: 0 fine, 1 error, 2 usage, 3 a gate failed."
)


def main(args: Sequence[str] | None = None, commands: Iterable[str] = COMMANDS) -> int:
    """Run the command line `args` (default: the process's own) and return the exit code."""
    args = list(sys.argv[1:] if args is None else args)
    open_streams()
    spin_briefly(os.environ)
    verbose = "--verbose" in args or "-v" in args or bool(os.environ.get("MEDUSA_TRACEBACK"))
    # of several processes that train together the first one speaks for all
    quiet = args[:1] == ["train-heads"] and follows(os.environ)
    try:
        _refuse_stripped(args)
        code = _run(args, commands)
        sys.stdout.flush()
    except GateFailed as failure:
        code = _fail(EXIT_GATE, failure.message, failure.hint)
    except MedusaError as error:
        code = EXIT_ERROR if quiet else _fail(EXIT_ERROR, error.message, error.hint)
    except typer.TyperException as error:
        code = error.exit_code if quiet else _fail(error.exit_code, *_usage_lines(error))
    except BrokenPipeError:
        code = EXIT_ERROR
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except Exception as error:
        if verbose:
            traceback.print_exception(error)
        code = _fail_unforeseen(error)
    except BaseException as error:
        if not is_panic(error):
            raise
        told = f"tokenizers broke down: {' '.join(str(error).split())[:200]}"
        code = _fail(EXIT_ERROR, told, "copy or download the model's tokenizer.json again")
    if code in (EXIT_INTERRUPTED, EXIT_TOLD_TO_END) and not quiet:
        print("interrupted", file=sys.stderr)
    settle_stdout()
    return code


def _refuse_stripped(args: Sequence[str]) -> None:
    """Refuse to work without docstrings, which transformers reads its own classes by."""
    if sys.flags.optimize > 1 and args[:1] not in ([], ["--help"], ["-h"], ["--version"]):
        raise MedusaError(
            "Python runs with -OO (or PYTHONOPTIMIZE=2), which drops the docstrings that transformers needs",
            "run it without; -O is fine",
        )


def make_app(commands: Iterable[str]) -> typer.Typer:
    """The Typer application over these command modules. Its help is plain text, so that docs/cli.md can hold it."""
    modules: dict[str, Any] = {name.rpartition(".")[2].strip("_").replace("_", "-"): name for name in commands}

    class Commands(TyperGroup):
        """The group of commands, each imported when it is asked for."""

        def __init__(self, commands: Any, **settings: Any) -> None:
            super().__init__(commands=modules, **settings)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return _load(cmd_name, modules[cmd_name]) if cmd_name in modules else None

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            if modules:
                with formatter.section("Commands"):
                    formatter.write_dl([(name, _summary(module)) for name, module in modules.items()])

    app = _typer(epilog=EPILOG, cls=Commands)
    app.callback(invoke_without_command=True)(_medusa)
    return app


def _load(name: str, module: str) -> Any:
    """Typer's command `name` over the function `command` of `module`, or the group over its SUBCOMMANDS."""
    from medusa_cli.cli.flags import taken_apart

    app, found = _typer(name=name, add_completion=False), importlib.import_module(module)
    subcommands = getattr(found, "SUBCOMMANDS", ())
    if subcommands:
        app.callback()(found.command)
    else:
        app.command(name)(taken_apart(found.command))
    for function in subcommands:
        app.command(function.__name__)(taken_apart(function))
    return typer.main.get_command(app)


def _typer(**settings: Any) -> typer.Typer:
    """A Typer application with the manners all of ours share."""
    return typer.Typer(
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
        **settings,
    )


def _summary(module: str) -> str:
    """The first line of what a command module's `command` says it does, read without running it."""
    spec = importlib.util.find_spec(module)
    assert spec, f"COMMANDS names {module}, which is not there"
    tree = ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "command")
    return (ast.get_docstring(next(functions)) or "").partition("\n")[0]


def _run(args: list[str], commands: Iterable[str]) -> int:
    """Run without Typer's own printing of errors; 0 unless the command left with another code."""
    code = typer.main.get_command(make_app(commands)).main(args, prog_name="medusa", standalone_mode=False)
    return code if isinstance(code, int) else 0


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"medusa {__version__}")
        raise typer.Exit


def _medusa(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Medusa heads for any Hugging Face causal language model: train them, decode with them, keep every word."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(EXIT_USAGE)


def _usage_lines(error: typer.TyperException) -> tuple[str, str]:
    """Message and hint of a usage error, with the nearest known command or flag in the hint where Typer knows one."""
    text = " ".join(error.format_message().split()).replace(": Value error, ", ": ")
    message, _, nearest = text.partition(" Did you mean ")
    message, _, options = message.partition(" (Possible options: ")
    nearest = nearest.rstrip("?") or options.rstrip(")")
    context = getattr(error, "ctx", None)
    help_command = f"{context.command_path if context else 'medusa'} --help"
    message = message[:1].lower() + message[1:].rstrip(".")
    return message, f"did you mean {nearest}? see {help_command}" if nearest else f"see {help_command}"


def _fail_unforeseen(error: Exception) -> int:
    """What the operating system refused (a full disk, a missing permission) is the user's to fix; the rest is a bug."""
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "free some space and run the same command again" if full else "MEDUSA_TRACEBACK=1 shows what needed it"
        return _fail(EXIT_ERROR, f"{error.strerror or error}{where}", hint)
    return _fail(
        EXIT_BUG,
        f"this is a bug in medusa: {type(error).__name__}: {error}",
        "report it with `medusa --version` and the output of the same command under MEDUSA_TRACEBACK=1",
    )


def _fail(code: int, message: str, hint: str) -> int:
    print_error(message, hint)
    return code

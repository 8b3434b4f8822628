"""`medusa bench`: the same prompts through several arms, interleaved and warm; table, picture, verdict, gates."""

import difflib
import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medusa_cli.cli import options
from medusa_cli.cli.bench_url import (
    NO_SPECULATION,
    Asked,
    Serving,
    bench_server,
    changed,
    check_whole,
    hold_gates,
    refuse_local,
    refuse_remote,
    show,
)
from medusa_cli.cli.console import Console, GateFailed
from medusa_cli.config.parts import HEADS, MIXED, guessing_names
from medusa_cli.errors import DataError

if TYPE_CHECKING:
    from medusa_cli.assemble import DrafterChoice
    from medusa_cli.bench.build import Bench
    from medusa_cli.bench.document import Report
    from medusa_cli.bench.prompt_set import Question
    from medusa_cli.bench.resume import BenchFolder
    from medusa_cli.config.recipe import TargetSettings

BASELINES = ("greedy", "hf-greedy", "hf-prompt-lookup", "llama-cpp")
ONE_AT_A_TIME = ("hf-prompt-lookup", "llama-cpp")
_DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_PROMPTS = Path(__file__).parent.parent / "bench" / "prompts" / "default.jsonl"


@dataclass(frozen=True)
class Measuring:
    """What is measured: the flags about prompts, and how often and how long each is written."""

    prompts: Annotated[
        Path | None,
        typer.Option(
            help='a file as generate reads it; .jsonl of {"id","category","turns"} gives categories, and first turns '
            "are used [default: packaged]"
        ),
    ] = None
    num_prompts: Annotated[int | None, typer.Option(min=1, help="this many, spread over the file")] = None
    num_warmups: Annotated[int, typer.Option(min=0, help="prompts each arm runs before the clock counts")] = 1
    repeats: Annotated[int, typer.Option(min=1, help="times every prompt runs on every arm")] = 1
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 128
    batch_size: Annotated[int, typer.Option(min=1, help="prompts every arm writes at once")] = 1
    allow_random_prompts: Annotated[
        bool, typer.Option("--allow-random-prompts", help="measure even when prompts look like random tokens")
    ] = False

    @cached_property
    def questions(self) -> "Sequence[Question]":
        """Those of the file, as many as wanted. Raises DataError for a file that can't be read."""
        from medusa_cli.bench.prompt_set import pick, read_questions

        return pick(read_questions(self.prompts or DEFAULT_PROMPTS), self.num_prompts)

    @property
    def shape(self) -> dict[str, Any]:
        """What of this the figures depend on, for the report; prompts by what they hold, wherever they lie."""
        texts = [[question.id, question.category, question.text] for question in self.questions]
        return {
            "prompts": hashlib.sha256(repr(texts).encode()).hexdigest()[:16],
            "num_prompts": len(self.questions),
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
            "repeats": self.repeats,
        }


@dataclass(frozen=True)
class Gates:
    """What fails a bench."""

    min_speedup: Annotated[
        float | None, typer.Option(help="exit 3 below this speed-up over hf-greedy if it runs, else greedy")
    ] = None
    require_identical: Annotated[
        bool, typer.Option("--require-identical", help="exit 3 when a reply differs other than at a near tie")
    ] = False


def command(
    *,
    overrides: options.Overrides = None,
    compare: Annotated[
        str,
        typer.Option(
            help="Arms to compare with, by commas: greedy (our loop without guesses), medusa, hydra, suffix, mixed "
            "(our loop with another drafter), hf-greedy (transformers), hf-prompt-lookup, llama-cpp (on the model's "
            "own .gguf file). On a CPU the hf arms run in float32 and bfloat16 unless one is named: hf-greedy@float32. "
            "[default: greedy; no-speculation with --url]",
            show_default=False,
        ),
    ] = "",
    serving: Serving,
    measuring: Measuring,
    gates: Gates,
    plot: Annotated[Path | None, typer.Option(help="draw a .png, .svg or .pdf")] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir",
            "-o",
            metavar="FOLDER",
            help="keep every reply here as it is measured, and the report; a run that was stopped goes on",
        ),
    ] = None,
    target: options.Seeded,
    guessing: options.Guessing,
    drafter: Annotated[
        str | None,
        options.drafter(
            "who guesses in our own arm [default: mixed; medusa with a tree or --speculate on]", guessing_names
        ),
    ] = None,
    threads: options.Threads = None,
    config: options.Config = None,
    output: options.Output,
) -> None:
    """Run the same prompts through several arms, interleaved and warm: table, picture and verdict."""
    if serving.url is not None:
        local = changed(guessing) | {"--drafter": drafter, "--threads": threads, "--config": config}
        local |= {"--output-dir": output_dir, "--batch-size": measuring.batch_size > 1, "KEY=VALUE": overrides}
        refuse_local({f"--{name.rpartition('.')[2]}": value for name, value in target.items()} | local)
        _of_server(serving, compare or NO_SPECULATION, measuring, gates, plot, output)
        return
    refuse_remote(serving)
    names = arm_names(compare or "greedy")
    _check_usage(names, measuring.batch_size, gates.min_speedup)
    if drafter in BASELINES and drafter in names:
        raise typer.BadParameter(f"--compare {drafter} and --drafter {drafter} are two arms of one name: ask for one")
    from medusa_cli.config.loading import load_recipe

    contest = Contest(names, _choice(guessing, drafter), load_recipe(config, overrides or (), target).target)
    _of_model(contest, measuring, gates, plot, output_dir, output)


def _choice(guessing: options.Guessing, drafter: str | None) -> "DrafterChoice":
    """Who guesses in our own arm."""
    shaped = guessing.tree is not None or guessing.tree_size is not None or guessing.speculate == "on"
    return guessing.choice(drafter or (next(iter(HEADS)) if shaped else MIXED))


@dataclass(frozen=True)
class Contest:
    """Whom a bench sets side by side: arms by name, who guesses in our own, and the model that all run."""

    names: list[str]
    choice: "DrafterChoice"
    target: "TargetSettings"


def _of_model(
    contest: Contest,
    measuring: Measuring,
    gates: Gates,
    plot: Path | None,
    output_dir: Path | None,
    output: options.Output,
) -> None:
    """The bench of a model, in this process."""
    from medusa_cli.assemble import check_choice
    from medusa_cli.bench.build import build_arms
    from medusa_cli.bench.resume import BenchFolder
    from medusa_cli.bench.verdict import failed_gates
    from medusa_cli.plots.speeds import draw
    from medusa_cli.plots.style import check_plot_file

    if plot:
        check_plot_file(plot)
    console, (names, choice, settings) = output.console, (contest.names, contest.choice, contest.target)
    _ = measuring.questions  # a file that can't be read is told before a model is loaded
    check_choice(choice, settings.model)
    folder = BenchFolder(output_dir, identity(measuring, settings, choice, names)) if output_dir else None
    with folder.to_itself() if folder else nullcontext():
        report = _report(
            measuring, lambda: build_arms(settings, choice, names, measuring.max_new_tokens), folder, console
        )
    _show(report, console)
    console.print_json(report.document(), output.output_json)
    if plot:  # last: what was measured is told even if the picture can't be written
        draw(report, plot)
    failed = failed_gates(report, gates.min_speedup, gates.require_identical)
    if failed:
        raise GateFailed("; ".join(failed), "the table shows each arm; --tree-size and --runner change the speed")


def _of_server(
    serving: Serving, compare: str, measuring: Measuring, gates: Gates, plot: Path | None, output: options.Output
) -> None:
    """The bench of a server."""
    from medusa_cli.plots.servers import draw
    from medusa_cli.plots.style import check_plot_file

    if plot:
        check_plot_file(plot)
    questions = [question for _ in range(measuring.repeats) for question in measuring.questions]
    asked = Asked(
        questions, measuring.max_new_tokens, measuring.num_warmups, gates.min_speedup, gates.require_identical
    )
    report = bench_server(serving, compare, asked, output.console)
    show(report, output.output_json, output.console)
    if plot:
        draw(report, plot)
    check_whole(report)
    hold_gates(report, asked)


def _check_usage(names: list[str], batch_size: int, min_speedup: float | None) -> None:
    """Refuse what no arm can do and no speed-up can be held against."""
    if min_speedup is not None and not 0 <= min_speedup < math.inf:
        raise typer.BadParameter(f"--min-speedup {min_speedup:g} is no ratio that a speed-up can be held against")
    alone = [name for name in names if name.startswith(ONE_AT_A_TIME)]
    if batch_size > 1 and alone:
        raise typer.BadParameter(f"--batch-size: {alone[0]} writes one text at a time only; leave it out of --compare")


def arm_names(text: str) -> list[str]:
    """The arms named in `--compare`, in order, each once. Raises typer.BadParameter (exit 2) for anything else."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    arms = list(dict.fromkeys([BASELINES[0], *guessing_names(), *BASELINES[1:]]))
    for name in names:
        base, at, dtype = name.partition("@")
        if base not in arms:
            near = difflib.get_close_matches(base, arms, n=1, cutoff=0.4)
            meant = f" Did you mean {near[0]}?" if near else ""
            raise typer.BadParameter(f"--compare: no arm is named '{base}'; there are {', '.join(arms)}.{meant}")
        if at and (not base.startswith("hf-") or dtype not in _DTYPES):
            raise typer.BadParameter(f"--compare {name}: only hf arms take a dtype, one of {', '.join(_DTYPES)}")
    if not names:
        raise typer.BadParameter(f"--compare names no arm. Available: {', '.join(arms)}")
    return names


def identity(
    asked: Measuring, target: "TargetSettings", choice: "DrafterChoice", names: Sequence[str]
) -> dict[str, Any]:
    """What a folder holds the replies of; heads by what they hold. Raises FormatError for heads that aren't there."""
    from medusa_cli.assemble import heads_folder

    folder = heads_folder(choice, target.model)
    files = sorted(folder.glob("*.json")) if folder else []
    held = hashlib.sha256(b"\n".join(file.read_bytes() for file in files)).hexdigest()[:16] if files else None
    return {**asked.shape, **target.model_dump(mode="json"), **_as_json(choice), "heads": held, "arms": list(names)}


def _as_json(choice: "DrafterChoice") -> dict[str, Any]:
    """The choice as what a folder remembers of it."""
    wishes = {name: value for name, value in vars(choice.wishes).items() if value is not None}
    return {**asdict(choice), "wishes": {name: str(value) for name, value in wishes.items()}}


def _report(asked: Measuring, build: "Callable[[], Bench]", folder: "BenchFolder | None", console: Console) -> "Report":
    """The report that the folder has already, or of what is measured now; Ctrl-C says how to go on."""
    if folder and folder.report:
        console.info(f"all replies are in {folder.path} already: another --output-dir measures again")
        return folder.report
    try:
        return measure(asked, build, console, folder)
    except KeyboardInterrupt:
        if folder:
            console.warn(f"stopped; what was measured is in {folder.path}: the same command goes on")
        else:
            console.warn("stopped; nothing is kept: with --output-dir the same command goes on")
        raise


def measure(asked: Measuring, build: "Callable[[], Bench]", console: Console, folder: "BenchFolder | None") -> "Report":
    """Build the arms, run them and report; what the folder holds isn't run again."""
    import torch

    from medusa_cli.bench.compare import compare
    from medusa_cli.bench.document import Run
    from medusa_cli.bench.origin import origin_here
    from medusa_cli.bench.prompt_set import BenchPrompt
    from medusa_cli.bench.report import build_report
    from medusa_cli.bench.resume import KeptTrials
    from medusa_cli.bench.run import Plan, run_bench, unsteady
    from medusa_cli.util.busy import Meter

    with console.waiting("loading the model for each arm"):
        bench = build()
    notes = [*bench.notes, *_odd_prompts(asked, bench)]
    origin = origin_here(torch.device(bench.setup.device))
    rows = [BenchPrompt(one.id, one.category, tuple(bench.encode(one.text))) for one in asked.questions]
    bench.make_room([row.ids for row in rows], asked.batch_size)
    memory = None
    if folder:
        origin = folder.claim({**asdict(bench.setup), "fingerprint": bench.fingerprint}, origin)
        memory = KeptTrials(folder.path, rows, [arm.name for arm in bench.arms])
    plan = Plan(asked.num_warmups, asked.repeats, bench.stop, asked.batch_size)
    replies = (min(asked.num_warmups, len(rows)) + asked.repeats * len(rows)) * len(bench.arms)
    meter = Meter()
    with console.progress("bench", replies, memory.num_replies if memory else 0) as bar:
        trials = run_bench(bench.arms, rows, plan, bench.clock, lambda done, _: bar.advance(done - bar.done), memory)
    contention = meter.read()
    if contention.busy:
        notes.append(f"Warning: the machine was {contention.in_words()}; figures in a quiet moment may differ.")
    else:
        bench.correct_costs()
    notes += [f"Warning: {name} wrote different replies to the same prompt." for name in unsteady(trials)]
    comparison = compare(trials, bench.subject, bench.setup.dtype, bench.logits_after)
    run = Run.model_validate({**asdict(origin), **asked.shape, "contention": contention.document()})
    report = build_report(bench.setup, trials, bench.subject, comparison, notes, run)
    if folder:
        folder.finish(report)
    return report


def _odd_prompts(asked: Measuring, bench: "Bench") -> list[str]:
    """Sentences about prompts that would mislead. Raises DataError for those that look random, unless allowed."""
    from medusa_cli.bench.prompt_set import random_looking, repeated

    notes = []
    odd = random_looking(asked.questions, bench.plain, bench.vocab_size)
    if odd:
        warning = f"{len(odd)} of {len(asked.questions)} prompts look like random tokens ({odd[0]}, …)"
        if not asked.allow_random_prompts:
            raise DataError(
                f"{warning}: guesses on them say nothing about real text",
                "use prompts people write, or pass --allow-random-prompts to measure all the same",
            )
        notes.append(f"Warning: {warning}; the figures don't carry over to real text.")
    doubled = repeated(asked.questions)
    return [*notes, *(f"Note: the same prompt is there {len(ids)} times ({', '.join(ids)})." for ids in doubled)]


def _show(report: "Report", console: Console) -> None:
    """The table and the verdict on stdout."""
    from medusa_cli.bench.report import table

    shown = table(report)
    console.table(shown.headers, shown.rows, spare=shown.spare)
    console.say(shown.legend)
    console.out()
    console.say(report.verdict)

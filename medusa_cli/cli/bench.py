"""`medusa bench`: the same prompts through several arms, interleaved and warm; table, picture, verdict, gates."""

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from medusa_cli.cli import options
from medusa_cli.cli.console import Console, GateFailed
from medusa_cli.errors import DataError

if TYPE_CHECKING:
    from medusa_cli.bench.build import Bench

OURS = ("greedy", "medusa", "hydra", "ngram", "mixed")
ARMS = (*OURS, "hf-greedy", "hf-prompt-lookup", "llama-cpp")
ONE_AT_A_TIME = ("hf-prompt-lookup", "llama-cpp")
_DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_PROMPTS = Path(__file__).parent.parent / "bench" / "prompts" / "default.jsonl"


def command(
    overrides: options.Overrides = None,
    compare: Annotated[
        str,
        typer.Option(
            help="Arms to compare with, by commas: greedy (our loop without guesses), medusa, hydra, ngram, mixed (our "
            "loop with another drafter), hf-greedy (transformers), hf-prompt-lookup, llama-cpp (on the model's own "
            ".gguf file). On a CPU the hf arms run in float32 and bfloat16 unless one is named: hf-greedy@float32."
        ),
    ] = "greedy",
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='a file as generate reads it; .jsonl of {"id","category","turns"} gives categories, and first turns '
            "are used [default: packaged]"
        ),
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="this many, spread over the file")] = None,
    num_warmups: Annotated[int, typer.Option(min=0, help="prompts each arm runs before the clock counts")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="times every prompt runs on every arm")] = 1,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="prompts every arm writes at once")] = 1,
    min_speedup: Annotated[
        float | None, typer.Option(help="exit 3 below this speed-up over hf-greedy if it runs, else greedy")
    ] = None,
    require_identical: Annotated[
        bool, typer.Option("--require-identical", help="exit 3 when a reply differs other than at a near tie")
    ] = False,
    allow_random_prompts: Annotated[
        bool, typer.Option("--allow-random-prompts", help="measure even when prompts look like random tokens")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="draw a .png, .svg or .pdf")] = None,
    model: options.Model = None,
    heads: options.Heads = None,
    tree: options.Tree = None,
    tree_size: options.TreeSize = None,
    drafter: Annotated[
        Literal["medusa", "hydra", "ngram", "mixed"] | None,
        typer.Option(
            "--drafter", help="who guesses in our own arm [default: mixed; medusa with a tree or --speculate on]"
        ),
    ] = None,
    speculate: options.Speculate = "auto",
    revision: options.Revision = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    runner: options.Runner = None,
    attention: options.Attention = None,
    seed: options.Seed = None,
    config: options.Config = None,
    json: options.Json = False,
    output_json: options.OutputJson = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Run the same prompts through several arms, interleaved and warm: table, picture and verdict."""
    names = arm_names(compare)
    _check_usage(names, batch_size, min_speedup)
    from medusa_cli.assemble import DrafterChoice, check_choice
    from medusa_cli.bench.build import build_arms
    from medusa_cli.bench.picture import draw
    from medusa_cli.bench.plotting import check_plot_file
    from medusa_cli.bench.verdict import failed_gates
    from medusa_cli.recipe import load_recipe

    if plot:
        check_plot_file(plot)
    values = options.target_values(
        model=model, revision=revision, dtype=dtype, device=device, runner=runner, attention=attention, seed=seed
    )
    recipe = load_recipe(config, overrides or (), values)
    console = Console(json=json, quiet=quiet, verbose=verbose)
    asked = Asked(prompts or DEFAULT_PROMPTS, num_prompts, num_warmups, repeats, batch_size, allow_random_prompts)
    shaped = tree is not None or tree_size is not None or speculate == "on"
    choice = DrafterChoice(drafter or ("medusa" if shaped else "mixed"), heads, tree, tree_size, speculate)
    check_choice(choice, recipe.target.model)
    report = measure(asked, lambda: build_arms(recipe.target, choice, names, max_new_tokens), console)
    _show(report, console)
    console.print_json(report, output_json)
    if plot:  # last: what was measured is told even if the picture can't be written
        draw(report, plot)
    failed = failed_gates(report, next(iter(report["arms"])), min_speedup, require_identical)
    if failed:
        raise GateFailed("; ".join(failed), "the table shows each arm; --tree-size and --runner change the speed")


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
    for name in names:
        base, at, dtype = name.partition("@")
        if base not in ARMS:
            near = difflib.get_close_matches(base, ARMS, n=1, cutoff=0.4)
            meant = f" Did you mean {near[0]}?" if near else ""
            raise typer.BadParameter(f"--compare: no arm is named '{base}'; there are {', '.join(ARMS)}.{meant}")
        if at and (not base.startswith("hf-") or dtype not in _DTYPES):
            raise typer.BadParameter(f"--compare {name}: only hf arms take a dtype, one of {', '.join(_DTYPES)}")
    if not names:
        raise typer.BadParameter(f"--compare names no arm. Available: {', '.join(ARMS)}")
    return names


@dataclass(frozen=True)
class Asked:
    """What the command line asked to be measured."""

    prompts: Path
    num_prompts: int | None
    num_warmups: int
    repeats: int
    batch_size: int
    allow_random_prompts: bool


def measure(asked: Asked, build: "Callable[[], Bench]", console: Console) -> dict[str, Any]:
    """Read the prompts, build the arms, run them and report. Prompts are read before any model is loaded."""
    from medusa_cli.bench.compare import compare
    from medusa_cli.bench.prompt_set import BenchPrompt, pick, random_looking, read_questions, repeated
    from medusa_cli.bench.report import build_report
    from medusa_cli.bench.run import Plan, run_bench, unsteady

    questions = pick(read_questions(asked.prompts), asked.num_prompts)
    bench = build()
    notes = list(bench.notes)
    odd = random_looking(questions, bench.plain, bench.vocab_size)
    if odd:
        warning = f"{len(odd)} of {len(questions)} prompts look like random tokens ({odd[0]}, …)"
        if not asked.allow_random_prompts:
            raise DataError(
                f"{warning}: guesses on them say nothing about real text",
                "use prompts people write, or pass --allow-random-prompts to measure all the same",
            )
        notes.append(f"warning: {warning}; the figures don't carry over to real text.")
    notes += [f"note: the same prompt is there {len(ids)} times ({', '.join(ids)})." for ids in repeated(questions)]
    plan = Plan(asked.num_warmups, asked.repeats, bench.stop, asked.batch_size)
    rows = [BenchPrompt(question.id, question.category, tuple(bench.encode(question.text))) for question in questions]
    bench.make_room([row.ids for row in rows], asked.batch_size)
    replies = (min(asked.num_warmups, len(rows)) + asked.repeats * len(rows)) * len(bench.arms)
    with console.progress("bench", replies) as bar:
        trials = run_bench(bench.arms, rows, plan, bench.clock, lambda done, total: bar.advance(done - bar.done))
    notes += [f"warning: {name} wrote different replies to the same prompt." for name in unsteady(trials)]
    comparison = compare(trials, bench.subject, bench.setup.dtype, bench.logits_after)
    return build_report(bench.setup, trials, bench.subject, comparison, notes)


def _show(report: dict[str, Any], console: Console) -> None:
    """The table and the verdict on stdout."""
    from medusa_cli.bench.report import table

    shown = table(report)
    console.table(shown.headers, shown.rows)
    console.out(report["verdict"])

"""`medusa train-heads`: from a model to a folder of heads, resumable at every stage."""

import os
import shlex
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medusa_cli.cli import options
from medusa_cli.cli.console import Console
from medusa_cli.cli.flags import RecipeFlags
from medusa_cli.cli.planning import show_plan, tell_time
from medusa_cli.cli.preview_masks import preview
from medusa_cli.cli.signals import Stops
from medusa_cli.cli.training_progress import Watch, reporter_of
from medusa_cli.config.loading import load_recipe
from medusa_cli.config.parts import HEADS, head_kinds
from medusa_cli.config.recipe import Recipe
from medusa_cli.errors import RecipeError
from medusa_cli.util.process_rank import Place, place_of

if TYPE_CHECKING:
    from medusa_cli.pipeline.run import Made
    from medusa_cli.train.parallel import Group


SETTINGS = RecipeFlags(
    "heads.num_heads",
    "heads.num_layers",
    "heads.draft_vocab",
    "data.dataset",
    "data.dataset_split",
    "data.streaming",
    "data.on_bad_row",
    "data.answers_from",
    "data.num_samples",
    "data.max_seq_length",
    "train.epochs",
    "train.max_steps",
    "train.batch_size",
    "train.learning_rate",
    "train.warmup_ratio",
    "train.eval_steps",
    "train.save_steps",
    "train.decode_steps",
    "train.patience",
    "train.report_to",
    "tree.size",
    "output_dir",
    words={"tree.size": "tree_size"},
    metavars={
        "dataset": "self|FILE|HUB",
        "dataset_split": "NAME",
        "answers_from": "auto|self|URL",
        "output_dir": "DIR",
    },
)


def command(
    *,
    overrides: options.Overrides = None,
    heads_type: Annotated[
        str | None, options.part("--heads-type", "Kind of heads. [default: medusa]", head_kinds, HEADS)
    ] = None,
    settings: Annotated[dict[str, Any], SETTINGS],
    resume_from_checkpoint: Annotated[
        bool, typer.Option("--resume-from-checkpoint", help="Go on with the run in the output folder.")
    ] = False,
    preview_masks: Annotated[
        bool, typer.Option("--preview-masks", help="Show which tokens of one sample are learnt; train nothing.")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what a run would do, need and take; start nothing.")
    ] = False,
    target: options.Seeded,
    threads: options.Threads = None,
    config: options.Config = None,
    output: options.Output,
) -> None:
    """Train heads for a model: prompts, answers, heads, accuracies and a tree fitted to this machine, in one folder."""
    values = target | settings | {"heads.type": heads_type}
    recipe = load_recipe(config, overrides or (), values)
    console = output.console
    place = place_of(os.environ)
    _refuse_together(recipe, place)
    if preview_masks and plan:
        raise typer.BadParameter("--preview-masks and --plan each show something of their own; give one")
    if not place.leads:
        _follow(recipe, place, idle=preview_masks or plan)
    elif preview_masks:
        console.print_json(preview(recipe, console), output.output_json)
    elif plan:
        console.print_json(show_plan(recipe, console), output.output_json)
    else:
        made = _lead(recipe, console, resume_from_checkpoint, place)
        _show(made, console)
        console.print_json(_document(recipe, made), output.output_json)


def _refuse_together(recipe: Recipe, place: Place) -> None:
    """Raise RecipeError for what only one process can do."""
    if recipe.lora is not None and place.size > 1:
        raise RecipeError(
            f"lora: heads and adapter learn in one process, and {place.size} were launched",
            "let the heads learn alone first, with the section lora left out; then go on with it in one process, "
            "with --resume-from-checkpoint",
        )
    if recipe.train.states == "rerun" and place.size > 1:
        raise RecipeError(
            f"train.states rerun: one process holds the model, and {place.size} were launched",
            "leave train.states out, so that states are stored, or train in one process",
        )


def _follow(recipe: Recipe, place: Place, *, idle: bool) -> None:
    """One of several processes, and not the first: learn what that one says, print nothing."""
    if idle:
        return
    from medusa_cli.pipeline.distributed import answer_call
    from medusa_cli.train.parallel import Processes

    with Processes(place).joined() as group:
        answer_call(group, recipe)


def _lead(recipe: Recipe, console: Console, resume: bool, place: Place) -> "Made":
    """The process alone, or the first of several."""
    from medusa_cli.train.parallel import device_of, group_at

    device_of(recipe.target, place)  # too few GPUs for the processes are found now, and not after the data stage
    with group_at(place) as group:
        return _run(recipe, console, resume, group)


def _run(recipe: Recipe, console: Console, resume: bool, group: "Group") -> "Made":
    """Look at the folder, load the model and take the whole path; Ctrl-C and SIGTERM say how to go on."""
    from medusa_cli.pipeline.fixed_runner import load_as_begun
    from medusa_cli.pipeline.joint_stage import check_joint
    from medusa_cli.pipeline.run import make_heads, source_of
    from medusa_cli.pipeline.run_folder import open_folder

    folder = open_folder(recipe, resume=resume)
    command = shlex.join(["medusa", *sys.argv[1:]])
    stops = Stops()
    try:
        with stops, folder.to_itself():
            source = source_of(recipe)  # what isn't there is said before a model is loaded
            check_joint(recipe, folder.path)
            with reporter_of(recipe, console) as reporter, Watch(console, reporter, stops) as hooks:
                with console.waiting(f"loading {recipe.target.model}"):
                    target = load_as_begun(folder)
                console.info(f"{target.name}: {target.dtype_name} on {target.device}, {target.identity.runner} runner")
                if place_of(os.environ).size == 1:
                    tell_time(recipe, target, console)
                return make_heads(target, folder, hooks, command, source, group)
    except KeyboardInterrupt:
        console.warn(
            f"stopped; all that is finished is in {folder.path}: the same command with --resume-from-checkpoint goes on"
        )
        raise typer.Exit(128 + (stops.signal or signal.SIGINT)) from None


def _show(made: "Made", console: Console) -> None:
    """The table of accuracies and one line on the tree."""
    accuracy, choice = made.fitted.measurement.accuracy, made.fitted.choice
    rows = [
        (f"head {head + 1}", plain[0], sum(plain[:5]), given[0], sum(given[:5]))
        for head, (plain, given) in enumerate(zip(accuracy.plain, accuracy.conditional, strict=True))
    ]
    columns = ("", "plain top-1", "plain top-5", "conditional top-1", "conditional top-5")
    console.table(columns, rows, title=f"Accuracy on {accuracy.source} ({accuracy.positions:,} places)")
    if choice.size:
        shape = made.fitted.shape
        size = f"one for every step ({shape.spec})" if shape else f"{choice.size} nodes"
        console.say(
            f"tree: {size}, {choice.expected_tokens:.2f} tokens a step expected, "
            f"{choice.speedup:.2f}x plain decoding predicted on this machine"
        )
    else:
        console.say(
            "tree: none pays on this machine; the heads are stored with the empty tree (--tree-size N for another)"
        )
    if made.adapter:
        moved = made.adapter
        console.say(
            f"adapter: perplexity of held-out text {moved['perplexity_before']:.3f} before, "
            f"{moved['perplexity_after']:.3f} after; the best token is the same at {moved['agreement']:.1%} of "
            f"{moved['places']:,} places"
        )
        console.say(
            f"tokens a step by the best tree of 16 nodes: {moved['tokens_before']:.2f} with the heads alone, "
            f"{moved['tokens_after']:.2f} with the adapter"
        )
    console.say(f"heads: {made.folder}")


def _document(recipe: Recipe, made: "Made") -> dict[str, Any]:
    """The run as one JSON document."""
    return {
        "model": recipe.target.model,
        "output_dir": str(made.folder),
        "num_heads": made.fitted.measurement.accuracy.num_heads,
        **made.fitted.document,
        "data": made.data,
        "answers": made.answers,
        "seed": recipe.seed,
        **({"adapter": made.adapter} if made.adapter else {}),
    }

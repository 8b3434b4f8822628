"""`medusa train-heads --plan`: what a run would do, need and take, as text and as a document. Starts nothing."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from medusa_cli.cli.console import Console, duration
from medusa_cli.config.loading import resolved
from medusa_cli.config.recipe import Recipe

if TYPE_CHECKING:
    from medusa_cli.model.target import Target
    from medusa_cli.pipeline.planning.plan import Plan

MIB = 2**20


def show_plan(recipe: Recipe, console: Console) -> dict[str, Any]:
    """Print the resolved recipe and the plan, from the model's config, what is in the folder, and a short try."""
    from medusa_cli.pipeline.planning.plan import plan_of, timed, with_counted_data

    counted = with_counted_data(recipe)
    plan = timed(plan_of(counted), counted, console.info)
    own = recipe.data.dataset == "self"
    console.table(
        ("", "done", "at most"),
        [
            ("prompts written", plan.prompts_written, plan.samples if own else None),
            ("samples with hidden states", plan.samples_ready, plan.samples),
            ("tokens to learn", None, plan.tokens_at_most),
            ("disk, MiB", plan.bytes_there // MIB, plan.bytes_at_most // MIB),
            ("training steps", plan.steps_saved, plan.steps_at_most),
        ],
        title=f"{recipe.target.model} -> {recipe.output_dir}",
    )
    console.say(f"heads: {plan.heads} of {plan.parameters:,} parameters in all")
    if plan.joint:
        console.say(
            f"adapter: {plan.joint.parameters:,} parameters over {plan.joint.layers} layers, at most "
            f"{plan.joint.steps_at_most:,} steps with the heads"
        )
    for line in (_memory(plan), _disk(plan), _time(plan)):
        console.say(line)
    console.out()
    console.stream(resolved(recipe))
    seconds = asdict(plan.seconds) | {"total": plan.seconds.total} if plan.seconds else None
    memory = asdict(plan.memory) | {"needed": plan.memory.needed}
    disk = asdict(plan.disk) | {"fault": plan.disk.fault}
    return {
        **asdict(plan),
        "memory": memory,
        "disk": disk,
        "seconds": seconds,
        "recipe": recipe.model_dump(mode="json"),
    }


def tell_time(recipe: Recipe, target: "Target", console: Console) -> None:
    """Say how long a run that begins now will take, from a short try on the target that it has loaded."""
    from medusa_cli.pipeline.planning.plan import plan_of, timed_on

    if console.quiet:
        return
    with console.waiting("trying how fast this machine writes and learns"):
        plan = timed_on(target, plan_of(recipe), recipe)
    console.info(_time(plan))


def _memory(plan: "Plan") -> str:
    """What is needed at most, and what there is."""
    memory = plan.memory
    joint = f", with the adapter {memory.joint // MIB:,}" if plan.joint else ""
    free = "" if memory.free is None else f"; {memory.free // MIB:,} MiB are free"
    fits = "" if memory.free is None or memory.free >= memory.needed else ": too little (data.rows, data.workers)"
    return (
        f"memory: about {memory.needed // MIB:,} MiB at most (weights {memory.weights // MIB:,}, "
        f"while loading {memory.loading // MIB:,}, with writing {memory.writing // MIB:,}, "
        f"with training {memory.training // MIB:,}{joint}; "
        f"Python and libraries {memory.base // MIB:,} on top){free}{fits}"
    )


def _disk(plan: "Plan") -> str:
    """What the hidden states take at most, and what there is for them."""
    disk = plan.disk
    cap = "" if disk.cap is None else f", data.max_disk_gb allows {disk.cap // MIB:,}"
    fits = ": too little (--num-samples, --max-seq-length)" if disk.fault else ""
    return f"disk: hidden states take {disk.states // MIB:,} MiB at most; {disk.free // MIB:,} MiB are free{cap}{fits}"


def _time(plan: "Plan") -> str:
    """How long it would take, stage by stage."""
    if plan.seconds is None:
        return f"time: not tried: {plan.why_not_timed}"
    stages = [(name, spent) for name, spent in asdict(plan.seconds).items() if spent]
    listed = ", ".join(f"{name} {duration(spent)}" for name, spent in stages) or "nothing is left to do"
    return f"time: about {duration(plan.seconds.total)} at most ({listed}), and about a minute of measuring on top"

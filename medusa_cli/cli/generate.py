"""`medusa generate`: stream the text of one prompt, or of every prompt in a file; a one-line summary on stderr."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from medusa_cli.cli import options
from medusa_cli.cli.console import Console, GateFailed
from medusa_cli.cli.parts import load_parts, own_stops
from medusa_cli.cli.prompting import PromptSource
from medusa_cli.cli.streaming import Answer, write_answers
from medusa_cli.cli.wishes import ChoosingFlags, EndingFlags, WritingFlags

if TYPE_CHECKING:
    from medusa_cli.decode.loop import Parts


def command(
    *,
    source: PromptSource,
    ending: EndingFlags,
    writing: WritingFlags,
    wanted: ChoosingFlags,
    guessing: options.Guessing,
    drafter: Annotated[
        str | None,
        options.drafter(
            "Who guesses: heads, copies from the text so far, other models, functions, or several of them. "
            "[default: mixed where heads are known, else none; the heads alone with a tree or --speculate on]"
        ),
    ] = None,
    target: options.Seeded,
    threads: options.Threads = None,
    config: options.Config = None,
    output: options.Output,
) -> None:
    """Write the text that follows a prompt, several tokens a forward, word for word what the model would say."""
    from medusa_cli.config.loading import load_recipe

    wanted.check()
    ending.check()
    writing.check_usage(wanted)
    recipe = load_recipe(config, (), target)
    console = output.console
    if wanted.is_idle:
        console.warn("--top-p, --top-k and --min-p change nothing at --temperature 0: the best token is always taken")
    asked = source.read()
    from medusa_cli.assemble import check_choice, correct_costs
    from medusa_cli.choosing import Sampling, check_sampling
    from medusa_cli.util.busy import Meter

    sampling = Sampling(**vars(wanted))
    check_sampling(sampling)
    choice = guessing.choice(drafter)
    check_choice(choice, recipe.target.model)
    with console.waiting(f"loading {recipe.target.model}"):
        writer = load_parts(recipe, choice, sampling, console)
    wish = writing.wish(source.chat, ending, own_stops(writer, console))
    meter = Meter()
    answers = write_answers(writer, asked, wish, console)
    if not meter.read().busy:
        correct_costs(writer.drafter, writer.target)
    documents = [_document(writer, answer, guessing.heads, recipe.seed, writing.check) for answer in answers]
    console.print_json(documents[0] if source.prompt_file is None else documents, output.output_json)
    if writing.check:
        _gate(answers, console)


def _document(parts: "Parts", answer: Answer, heads: str | None, seed: int, checked: bool) -> dict[str, Any]:
    """The JSON of one text, with the names of the contract; and what a check found."""
    from medusa_cli.assemble import DrafterChoice, heads_folder

    target, made = parts.target, answer.generation
    folder = heads_folder(DrafterChoice(parts.drafter.name, heads), target.name)
    return {
        "prompt": answer.prompt,
        "text": answer.text,
        "token_ids": made.token_ids,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": len(made.token_ids),
        "finish_reason": made.finish_reason,
        "num_steps": made.num_steps,
        "tokens_per_step": answer.tokens_per_step,
        "output_throughput": len(made.token_ids) / answer.duration,
        "duration": answer.duration,
        "time_to_first_token": answer.time_to_first_token,
        "prompt_throughput": answer.prompt_throughput,
        "generation_throughput": answer.generation_throughput,
        "acceptance": type(parts.rule).__name__.lower(),
        "exact": parts.rule.exact,
        "drafter": parts.drafter.name,
        "tree_size": parts.drafter.size,
        "model": target.name,
        "heads": str(folder) if folder else None,
        "dtype": target.dtype_name,
        "device": str(target.device),
        "runner": target.identity.runner,
        "seed": seed,
        **({"identical": answer.difference is None, "difference": answer.difference} if checked else {}),
    }


def _gate(answers: Sequence[Answer], console: Console) -> None:
    """Tell of each text that differs from plain decoding; GateFailed when one does by more than rounding."""
    wide = []
    for number, answer in enumerate(answers, start=1):
        found = answer.difference
        if found is None:
            continue
        where = f"text {number} differs" if len(answers) > 1 else "the text differs"
        gap = "one ends there" if found.margin is None else f"the two tokens' logits are {found.margin:.2g} apart"
        console.warn(f"{where} from plain decoding at token {found.index}: {gap}, a {found.verdict}")
        if found.verdict == "mismatch":
            wide.append(where)
    if wide:
        raise GateFailed(
            f"{wide[0]} from plain decoding by more than rounding", "please report this with: medusa doctor --json"
        )
    same = sum(answer.difference is None for answer in answers)
    console.info(f"checked: {same} of {len(answers)} as plain decoding writes")

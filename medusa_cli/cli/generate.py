"""`medusa generate`: stream the text of one prompt, or of every prompt in a file; a one-line summary on stderr."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from medusa_cli.cli import options
from medusa_cli.cli.console import Console, GateFailed
from medusa_cli.cli.prompting import PromptSource
from medusa_cli.cli.streaming import Answer, Wish, write_answers
from medusa_cli.cli.streams import as_written
from medusa_cli.config.recipe import NEW_TOKENS

if TYPE_CHECKING:
    from medusa_cli.assemble import DrafterChoice, Sampling
    from medusa_cli.config.recipe import Recipe
    from medusa_cli.decode.loop import Parts


def command(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; none, or -, reads it from a pipe.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt-file", metavar="FILE", help="Prompts from a .jsonl or .txt file, one by one."),
    ] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template. [default: where the model has one]")
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, metavar="N", help="Prompts of a file written at once.")
    ] = 8,
    system_prompt: Annotated[
        str | None, typer.Option("--system-prompt", metavar="TEXT", help="A system message.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, metavar="N", help="Budget of new tokens.")
    ] = NEW_TOKENS,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, metavar="T", help="0 decodes greedily.")
    ] = 0.0,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            metavar="P",
            help="Sample from the best tokens of this mass. [default: as the model's settings say]",
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", min=0, metavar="K", help="Sample from the K best; 0: all. [default: as above]"),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p", metavar="P", help="Sample from tokens this likely beside the best one. [default: as above]"
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            "--repetition-penalty",
            metavar="X",
            help="Above 1: tokens of the text so far become less likely, greedily too. [default: as above]",
        ),
    ] = None,
    acceptance: Annotated[
        Literal["greedy", "lossless", "typical"] | None,
        typer.Option(
            "--acceptance",
            help="greedy and lossless are exact: the model's own text, or its own law. typical is not: it keeps "
            "what is likely. [default: by temperature]",
        ),
    ] = None,
    posterior_threshold: Annotated[
        float | None,
        typer.Option("--posterior-threshold", metavar="P", help="typical: keep what is likelier. [default: 0.09]"),
    ] = None,
    posterior_alpha: Annotated[
        float | None,
        typer.Option(
            "--posterior-alpha", metavar="A", help="typical: or likelier than this, where any is unsure. [default: 0.3]"
        ),
    ] = None,
    min_new_tokens: Annotated[
        int, typer.Option("--min-new-tokens", min=0, metavar="N", help="No stop id before as many tokens.")
    ] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Stop ids don't end the text: always write --max-new-tokens.")
    ] = False,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this text; may be given again.")
    ] = None,
    tree: options.Tree = None,
    tree_size: options.TreeSize = None,
    drafter: Annotated[
        str | None,
        options.drafter(
            "Who guesses: heads, n-grams of the text so far, or both. "
            "[default: mixed where heads are known, else none; the heads alone with a tree or --speculate on]"
        ),
    ] = None,
    speculate: options.Speculate = "auto",
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Show the text while it is written.")] = True,
    check: Annotated[bool, typer.Option("--check", help="Decode plainly as well; exit 3 at a mismatch.")] = False,
    model: options.Model = None,
    heads: options.Heads = None,
    revision: options.Revision = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    runner: options.Runner = None,
    attention: options.Attention = None,
    threads: options.Threads = None,
    seed: options.Seed = None,
    config: options.Config = None,
    json: options.Json = False,
    output_json: options.OutputJson = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Write the text that follows a prompt, several tokens a forward, word for word what the model would say."""
    from medusa_cli.config.loading import load_recipe

    shares = {"--top-p": top_p, "--min-p": min_p}
    _check_numbers(temperature, shares, posterior_threshold, posterior_alpha)
    if repetition_penalty is not None and not 0 < repetition_penalty < math.inf:
        raise typer.BadParameter("--repetition-penalty is a factor above 0; 1 changes nothing")
    if check and temperature > 0:
        raise typer.BadParameter("--check judges greedy texts, by how near a tie was; leave out --temperature")
    if stop and not all(stop):
        raise typer.BadParameter("--stop needs some text to stop at")
    values = options.target_values(
        model=model, revision=revision, dtype=dtype, device=device, runner=runner, attention=attention, seed=seed
    )
    recipe = load_recipe(config, (), values)
    console = Console(json=json, quiet=quiet, verbose=verbose)
    if temperature == 0 and (top_p is not None or top_k or min_p is not None):
        console.warn("--top-p, --top-k and --min-p change nothing at --temperature 0: the best token is always taken")
    asked = PromptSource(prompt, prompt_file, system_prompt, chat).read()
    from medusa_cli.assemble import DrafterChoice, Sampling, check_choice, check_sampling, correct_costs
    from medusa_cli.util.busy import Meter

    sampling = Sampling(
        acceptance=acceptance,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        min_new_tokens=min_new_tokens,
        posterior_threshold=posterior_threshold,
        posterior_alpha=posterior_alpha,
    )
    check_sampling(sampling)
    choice = DrafterChoice(drafter, heads, tree, tree_size, speculate)
    check_choice(choice, recipe.target.model)
    with console.waiting(f"loading {recipe.target.model}"):
        writer = _load(recipe, choice, sampling, console)
    stops = (*(as_written(text) for text in stop or ()), *_own_stops(writer, console))
    wish = Wish(max_new_tokens, chat, stops, ignore_eos, stream, check, batch_size)
    meter = Meter()
    answers = write_answers(writer, asked, wish, console)
    if not meter.read().busy:
        correct_costs(writer.drafter, writer.target)
    documents = [_document(writer, answer, heads, recipe.seed, check) for answer in answers]
    console.print_json(documents[0] if prompt_file is None else documents, output_json)
    if check:
        _gate(answers, console)


def _check_numbers(
    temperature: float,
    shares: Mapping[str, float | None],
    posterior_threshold: float | None,
    posterior_alpha: float | None,
) -> None:
    """Refuse numbers that mean nothing; Typer's own bounds can't leave an end out."""
    from medusa_cli.config.recipe import COLDEST

    if 0 < temperature < COLDEST:
        raise typer.BadParameter(f"--temperature {temperature:g} is too close to 0; 0 takes the best token always")
    for flag, share in shares.items():
        if share is not None and not 0 < share <= 1:
            raise typer.BadParameter(f"{flag} is a share: above 0, at most 1")
    if posterior_threshold is not None and not 0 < posterior_threshold < 1:
        raise typer.BadParameter("--posterior-threshold is a probability: above 0, below 1")
    if posterior_alpha is not None and not 0 < posterior_alpha < math.inf:
        raise typer.BadParameter("--posterior-alpha is a factor above 0")


def _load(recipe: "Recipe", choice: "DrafterChoice", sampling: "Sampling", console: Console) -> "Parts":
    """The model, its heads and its rule; says what was chosen."""
    from medusa_cli.assemble import find_heads, load_choosing, load_drafter, load_target_for
    from medusa_cli.decode.loop import Parts
    from medusa_cli.drafters.none import NoDrafter

    target = load_target_for(choice, recipe.target)
    if target.identity.adapter:
        console.info(f"the heads come with an adapter: what is written is the text of {target.name} with it")
    drafter = load_drafter(choice, target)
    console.debug(
        f"{target.name}: {target.dtype_name} on {target.device}, "
        f"{target.identity.runner} runner, {target.identity.attention} attention"
    )
    if isinstance(drafter, NoDrafter) and choice.name is None and choice.speculate != "off":
        known = find_heads(choice.heads, target.name) is not None
        why = "the tree is empty" if known else f"no heads are known for {target.name}, medusa train-heads makes some"
        console.info(f"decoding plainly: {why}")
    choosing = load_choosing(sampling, target)
    if choosing.followed:
        listed = ", ".join(f"{name} {value}" for name, value in choosing.followed.items())
        console.info(f"as the model's generation_config says: {listed}")
    if not choosing.rule.exact:
        console.warn("typical acceptance is not exact: the text is plausible, but not the model's own")
    return Parts(target, drafter, choosing.rule, choosing.shaping, recipe.seed)


def _own_stops(parts: "Parts", console: Console) -> tuple[str, ...]:
    """The stop strings of the model's own settings; says which of these are followed and which can't be."""
    from medusa_cli.acceptance.logits_processors import left_out_of, stop_strings_of

    config = parts.target.model.generation_config
    if left_out := left_out_of(config):
        listed = ", ".join(f"{name} {value}" for name, value in left_out.items())
        console.warn(f"the model's generation_config asks for {listed}: not done here, one text is written plainly")
    if stops := stop_strings_of(config):
        console.info(f"as the model's generation_config says: texts end before {' or '.join(map(repr, stops))}")
    return stops


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

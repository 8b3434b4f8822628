"""What texts are written with, loaded for a command, and what is said of the choice."""

from typing import TYPE_CHECKING

from medusa_cli.cli.console import Console

if TYPE_CHECKING:
    from medusa_cli.assemble import DrafterChoice
    from medusa_cli.choosing import Sampling
    from medusa_cli.config.recipe import Recipe
    from medusa_cli.decode.loop import Parts


def load_parts(recipe: "Recipe", choice: "DrafterChoice", sampling: "Sampling", console: Console) -> "Parts":
    """The model, its heads and its rule; says what was chosen."""
    from medusa_cli.assemble import find_heads, load_drafter, load_target_for
    from medusa_cli.choosing import load_choosing
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


def own_stops(parts: "Parts", console: Console) -> tuple[str, ...]:
    """The stop strings of the model's own settings; says which of these are followed and which can't be."""
    from medusa_cli.acceptance.logits_processors import left_out_of, stop_strings_of

    config = parts.target.model.generation_config
    if left_out := left_out_of(config):
        listed = ", ".join(f"{name} {value}" for name, value in left_out.items())
        console.warn(f"the model's generation_config asks for {listed}: not done here, one text is written plainly")
    if stops := stop_strings_of(config):
        console.info(f"as the model's generation_config says: texts end before {' or '.join(map(repr, stops))}")
    return stops

"""One runner for a whole run: its last bits are in every state that is written, so `auto` is asked once."""

from medusa_cli import assemble
from medusa_cli.config.recipe import Recipe
from medusa_cli.errors import TargetError
from medusa_cli.kernels.blocks import BlockLinear
from medusa_cli.model.target import Target
from medusa_cli.pipeline.run_folder import RunFolder


def load_as_begun(folder: RunFolder) -> Target:
    """The target of the folder's recipe, with the runner that `auto` was when the run began, if it can be had here."""
    settings, asked = folder.target_settings, folder.recipe.target
    try:
        return assemble.load_target(settings)
    except TargetError:
        if settings == asked:
            raise
    return assemble.load_target(asked)  # the run goes on on another machine


def laid_out_like(recipe: Recipe, target: Target) -> Recipe:
    """The recipe for processes beside this one: where it says auto, they would measure while all are busy."""
    asked = recipe.target
    if asked.runner != "auto" or asked.quantize != "none" or asked.device_map != "one":
        return recipe
    runner = target.identity.runner
    if runner == "compiled":  # for as many threads as this process has
        runner = "blocks" if any(isinstance(each, BlockLinear) for each in target.model.modules()) else "packed"
    return recipe.model_copy(update={"target": asked.model_copy(update={"runner": runner})})

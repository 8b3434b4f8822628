"""`medusa train-heads --preview-masks`: one sample of a data set with its learnt tokens marked. Trains nothing."""

from typing import Any

from medusa_cli.cli.console import Console
from medusa_cli.config.recipe import Recipe


def preview(recipe: Recipe, console: Console) -> dict[str, Any]:
    """Print the first usable sample and return it as a document. Raises RecipeError without a data set."""
    from medusa_cli.assemble import load_target
    from medusa_cli.data.conversations import Counts
    from medusa_cli.data.preview import segments
    from medusa_cli.data.tokens import check_share, tokenize
    from medusa_cli.errors import RecipeError
    from medusa_cli.pipeline.data_stage import conversations_of

    data, counts = recipe.data, Counts()
    if data.dataset == "self":
        raise RecipeError("--preview-masks needs a data set", "name one: --dataset FILE")
    if data.answers_from != "auto":
        raise RecipeError(
            f"--preview-masks shows the answers of a data set, and --answers-from {data.answers_from} has others made",
            "leave --answers-from out to see what of the data's own answers would be learnt",
        )
    rows = conversations_of(data, counts)
    target = load_target(recipe.target)
    tokenizer, ends = target.tokenizer, target.stop_ids
    longest, bad = data.max_seq_length, data.on_bad_row
    sample = next(tokenize(tokenizer, rows, max_length=longest, counts=counts, on_bad_row=bad, ends=ends))
    if counts.skipped or counts.cut:
        console.warn(f"up to the row shown: {counts.describe()}")
    if warning := check_share(counts):
        console.warn(warning)
    parts = segments(tokenizer, sample)
    learnt = sum(sample.supervised)
    console.out(f"{learnt} of {len(sample.ids)} tokens are learnt (between \u27e6 and \u27e7):")
    console.marked([(part.text, part.supervised) for part in parts])
    return {"tokens": len(sample.ids), "learnt": learnt, "segments": parts}

"""What a run would do, write and need, from the recipe, the model's config and the run folder. Changes nothing."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from medusa_cli.heads.medusa import MedusaConfig, MedusaHeads
from medusa_cli.home import expanded
from medusa_cli.recipe import Recipe
from medusa_cli.target.convert import converted
from medusa_cli.target.fetch import fetch_config
from medusa_cli.target.refuse import refuse_config
from medusa_cli.target.sources import find_source

# float16 hidden states, an int32 id and a flag for each place of a sample
BYTES_A_NUMBER, BYTES_A_PLACE = 2, 5
# the heads in float32, and two checkpoints of them with AdamW's two moments
COPIES_OF_THE_HEADS, BYTES_A_PARAMETER = 1 + 2 * 3, 4


@dataclass(frozen=True)
class Plan:
    """Counts of what is there and of what there may be at most; how much is written depends on where texts end."""

    samples: int
    prompts_written: int
    samples_ready: int
    tokens_at_most: int
    steps_saved: int
    steps_at_most: int
    bytes_there: int
    bytes_at_most: int
    heads: int
    parameters: int


def plan_of(recipe: Recipe) -> Plan:
    """The plan of this recipe. Raises TargetError when the model is not there, or can't verify trees."""
    config = fetch_config(converted(find_source(recipe.target.model)), recipe.target.revision)
    refuse_config(config, recipe.target.model)
    text = config.get_text_config()
    folder, data = expanded(recipe.output_dir), recipe.data
    own = data.dataset == "self"
    tokens = min(data.max_answer_tokens, data.max_seq_length // 2) if own else data.max_seq_length
    learnt = data.num_samples * (1 - data.held_out) * tokens
    steps = math.ceil(recipe.train.epochs * learnt / recipe.train.batch_size)
    parameters = _parameters(recipe, text.hidden_size, text.vocab_size)
    places = data.num_samples * (tokens + 1)
    return Plan(
        samples=data.num_samples,
        prompts_written=_lines(folder / "written" / "prompts.jsonl"),
        samples_ready=max(_lines(folder / "written" / store / "samples.jsonl") for store in ("answers", "read")),
        tokens_at_most=data.num_samples * tokens,
        steps_saved=max((int(file.stem.partition("-")[2]) for file in folder.glob("checkpoints/step-*.pt")), default=0),
        steps_at_most=min(steps, recipe.train.max_steps or steps),
        bytes_there=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        bytes_at_most=places * (BYTES_A_NUMBER * text.hidden_size + BYTES_A_PLACE)
        + COPIES_OF_THE_HEADS * BYTES_A_PARAMETER * parameters,
        heads=recipe.heads.num_heads,
        parameters=parameters,
    )


def _parameters(recipe: Recipe, hidden_size: int, vocab_size: int) -> int:
    """Trained parameters of the heads, counted on heads without memory."""
    wanted = recipe.heads
    config = MedusaConfig(
        num_heads=wanted.num_heads,
        num_layers=wanted.num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        draft_vocab=min(wanted.draft_vocab or vocab_size, vocab_size),
        own_output=wanted.own_output,
        output_bias=False,
        sees_root=wanted.sees_root,
        target_name=recipe.target.model,
        target_fingerprint="",
    )
    with torch.device("meta"):
        heads = MedusaHeads(config, torch.zeros(config.draft_vocab, dtype=torch.long))
    return sum(parameter.numel() for parameter in heads.parameters())


def _lines(file: Path) -> int:
    """Whole lines of a file; 0 when it is not there."""
    return file.read_bytes().count(b"\n") if file.is_file() else 0

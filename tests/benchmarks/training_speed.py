"""How fast heads learn: from hidden states that are kept, against reading the texts again at every step.

`python -m tests.benchmarks.training_speed` (make bench-training). The target answers prompts and reads its answers
once, as the data stage does with given text; then the arms of target_read_anew.py learn them in one process, step by
step in turns, so that a busy moment hits all. The table goes to stderr, one JSON document to stdout.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from medusa_cli.config.recipe import Recipe, TargetSettings
from medusa_cli.data.prompts import read_prompts
from medusa_cli.data.tokens import Tokens, prompt_ids
from medusa_cli.model.clock import now
from medusa_cli.model.loading.load import load_target, load_unchecked
from medusa_cli.model.target import Target
from medusa_cli.pipeline.data_context import Stage
from medusa_cli.pipeline.generation_workers import Job, Manner, write_here
from medusa_cli.pipeline.given_answers import keep_states
from medusa_cli.train.corpus import Corpus, Examples
from tests.benchmarks.target_read_anew import FROM_STORE, SAME_LOSS, Trial, arms_of, race
from tests.benchmarks.writing_speed import PROMPTS

EPOCHS = (1, 2, 4)


def document_of(trial: Trial, states_seconds: float, places: int) -> dict[str, Any]:
    """The figures: speeds, ratios to stored step by step, losses side by side, and what whole epochs cost.

    states_seconds  what reading all texts once took, to keep their states
    places          the places of an epoch
    """
    stored = trial.steps["stored"]
    arms = {}
    for name, steps in trial.steps.items():
        ratios = _ratios(steps.seconds, stored.seconds)
        arms[name] = {
            "tokens_per_second": steps.rate,
            "seconds_a_step": statistics.median(steps.seconds),
            "times_stored": statistics.median(ratios),
            "times_stored_spread": [min(ratios), max(ratios)],
            "times_stored_in_processor_time": statistics.median(
                _ratios(steps.processor_seconds, stored.processor_seconds)
            ),
            "losses": steps.losses,
        }
    differences = {
        name: max(abs(a - b) for a, b in zip(trial.steps[name].losses, trial.steps[other].losses, strict=True))
        for name, other in SAME_LOSS.items()
    }
    return {
        "steps": len(stored.places),
        "tokens_a_step": statistics.median(stored.places),
        "tokens_an_epoch": places,
        "states_seconds": states_seconds,
        "arms": arms,
        "largest_loss_difference": {f"{name} to {SAME_LOSS[name]}": value for name, value in differences.items()},
        "held_out": {
            name: {"loss": float(scores.loss), "right_at_first_guess": scores.top1_K.tolist()}
            for name, scores in trial.held_out.items()
        },
        "epochs": {str(epochs): _epochs(trial, states_seconds, places, epochs) for epochs in EPOCHS},
    }


def _ratios(theirs: Sequence[float], ours: Sequence[float]) -> list[float]:
    """Step by step."""
    return [one / other for one, other in zip(theirs, ours, strict=True)]


def _epochs(trial: Trial, states_seconds: float, places: int, epochs: int) -> dict[str, float]:
    """Seconds of so many epochs, the pass that keeps the states counted; and how often they fit into plain's.

    `with_free_states` is what stored has when the target wrote the texts itself: the states come with the writing.
    """
    learning = {name: epochs * places / steps.rate for name, steps in trial.steps.items()}
    seconds = {name: spent + (states_seconds if name in FROM_STORE else 0.0) for name, spent in learning.items()}
    return {
        **seconds,
        "plain_to_stored": seconds["plain"] / seconds["stored"],
        "plain_to_stored_with_free_states": seconds["plain"] / learning["stored"],
    }


def table_of(document: Mapping[str, Any]) -> Iterator[str]:
    """The figures as lines for people."""
    yield (
        f"{'':<12}{'tokens/s':>10}{'s a step':>10}{'x stored':>10}{'spread':>14}{'processor':>11}"
        f"{'first loss':>12}{'last loss':>11}"
    )
    for name, arm in document["arms"].items():
        low, high = arm["times_stored_spread"]
        yield (
            f"{name:<12}{arm['tokens_per_second']:>10.0f}{arm['seconds_a_step']:>10.2f}{arm['times_stored']:>10.2f}"
            f"{f'{low:.2f}-{high:.2f}':>14}{arm['times_stored_in_processor_time']:>11.2f}"
            f"{arm['losses'][0]:>12.5f}{arm['losses'][-1]:>11.5f}"
        )
    for pair, value in document["largest_loss_difference"].items():
        yield f"largest difference of a step's loss, {pair}: {value:.2g}"
    for name, figures in document["held_out"].items():
        right = " ".join(f"{share:.3f}" for share in figures["right_at_first_guess"])
        yield f"held out, weights of {name}: loss {figures['loss']:.4f}, right by head {right}"
    for epochs, figures in document["epochs"].items():
        yield (
            f"epochs {epochs}: stored {figures['stored']:.0f} s, {document['states_seconds']:.0f} s of it for states, "
            f"plain {figures['plain']:.0f} s: {figures['plain_to_stored']:.2f}x, "
            f"{figures['plain_to_stored_with_free_states']:.2f}x where the states come with the writing"
        )


def answered(target: Target, prompts: Sequence[Sequence[int]], budget: int) -> dict[str, Tokens]:
    """Each prompt with the target's greedy answer, of which alone is learnt."""
    texts = {}
    manner = Manner(max_new_tokens=budget, max_tokens=target.context_limit, rows=min(64, len(prompts)))
    for written in write_here(target, [Job(number, ids) for number, ids in enumerate(prompts)], manner):
        asked, answer = list(prompts[written.index]), written.token_ids
        texts[str(written.index)] = Tokens([*asked, *answer], [False] * len(asked) + [True] * len(answer))
    return texts


def compare(
    recipe: Recipe, target: Target, model: Any, texts: Mapping[str, Tokens], *, batch: int, steps: int
) -> dict[str, Any]:
    """Keep the states of these texts in a folder that is deleted at the end, and let the arms learn from them.

    model  the target in stock modelling code
    batch  texts of a step
    """
    with tempfile.TemporaryDirectory(prefix="medusa-rerun-") as folder:
        begun = now(target.device)
        # the data stage's own pass, without its look at how likely the answers are: that is of some texts only
        store = Path(folder) / "read"
        keep_states(Stage(recipe, target, Path(folder), lambda *_: None), texts, store)
        states_seconds = now(target.device) - begun
        corpus = Corpus.open(store)
        split = corpus.split(recipe.data.held_out, recipe.seed)
        arms = arms_of(recipe, target, model, corpus, split.train)
        draft_ids, num_heads = arms["stored"].state.heads.draft_ids, recipe.heads.num_heads
        held_out = Examples.of(corpus, split.held_out, draft_ids, num_heads)
        trial = race(recipe, arms, held_out, texts=batch, steps=steps)
        document = document_of(trial, states_seconds, len(arms["stored"].examples))
    return {
        "texts": len(texts),
        "text_tokens": sum(len(text.ids) for text in texts.values()),
        "draft_vocab": {name: arm.state.heads.config.draft_vocab for name, arm in arms.items()},
        **document,
    }


def main() -> None:
    """Print the table and one JSON document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=TargetSettings().model)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--texts", type=int, default=8, help="texts of a batch")
    parser.add_argument("--steps", type=int, default=12)
    asked = parser.parse_args()
    sections = {
        "target": {"model": asked.model, "dtype": "float32"},
        "heads": {"num_layers": asked.num_layers},
        "data": {"held_out": 0.1},
    }
    recipe = Recipe.model_validate(sections)
    target = load_target(recipe.target)
    stock = load_unchecked(recipe.target.model_copy(update={"runner": "eager", "attention": "sdpa"})).model
    prompts = [prompt_ids(target.tokenizer, one.messages, chat=True) for one in read_prompts(asked.prompts)]
    texts = answered(target, prompts, asked.max_new_tokens)
    document = compare(recipe, target, stock, texts, batch=asked.texts, steps=asked.steps)
    setting = {"model": asked.model, "threads": torch.get_num_threads(), "device": str(target.device)}
    print("\n".join(table_of(document)), file=sys.stderr)
    print(json.dumps({**setting, "heads": recipe.heads.model_dump(mode="json"), **document}, indent=2))


if __name__ == "__main__":
    main()

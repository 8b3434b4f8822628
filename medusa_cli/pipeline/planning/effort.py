"""What reading, writing and learning take on this machine: each tried for a moment, with the recipe's own sizes.

Nothing is written anywhere. Shape letters: B rows or places, K heads, V rows of the output matrix, H hidden.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from medusa_cli.config.recipe import Recipe
from medusa_cli.contracts import Draft
from medusa_cli.heads.base import Heads
from medusa_cli.model.clock import now
from medusa_cli.model.costs.by_nodes import random_ids
from medusa_cli.model.target import Target
from medusa_cli.pipeline.decode_eval import NEW_TOKENS, PROMPTS
from medusa_cli.pipeline.given_answers import READ_TOKENS
from medusa_cli.pipeline.inner_states import reader_of
from medusa_cli.train.corpus import Corpus, Examples
from medusa_cli.train.loop import Batch, make_optimizer, take_gradients
from medusa_cli.train.store import Sample
from medusa_cli.train.text_examples import examples_of
from medusa_cli.trees.tree import TokenTree
from medusa_cli.util.threads import threads_to_share
from medusa_cli.util.timing import interleaved

PREFILL_ROWS, PREFILL_TOKENS = 8, 32
STEPS, PLACES = 3, 512


@dataclass(frozen=True)
class Effort:
    """Seconds of each kind of work, in one process as the run would have it.

    read_token   a token that is read: a prompt's, or one of a given text
    step         a step of all rows side by side, each half way through its text
    learn_place  a place of a training batch
    decode       held-out prompts decoded with heads, if no guess is right; none of it while nothing is decoded
    """

    read_token: float
    step: float
    learn_place: float
    decode: float


def measure_effort(recipe: Recipe, target: Target, heads: Heads) -> Effort:
    """Some seconds of each. `heads` are fresh ones of this recipe, and are trained on noise: throw them away."""
    with _threads_of_one(recipe.data.workers, target):
        read, step = _reading(recipe, target), _stepping(recipe, target, recipe.data.rows, nodes=1)
    return Effort(read, step, _learning(recipe, target, heads), _decoding(recipe, target, read))


@torch.inference_mode()
def _reading(recipe: Recipe, target: Target) -> float:
    """Seconds a token while prompts, or texts that are given, are read."""
    if recipe.data.target_answers:
        rows, tokens = min(PREFILL_ROWS, recipe.data.rows), PREFILL_TOKENS
    else:
        tokens = min(recipe.data.max_seq_length, READ_TOKENS)
        rows = max(1, READ_TOKENS // tokens // 4)
    tokens = min(tokens, target.context_limit or tokens)
    texts = random_ids(target, rows * tokens).view(rows, tokens).tolist()
    return _median(target.device, lambda: target.hidden(texts), 2) / (rows * tokens)


@torch.inference_mode()
def _stepping(recipe: Recipe, target: Target, rows: int, nodes: int) -> float:
    """Seconds of a step while so many rows write, each with so many nodes."""
    data = recipe.data
    rows = min(rows, data.num_samples)
    held = (
        (data.max_prompt_tokens + data.max_answer_tokens // 2) if data.dataset == "self" else data.max_seq_length // 2
    )
    held = max(1, min(held, (target.context_limit or held + nodes) - nodes))
    cache = target.new_cache(rows, held + nodes)
    target.prefill([random_ids(target, held)[0].tolist()], cache)
    if rows > 1:
        cache.copy_prefix(0, slice(1, rows), held)
    tokens_BN = torch.zeros(rows, nodes, dtype=torch.long, device=target.device)
    draft = Draft(tokens_BN, TokenTree.chain(nodes - 1).to(target.device))
    return _median(target.device, lambda: target.verify(draft, cache).logits_BNV.argmax(-1), STEPS)


def _decoding(recipe: Recipe, target: Target, read_token: float) -> float:
    """Seconds of a decode of held-out prompts at most, the drafts left out."""
    if not recipe.train.decode_steps:
        return 0.0
    data = recipe.data
    rows = min(PROMPTS, data.rows)
    prompt = data.max_prompt_tokens if data.dataset == "self" else data.max_seq_length // 2
    step = _stepping(recipe, target, rows, recipe.heads.num_heads + 1)
    return PROMPTS * prompt * read_token + PROMPTS / rows * min(NEW_TOKENS, data.max_answer_tokens) * step


def _learning(recipe: Recipe, target: Target, heads: Heads) -> float:
    """Seconds a place of a training step."""
    settings, device = recipe.train, heads.device
    optimizer = make_optimizer(heads.pack_output(), settings)
    examples = _noise(recipe, target, heads)
    batch = Batch(1, examples.order(PLACES, 0, settings.place_share).rows(0), settings.learning_rate)

    def learn() -> None:
        optimizer.zero_grad(set_to_none=True)
        take_gradients(heads, examples, batch, settings)

    return _median(device, learn, 2) / len(batch.rows_B) + _median(device, optimizer.step, 2) / settings.batch_size


def _noise(recipe: Recipe, target: Target, heads: Heads) -> Examples:
    """Examples of random texts as long as those to come, enough for PLACES of them."""
    data, config = recipe.data, heads.config
    length = max(16, min(data.max_seq_length, data.max_prompt_tokens + data.max_answer_tokens))
    length = min(length, target.context_limit or length)
    count = 1 + math.ceil(PLACES / max(1, recipe.train.place_share * (length - 1 - config.num_heads)))
    rng = torch.Generator().manual_seed(0)  # as `random_ids`: nothing is drawn that others would draw
    width = len(config.wanted_taps) * target.tap_size if recipe.train.states == "stored" else 0

    def sample(number: int) -> Sample:
        ids = heads.draft_ids.cpu()[torch.randint(config.draft_vocab, (length,), generator=rng)].tolist()
        hidden_TH = torch.randn(length, config.hidden_size, generator=rng)
        taps_TX = torch.randn(length, width, generator=rng) if width else None
        return Sample(str(number), ids, hidden_TH, [True] * length, taps_TX)

    corpus = Corpus.from_samples([sample(number) for number in range(count)])
    reader = reader_of(target, config.wanted_taps) if recipe.train.states == "rerun" else None
    return examples_of(corpus, range(count), heads.draft_ids, config, reader)


def _median(device: torch.device, work: Callable[[], object], times: int) -> float:
    """Median seconds of `times` runs of `work`, after one that warms up."""
    return interleaved({"work": work}, lambda: now(device), rounds=times)["work"].median


@contextmanager
def _threads_of_one(workers: int, target: Target) -> Iterator[None]:
    """The threads that one of several writing processes has."""
    before = torch.get_num_threads()
    if workers > 1 and target.device.type == "cpu":
        torch.set_num_threads(max(1, threads_to_share() // workers))
    try:
        yield
    finally:
        torch.set_num_threads(before)

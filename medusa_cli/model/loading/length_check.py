"""The self-check past each length that a config names: written on across it, a row must score as the library's own.

The yardstick is `generate` of one row with its tokens given: windows, chunks and rotary tables change where they change
for a text that is written alone. Ours are two rows of different length side by side, by trees.
Shape letters: B rows, N nodes, D places on a path, V vocabulary, L tokens written.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from medusa_cli.contracts import Draft, Verdict
from medusa_cli.model.cache import TreeCache
from medusa_cli.model.clock import now
from medusa_cli.model.target import Target
from medusa_cli.model.thresholds import thresholds
from medusa_cli.trees.tree import TokenTree

PAST, BEFORE = 8, 3  # one row's prompt is longer than the threshold by so much, the other's is shorter
WRITTEN = 8  # tokens written on; a tree may look a few further
ALWAYS = 600  # tokens that any model reads in a while
PATIENCE_S = 20.0
MOST_SCORES = 2**28  # numbers that eager attention holds at once
_TREE = [[0], [1], [0, 0], [1, 0]]  # the nodes of rank 0 are what is written on, the others lead astray


@dataclass(frozen=True)
class Crossing:
    """A length at which the model may change its ways, and what the config calls it."""

    name: str
    length: int


def crossings(target: Target) -> tuple[list[Crossing], list[Crossing]]:
    """Those that can be crossed in a bound of time, and those that can't; beyond the model's context is none."""
    limit = target.context_limit
    named = [Crossing(name, length) for name, length in thresholds(target.config).items()]
    within = [each for each in named if limit is None or each.length + PAST + 2 * WRITTEN <= limit]
    short = [each for each in within if each.length <= ALWAYS]
    rest = [each for each in within if each.length > ALWAYS]
    left, pace = PATIENCE_S, _seconds_a_token(target) if rest else 0.0
    for each in rest:
        seconds = 4 * each.length * pace  # two rows, by us and by the library
        if seconds <= left and _fits(target, each.length):
            left -= seconds
            short.append(each)
    return short, [each for each in rest if each not in short]


@torch.inference_mode()
def cross(target: Target, crossing: Crossing, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Of each row our logits [L, V] and the library's, from its prompt's last token on."""
    rng = torch.Generator().manual_seed(seed)
    lengths = crossing.length + PAST, max(1, crossing.length - BEFORE)
    texts = [torch.randint(target.real_vocab, (length + 4 * WRITTEN,), generator=rng).tolist() for length in lengths]
    ours = _written(target, texts, lengths)
    return [
        (row_LV[:WRITTEN], _by_library(target, text, length))
        for row_LV, text, length in zip(ours, texts, lengths, strict=True)
    ]


def _written(target: Target, texts: Sequence[list[int]], prompts: Sequence[int]) -> list[Tensor]:
    """Logits of each row [L, V] as its known text is written on, WRITTEN tokens at least."""
    cache = target.new_cache(len(texts), max(map(len, texts)))
    given = [text[:length] for text, length in zip(texts, prompts, strict=True)]
    seen = target.prefill(given, cache)
    found = [[logits_1V.clone()] for logits_1V in seen.logits_BNV]
    tree = TokenTree.from_paths(_TREE)
    while min(sum(map(len, each)) for each in found) < WRITTEN:
        held = cache.lengths[: len(texts)]
        draft = _draft(target, tree, texts, held)
        draft = target.ready(draft, [text[: length + 1] for text, length in zip(texts, held, strict=True)], cache)
        logits_BNV = target.verify(draft, cache).logits_BNV
        paths = list(_kept(draft.tree, len(texts)))
        for row, path in enumerate(paths):
            found[row].append(logits_BNV[row, path].clone())
        _keep(cache, paths, target.device)
    return [torch.cat(each) for each in found]


def _draft(target: Target, tree: TokenTree, texts: Sequence[list[int]], held: Sequence[int]) -> Draft:
    """What follows in each text at rank 0, something else beside it."""
    depths = tree.depths_XN[0].tolist()
    astray = [any(path) for path in [(0,), *tree.paths()]]
    tokens_BN = torch.tensor(
        [
            [(text[length + depth] + wrong) % target.real_vocab for depth, wrong in zip(depths, astray, strict=True)]
            for text, length in zip(texts, held, strict=True)
        ],
        device=target.device,
    )
    return Draft(tokens_BN, tree)


def _kept(tree: TokenTree, num_rows: int) -> Iterator[list[int]]:
    """The nodes of rank 0 from the root down, as far as each row's are real."""
    for row in range(num_rows):
        mine = min(row, len(tree.parents_XN) - 1)
        real = {path: node for node, path in _named(tree, mine)}
        yield [0, *(real[path] for path in ((0,), (0, 0)) if path in real)]


def _named(tree: TokenTree, row: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Real nodes but the root, with their rank paths."""
    nodes = [node for node in range(1, tree.num_nodes) if tree.real_XN[row, node]]
    yield from zip(nodes, tree.paths(row), strict=True)


def _keep(cache: TreeCache, paths: Sequence[list[int]], device: torch.device) -> None:
    """Commit these paths."""
    deepest = max(map(len, paths))
    path_BD = torch.tensor([path + [-1] * (deepest - len(path)) for path in paths], device=device)
    kept = [len(path) for path in paths]
    kept_B = torch.tensor(kept, device=device)
    cache.keep(Verdict(path_BD, kept_B, torch.zeros_like(kept_B), path_BD.tolist(), kept))


class _Given(LogitsProcessor):
    """Lets nothing be written but a known text."""

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores that leave one token."""
        only = torch.full_like(scores, -torch.inf)
        only[:, self._text[input_ids.shape[1]]] = 0
        return only


def _by_library(target: Target, text: Sequence[int], prompt: int) -> Tensor:
    """The library's raw logits [L, V] as it writes this text on."""
    ids = torch.tensor([text[:prompt]], device=target.device)
    config = GenerationConfig(
        do_sample=False, max_new_tokens=WRITTEN, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    with _generating_by(target.model, config):
        out = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), logits_processor=LogitsProcessorList([_Given(text)])
        )
    return torch.cat(out.logits)


@contextmanager
def _generating_by(model: Any, config: GenerationConfig) -> Iterator[None]:
    """`generate` takes what a call leaves open from the model's own config, stops among it: another for the while."""
    before, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = before


def _seconds_a_token(target: Target, num_tokens: int = 64) -> float:
    """What a token of a prompt costs here, roughly; the first forward warms up."""
    prompt = [index % target.real_vocab for index in range(num_tokens)]
    for _ in range(2):
        begun = now(target.device)
        target.prefill([prompt], target.new_cache(1, num_tokens))
    return (now(target.device) - begun) / num_tokens


def _fits(target: Target, length: int) -> bool:
    """Whether scores of all tokens with all fit into memory, where attention holds them."""
    heads = getattr(target.config, "num_attention_heads", 1) if target.identity.attention == "eager" else 1
    return heads * (length + PAST) ** 2 <= MOST_SCORES

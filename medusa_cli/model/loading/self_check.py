"""The self-check: a forward over a tree must score each path as the library scores that path alone.

The yardstick is the stock forward of the same model object on plain ids: the library's own mask, its own positions,
no cache. Whatever our masks, positions or cache get wrong for an architecture shows as a difference. Then rows are
written on across each length that the config names (model/loading/length_check.py).
Shape letters: B rows, N tree nodes, V vocabulary, L tokens of the longest path under one prompt.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from medusa_cli.contracts import Draft
from medusa_cli.errors import TargetError
from medusa_cli.model.costs.kept import key_of
from medusa_cli.model.loading.length_check import Crossing, cross, crossings
from medusa_cli.model.target import Target
from medusa_cli.model.thresholds import thresholds
from medusa_cli.trees.tree import TokenTree
from medusa_cli.util import remembered

# Siblings stand beside each other, so that a node that sees a sibling, or counts columns as positions, is found out.
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0))
SHORT, LONG = 24, 600  # tokens of the longest prompt: without a window, and at most with one
PAST = 8  # tokens by which the prompt goes past the window
RAGGED = 5  # the second row is shorter by this, so that rows of different lengths share a forward

BOUNDS = {"float32": 2e-4, "float16": 5e-2, "bfloat16": 0.4, "int8": 0.4}
"""The largest difference that rounding explains, in units of the spread of a node's logits.

SmolLM2-135M on random text, the worst case: 6e-6, 0.015 and 0.18; positions off by one cost it 0.7 and more.
"""
TEXTS = 3  # what a wrong mask costs, it costs on every text; rounding that tips an expert or two does not


@dataclass(frozen=True)
class CheckResult:
    """What the self-check found.

    max_difference  of the worst node: the difference to the stock logits (root mean square over the vocabulary)
                    divided by the spread (standard deviation) of the stock logits; nan when either is not finite
    bound           the largest difference that rounding explains in this dtype
    ok              max_difference is a number and within the bound
    num_tokens      tokens of the longest path that was compared
    past_window     the longest path reached past the sliding window, or there is none
    worst           the length at which it differs, as the config calls it; None: from the start
    uncrossed       lengths that the config names and that would take too long to reach here
    """

    max_difference: float
    bound: float
    ok: bool
    num_tokens: int
    past_window: bool
    worst: str | None = None
    uncrossed: Sequence[str] = ()


def checked(target: Target) -> CheckResult:
    """The self-check, run once for these weights, versions and settings and remembered on disk when it passes.

    Raises TargetError, naming the model and the difference, when it fails.
    """
    key = {**key_of(target), "transformers": transformers.__version__, "lengths": str(thresholds(target.config))}
    known = remembered.recall("checks", key, _read)
    if known is not None:
        return known.value
    result = self_check(target)
    require(target, result)
    remembered.remember("checks", key, asdict(result))
    return result


def require(target: Target, result: CheckResult) -> None:
    """Raise TargetError when the self-check failed."""
    if result.ok:
        return
    dtype = target.dtype_name
    if not math.isfinite(result.max_difference):
        raise TargetError(
            f"{target.name} can't be used: its logits are not finite in {dtype}",
            ("" if target.dtype == torch.float32 else "try --dtype float32; if that is no help, ")
            + "the weights are damaged: copy or download them again",
        )
    if result.worst is not None:
        raise TargetError(
            f"{target.name} ({target.config.model_type}) can't be used: past {result.worst} of its config its logits "
            f"differ from its own by {result.max_difference:.2g} of their spread, and rounding in {dtype} explains "
            f"{result.bound:g}",
            "no text longer than that would be the model's own: use another model, or transformers itself",
        )
    raise TargetError(
        f"{target.name} ({target.config.model_type}) can't verify a tree: its logits over a tree differ from its own "
        f"by {result.max_difference:.2g} of their spread, and rounding in {dtype} explains {result.bound:g}",
        _hint_of_own_window(target, result)
        or "try --dtype float32, or --attention eager --runner eager; else this architecture is not supported",
    )


def _hint_of_own_window(target: Target, result: CheckResult) -> str | None:
    """Where the check crossed a length that the config names, the likely reason: a window that no mask of ours reaches.

    Such a window counts columns of the cache, and a tree's nodes take more of these than the text has tokens.
    """
    crossed = [f"{name} ({n} tokens)" for name, n in thresholds(target.config).items() if n < result.num_tokens]
    if not crossed:
        return None
    return (
        f"its config names {', '.join(crossed)}: if that is a window of its own code, no tree can be verified with it; "
        "use another model, or transformers itself"
    )


def self_check(target: Target) -> CheckResult:
    """Score a small tree of random tokens under two prompts with one forward, and each of its paths by itself.

    Raises TargetError when the model can't run one of the two at all.
    """
    tree = _tree(target)
    length, window = _prompt_length(target, tree), _window(target)
    bound = BOUNDS.get(target.dtype_name, BOUNDS["float32"])
    name: str | None = None
    uncrossed: list[str] = []
    worst = _smallest(target, bound, partial(_largest_difference, target, tree, length))
    if worst <= bound:
        crossed, left = crossings(target)
        uncrossed = [f"{each.name} ({each.length} tokens)" for each in left]
        for each in crossed:
            difference = _smallest(target, bound, partial(_crossing_difference, target, each))
            if not difference <= worst:  # what is not finite is neither
                worst, name = difference, f"{each.name} ({each.length} tokens)"
    ok = worst <= bound
    tokens = length + tree.max_depth + 1
    return CheckResult(worst, bound, ok, tokens, length > window, None if ok else name, uncrossed)


def _smallest(target: Target, bound: float, difference_of: Callable[[int], float]) -> float:
    """The smallest difference over a few texts, nan when one is not finite. Raises TargetError when a forward fails."""
    smallest = math.inf
    for seed in range(TEXTS):
        try:
            difference = difference_of(seed)
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError) as error:
            text = " ".join(str(error).split())[:200] or type(error).__name__
            raise TargetError(
                f"{target.name} ({target.config.model_type}) can't verify a tree: its forward fails with {text}",
                "try --attention eager --runner eager; if that is no help, this architecture is not supported",
            ) from error
        if not math.isfinite(difference):
            return math.nan
        smallest = min(smallest, difference)
        if smallest <= bound:
            break
    return smallest


def _crossing_difference(target: Target, crossing: Crossing, seed: int) -> float:
    """The worst place's difference where two rows are written on, one past a threshold and one across it."""
    return float(torch.stack([_difference(ours, theirs) for ours, theirs in cross(target, crossing, seed)]).max())


def _largest_difference(target: Target, tree: TokenTree, length: int, seed: int) -> float:
    """The worst node's difference on one random text; nan when anything is not finite."""
    rng = torch.Generator().manual_seed(seed)
    prompts = [_random_ids(target, rng, count) for count in (length, max(1, length - RAGGED))]
    nodes = [_random_ids(target, rng, tree.num_nodes) for _ in prompts]
    return _compare(target, tree, prompts, nodes)


@torch.inference_mode()
def _compare(target: Target, tree: TokenTree, prompts: list[list[int]], nodes: list[list[int]]) -> float:
    """Both ways to score every path under every prompt, and the largest difference between them."""
    cache = target.new_cache(len(prompts), max(map(len, prompts)) + tree.num_nodes)
    first_B1V = target.prefill(prompts, cache).logits_BNV
    logits_BNV = target.verify(Draft(torch.tensor(nodes, device=target.device), tree), cache).logits_BNV
    differences = []
    for row, prompt in enumerate(prompts):
        for path in _whole_paths(tree):
            stock_LV = _stock(target, prompt + [nodes[row][node] for node in path], 1 + len(path))
            differences.append(_difference(torch.cat([first_B1V[row], logits_BNV[row, path]]), stock_LV))
    return float(torch.stack(differences).max())  # max carries nan on


def _tree(target: Target) -> TokenTree:
    """PATHS, as deep as the model's context leaves room for beside a prompt of one token and the root."""
    if target.context_limit is not None and target.context_limit < 2:
        raise TargetError(
            f"{target.name} has a context of {target.context_limit} token: there is no room to write",
            "correct config.json",
        )
    room = len(PATHS[-1]) if target.context_limit is None else target.context_limit - 2
    return TokenTree.from_paths(path for path in PATHS if len(path) <= room)


def _prompt_length(target: Target, tree: TokenTree) -> int:
    """Long enough to leave the sliding window behind, short enough for the model's context and for a minute."""
    length = min(max(SHORT, _window(target) + PAST), LONG)
    # the yardstick is one forward, whose rotary table is that of the longest path
    most = [most for most in (target.context_limit, target.tables.change) if most is not None]
    return max(1, min([length, *(each - tree.max_depth - 1 for each in most)]))


def _window(target: Target) -> int:
    """The sliding window in tokens, 0 without one."""
    return max((window or 0 for window in target.kinds.values()), default=0)


def _random_ids(target: Target, rng: torch.Generator, count: int) -> list[int]:
    return torch.randint(target.real_vocab, (count,), generator=rng).tolist()


def _whole_paths(tree: TokenTree) -> Iterator[list[int]]:
    """For each leaf its nodes from the root down."""
    ancestors_NN = tree.ancestors_XNN[0]
    for leaf in (ancestors_NN.sum(0) == 1).nonzero().flatten().tolist():
        yield ancestors_NN[leaf].nonzero().flatten().tolist()


def _stock(target: Target, ids: list[int], wanted: int) -> Tensor:
    """The logits [wanted, V] of the last tokens as the library computes them: nothing of ours but the weights."""
    ids_1L = torch.tensor([ids], device=target.device)
    # a few positions only: a vocabulary of 262144 times 600 tokens is half a gigabyte
    return target.model(input_ids=ids_1L, use_cache=False, logits_to_keep=wanted).logits[0, -wanted:]


def _difference(found_LV: Tensor, stock_LV: Tensor) -> Tensor:
    """The worst position's difference in units of the spread of its stock logits."""
    found_LV, stock_LV = found_LV.float(), stock_LV.float()
    difference_L = (found_LV - stock_LV).square().mean(-1).sqrt() / stock_LV.std(-1).clamp(min=1e-9)
    return difference_L.max()


def _read(value: Any) -> CheckResult:
    """A result that was remembered. Raises ValueError and its like for something else."""
    result = CheckResult(**value)
    numbers = (result.max_difference, result.bound, result.num_tokens)
    if not (result.ok is True and isinstance(result.past_window, bool) and all(map(math.isfinite, numbers))):
        raise ValueError("no check that passed")
    return result

"""Per-row, per-step trees from the heads' own confidence, without a host read unless unlikely nodes are left out.

Shape letters: B rows, K heads, R ranks, N tree nodes with the root, C candidate paths with the root.
Knows no model.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from medusa_cli.errors import TreeError
from medusa_cli.trees.tree import Path, TokenTree

MAX_SIZE = 256


@dataclass(frozen=True)
class DynamicShape:
    """What a dynamic tree may be: at most `size` nodes under the root, each of at least `floor` probability.

    A node is worth its cost when its probability exceeds what one more node costs in plain steps, divided by the
    tokens a plain step's time brings: so floor is a price, and 0 asks for none.
    """

    size: int
    floor: float = 0.0

    @property
    def spec(self) -> str:
        """As it is written on the command line and in files."""
        return f"dynamic:{self.size}:{self.floor:g}"

    @classmethod
    def parse(cls, spec: str) -> "DynamicShape | None":
        """`dynamic:16` or `dynamic:16:0.05`; None for a SPEC of another kind. Raises TreeError when it is a bad one."""
        kind, *numbers = spec.strip().split(":")
        if kind != "dynamic":
            return None
        form = "write dynamic:SIZE or dynamic:SIZE:FLOOR, such as dynamic:16:0.05"
        try:
            shape = cls(int(numbers[0]), *map(float, numbers[1:]))
        except (ValueError, TypeError, IndexError):
            raise TreeError(f"'{spec}' is no dynamic tree", form) from None
        if not (1 <= shape.size <= MAX_SIZE and 0 <= shape.floor < 1):
            raise TreeError(f"'{spec}': the size goes from 1 to {MAX_SIZE}, the floor from 0 to below 1", form)
        return shape


def dynamic_tree(logp_BKR: Tensor, size: int, floor: float = 0.0) -> TokenTree:
    """For each row the tree of the `size` likeliest paths, as one TokenTree with X = B and N = size + 1.

    floor     paths of a smaller probability are left out, and N is what the widest row needs: one host read
    logp_BKR  log-probabilities of each head's R best tokens, falling along R, at most 0; -inf for a token that must
              not be drafted
    The nodes are those that best-first search on the product of probabilities takes (the construction of EAGLE-2,
    arXiv 2406.16858, for heads that don't see each other). Nodes stand in order of falling probability, so parents
    come first. Where a row has fewer than `size` possible paths, the rest are padding nodes under the root.
    """
    table = _candidates(logp_BKR.shape[1], logp_BKR.shape[2], size, logp_BKR.device)
    # Candidates stand in an order in which a path follows all paths that are at least as likely, whatever the numbers.
    # A stable sort therefore keeps the root first and never takes a child of certain probability without its parent.
    score_BC, order_BC = _scores(logp_BKR, table).sort(dim=1, descending=True, stable=True)
    place_BC = torch.empty_like(order_BC).scatter_(1, order_BC, table.index_C.expand_as(order_BC))
    taken_BN = order_BC[:, : size + 1]
    real_BN = score_BC[:, : size + 1] > -torch.inf
    if floor > 0:
        likely_BN = score_BC[:, : size + 1] >= math.log(floor)
        # Scores fall along a row: what is left of the widest row holds every row's likely nodes.
        width = int(likely_BN.sum(1).max())
        taken_BN, real_BN = taken_BN[:, :width], likely_BN[:, :width]
        size = width - 1
    parents_BN = place_BC.gather(1, table.parents_C[taken_BN]) * real_BN
    ranks_BN = table.ranks_C[taken_BN] * real_BN
    if missing := size + 1 - taken_BN.shape[1]:
        parents_BN, ranks_BN, real_BN = (pad(each_BN, (0, missing)) for each_BN in (parents_BN, ranks_BN, real_BN))
    return TokenTree(parents_BN, ranks_BN, real_BN)


@dataclass(frozen=True)
class _Candidates:
    """Every path that can be among the `size` likeliest of any row; the root is candidate 0."""

    index_C: Tensor
    parents_C: Tensor
    ranks_C: Tensor
    cells_KC: Tensor


@lru_cache(maxsize=16)
def _candidates(num_heads: int, num_ranks: int, size: int, device: torch.device) -> _Candidates:
    """The table for these shapes; cells_KC points into a row's K * R log-probabilities, with a 0 behind them."""
    paths = sorted(_possible(num_heads, num_ranks, size), key=lambda path: (len(path), path))
    index = {path: n for n, path in enumerate(paths)}
    nothing = num_heads * num_ranks
    cells = [
        [head * num_ranks + path[head] if head < len(path) else nothing for path in paths] for head in range(num_heads)
    ]
    return _Candidates(
        index_C=torch.arange(len(paths), device=device),
        parents_C=torch.tensor([index[path[:-1]] for path in paths], device=device),
        ranks_C=torch.tensor([path[-1] if path else 0 for path in paths], device=device),
        cells_KC=torch.tensor(cells, device=device).reshape(num_heads, len(paths)),
    )


def _possible(num_heads: int, num_ranks: int, size: int) -> list[Path]:
    """Paths with at most `size` paths (themselves included) that are no longer and no worse at any place."""
    found: list[Path] = [()]
    layer: list[tuple[Path, int, int]] = [((), 1, 0)]
    for _ in range(num_heads):
        deeper = []
        for path, as_long, better in layer:
            for rank in range(num_ranks):
                width = as_long * (rank + 1)
                if better + width > size:
                    break
                deeper.append(((*path, rank), width, better + width))
        found += [path for path, _, _ in deeper]
        layer = deeper
    return found


def _scores(logp_BKR: Tensor, table: _Candidates) -> Tensor:
    """Log-probability of each candidate, summed in one order for all, so that rounding lifts none over its parent."""
    cells_BX = pad(logp_BKR.flatten(1).float(), (0, 1))
    terms_BKC = cells_BX.index_select(1, table.cells_KC.flatten()).view(-1, *table.cells_KC.shape)
    score_BC, *others = terms_BKC.unbind(1)
    for term_BC in others:
        score_BC = score_BC + term_BC
    return score_BC

"""Drafters that know or dodge the answer, the trees they fill, and how to tell chance from a fault.

Shape letters: B rows, N tree nodes, K depths, R ranks, V vocabulary, M draws.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from medusa_cli.contracts import Context, Draft
from medusa_cli.drafters.memory import NoMemory
from medusa_cli.trees.dynamic import dynamic_tree
from medusa_cli.trees.tree import TokenTree
from tests.tiny_models import VOCAB

# --- shapes: how a drafter comes by its tree, given the number of rows and a source of randomness ---

MakeTree = Callable[[int, torch.Generator], TokenTree]
DEPTH = 4
WIDE_PATHS = [
    *[[rank] for rank in range(4)],
    *[[0, rank] for rank in range(3)],
    *[[1, 0], [1, 1], [2, 0]],
    *[[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0], [1, 1, 0]],
    *[[0, 0, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0], [1, 0, 0, 1]],
]


def chain(num_rows: int, rng: torch.Generator) -> TokenTree:
    return TokenTree.chain(DEPTH)


def wide(num_rows: int, rng: torch.Generator) -> TokenTree:
    return TokenTree.from_paths(WIDE_PATHS)


def empty(num_rows: int, rng: torch.Generator) -> TokenTree:
    return TokenTree.empty()


def dynamic(num_rows: int, rng: torch.Generator) -> TokenTree:
    """Another tree for every row and step; the best path is likely in it, the rest is not."""
    logits_BKR = 2 * torch.randn(num_rows, DEPTH, 3, generator=rng)
    return dynamic_tree(logits_BKR.log_softmax(-1).sort(dim=-1, descending=True).values, size=9)


def padded(num_rows: int, rng: torch.Generator) -> TokenTree:
    """The wide tree and, under each of its first nodes, one padding node that repeats the best guess there."""
    tree = TokenTree.from_paths(WIDE_PATHS)
    more = torch.arange(5)[None]
    nothing = torch.zeros_like(more)
    return TokenTree(
        torch.cat([tree.parents_XN, more], dim=1),
        torch.cat([tree.ranks_XN, nothing], dim=1),
        torch.cat([tree.real_XN, nothing.bool()], dim=1),
    )


SHAPES: dict[str, MakeTree] = {"chain": chain, "wide": wide, "dynamic": dynamic, "padded": padded, "empty": empty}


# --- drafters ---


def following(texts: Sequence[Sequence[int]], tokens: Sequence[int], places: int) -> list[int]:
    """The last of the tokens and those known to follow it; zeros where the text is not known."""
    for text in texts:
        if list(text[: len(tokens)]) == list(tokens):
            return [*text[len(tokens) - 1 :], *[0] * places][:places]
    return [tokens[-1], *[0] * (places - 1)]


class KnowingDrafter(NoMemory):
    """Knows each row's text and puts a guess at a chosen distance from the truth at every node.

    The node of depth d and rank r holds truth[d] + r + shift[b, d], modulo V: rank 0 is right where the shift is 0,
    siblings are distinct, and padding nodes are as tempting as real ones.
    """

    name, size = "knowing", 40
    vocab_size = VOCAB

    def __init__(self, texts: Sequence[Sequence[int]], shape: MakeTree, seed: int = 0) -> None:
        self.texts = [list(text) for text in texts]
        self.shape = shape
        self.rng = torch.Generator().manual_seed(seed)

    def shift(self, num_rows: int, num_depths: int) -> Tensor:
        """How far rank 0 is from the truth [B, K]."""
        raise NotImplementedError

    def propose(self, context: Context) -> Draft:
        num_rows = len(context.tokens)
        tree = self.shape(num_rows, self.rng)
        depths_BN = tree.depths_XN.expand(num_rows, -1)
        places = tree.max_depth + 1
        truth_BD = torch.tensor([following(self.texts, tokens, places) for tokens in context.tokens])
        shift_BD = torch.cat([torch.zeros(num_rows, 1, dtype=torch.long), self.shift(num_rows, places - 1)], dim=1)
        tokens_BN = ((truth_BD + shift_BD).gather(1, depths_BN) + tree.ranks_XN) % self.vocab_size
        assert tokens_BN[:, 0].tolist() == context.root_B.tolist(), "the root is each row's last token"
        return Draft(tokens_BN, tree)


class OracleDrafter(KnowingDrafter):
    """Every rank 0 is right."""

    def shift(self, num_rows: int, num_depths: int) -> Tensor:
        return torch.zeros(num_rows, num_depths, dtype=torch.long)


class WrongDrafter(KnowingDrafter):
    """No node is right."""

    def shift(self, num_rows: int, num_depths: int) -> Tensor:
        return torch.ones(num_rows, num_depths, dtype=torch.long)


class RandomDrafter(KnowingDrafter):
    """The right rank at each place is 0, 1 or 2 by chance: paths of every length and form are kept."""

    def shift(self, num_rows: int, num_depths: int) -> Tensor:
        chance = torch.rand(num_rows, num_depths, generator=self.rng)
        return -(torch.bucketize(chance, torch.tensor([0.5, 0.8])))


class PerPositionDrafter(KnowingDrafter):
    """Right down to a given depth and wrong below; the depths are taken in turn, one a step."""

    def __init__(self, texts: Sequence[Sequence[int]], shape: MakeTree, right: Sequence[int], seed: int = 0) -> None:
        super().__init__(texts, shape, seed)
        self.right = list(right)
        self.num_steps = 0

    def shift(self, num_rows: int, num_depths: int) -> Tensor:
        right = self.right[self.num_steps % len(self.right)]
        self.num_steps += 1
        return (torch.arange(num_depths) >= right).long().expand(num_rows, -1)


def per_position(texts: Sequence[Sequence[int]], shape: MakeTree) -> PerPositionDrafter:
    """Keeps 0, 1, 2, ... guesses in turn."""
    return PerPositionDrafter(texts, shape, right=range(DEPTH + 1))


DRAFTERS: dict[str, Callable[[Sequence[Sequence[int]], MakeTree], KnowingDrafter]] = {
    "oracle": OracleDrafter,
    "wrong": WrongDrafter,
    "random": RandomDrafter,
    "per_position": per_position,
}


# --- chance ---


def chance_of_worse(drawn_M: Tensor, p_V: Tensor) -> float:
    """The chance that draws from p differ from it more than these do (Pearson's chi-square)."""
    counts_V = torch.bincount(drawn_M, minlength=len(p_V)).double()
    possible_V = p_V > 0
    assert counts_V[~possible_V].sum() == 0, "a token that has no chance was drawn"
    expected_V = p_V[possible_V].double() * len(drawn_M)
    statistic = ((counts_V[possible_V] - expected_V) ** 2 / expected_V).sum()
    freedom = torch.tensor((int(possible_V.sum()) - 1) / 2, dtype=torch.double)
    return float(torch.special.gammaincc(freedom, statistic / 2)) if freedom > 0 else 1.0


def follows(drawn_M: Tensor, p_V: Tensor) -> bool:
    """Whether draws may well come from p: a chi-square test at the 0.1 % level."""
    return chance_of_worse(drawn_M, p_V) > 1e-3

"""The drafters that guess on the host or by pace, made small enough for the laws.

Random heads are hardly ever right. A source that knows the texts stands beside them, so that steps keep several tokens.
"""

from collections.abc import Callable, Sequence
from itertools import count

from medusa_cli.contracts import Context, Drafter
from medusa_cli.drafters.adaptive import WatchedDrafter
from medusa_cli.drafters.block import BlockDrafter
from medusa_cli.drafters.hydra import HydraDrafter
from medusa_cli.drafters.medusa import MedusaDrafter
from medusa_cli.drafters.memory import NoMemory
from medusa_cli.drafters.mixed import Budget, GatheredDrafter
from medusa_cli.drafters.purse import Purse
from medusa_cli.drafters.step_costs import Pace
from medusa_cli.drafters.suffix import Suffixes
from medusa_cli.drafters.trie import ROOT, Trie
from medusa_cli.model.target import Target
from medusa_cli.trees.dynamic import DynamicShape
from tests.block_heads import HelpedDrafter, block_heads, chain
from tests.drafters.test_dynamic_drafter import random_heads
from tests.drafters.test_hydra import hydra_heads
from tests.fakes import SHAPES, WIDE_PATHS, RandomDrafter, following
from tests.tiny_models import VOCAB

DEPTH = 3
Texts = Sequence[Sequence[int]]


class KnownGuesses(NoMemory):
    """A source that knows `depth` tokens of each row's text, and lays a likelier wrong guess beside each of them.

    `right` says how many of them it tells truly, a step after the other.
    """

    def __init__(self, texts: Texts, depth: int = DEPTH, right: Sequence[int] = (DEPTH,)) -> None:
        self.texts = texts
        self.depth = depth
        self.right = right
        self.num_steps = 0

    def add_guesses(self, context: Context, tries: Sequence[Trie], floor: float) -> None:
        right = self.right[self.num_steps % len(self.right)]
        self.num_steps += 1
        for tokens, trie in zip(context.tokens, tries, strict=True):
            node = ROOT
            for place, token in enumerate(following(self.texts, tokens, self.depth + 1)[1:]):
                trie.add_guess(node, (token + 1) % VOCAB, 0.95 ** (place + 1))
                node = trie.add_guess(node, (token + 2 * (place >= right)) % VOCAB, 0.9 ** (place + 1))


class OpenPurse(Purse):
    """Pays for whatever is guessed, and has every third step plain: short texts are to meet steps of both kinds."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(pace)
        self._turn = count()

    def must_look(self, rows: int) -> bool:
        return next(self._turn) % 3 == 2

    def allows(self, asking: float, rows: int, nodes: int, *, trial: bool) -> bool:
        return True


def perfect(target: Target, texts: Texts) -> Drafter:
    """Every step keeps DEPTH guesses."""
    return GatheredDrafter([KnownGuesses(texts)], Budget(2 * DEPTH))


def ngram(target: Target, texts: Texts) -> Drafter:
    return GatheredDrafter([Suffixes()], Budget(8), "ngram")


def mixed(target: Target, texts: Texts) -> Drafter:
    """Heads and n-grams under a budget that goes by a pace, and a source that is right now and then."""
    known = KnownGuesses(texts, right=(3, 1, 0, 2))
    budget = Budget(9, pace := Pace({1: 1.0, 4: 1.2, 16: 1.9}))
    budget.purse = OpenPurse(pace)
    return GatheredDrafter(
        [MedusaDrafter(random_heads(target), DynamicShape(6)), Suffixes(), known], budget, clock=_clock()
    )


def hydra_mixed(target: Target, texts: Texts) -> Drafter:
    known = KnownGuesses(texts, right=(2, 3, 1))
    return GatheredDrafter(
        [HydraDrafter(hydra_heads(output=target.output_weight), DynamicShape(6)), Suffixes(), known], Budget(16)
    )


def block(target: Target, texts: Texts) -> Drafter:
    """Heads with a memory, and tokens that are known beside them."""
    return GatheredDrafter([HelpedDrafter(block_heads(target), 6, texts)], Budget(9), "block")


def block_chain(target: Target, texts: Texts) -> Drafter:
    """The heads alone, in a fixed tree."""
    heads = block_heads(target)
    return BlockDrafter(heads, chain(heads))


def watched(target: Target, texts: Texts) -> Drafter:
    """Steps with guesses and without, by turns."""
    random = RandomDrafter(texts, SHAPES["wide"])
    random.name, random.size = "random", len(WIDE_PATHS)
    drafter = WatchedDrafter(random, clock=_clock())
    drafter.purse = OpenPurse(drafter.purse.pace)
    return drafter


def _clock() -> Callable[[], float]:
    """Every step takes a second."""
    return count().__next__


REAL: dict[str, Callable[[Target, Texts], Drafter]] = {
    "perfect": perfect,
    "ngram": ngram,
    "mixed": mixed,
    "hydra_mixed": hydra_mixed,
    "block": block,
    "block_chain": block_chain,
    "watched": watched,
}

"""A source that isn't worth its time rests; one that is, is asked at every step."""

from collections.abc import Sequence

import pytest
import torch

from medusa_cli.contracts import Context
from medusa_cli.drafters.memory import NoMemory
from medusa_cli.drafters.mixed import Budget, GatheredDrafter
from medusa_cli.drafters.purse import Purse
from medusa_cli.drafters.step_costs import Lap, Pace
from medusa_cli.drafters.trie import Trie
from medusa_cli.drafters.worth import REST_MOST, Sources, Worth


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Counting(NoMemory):
    """Guesses that each next token is one more, `right` of them truly, in so many seconds."""

    def __init__(self, clock: Clock, seconds: float, right: int) -> None:
        self.clock, self.seconds, self.right = clock, seconds, right
        self.num_asked = 0

    def add_guesses(self, context: Context, tries: Sequence[Trie], floor: float) -> None:
        self.num_asked += 1
        self.clock.now += self.seconds
        for tokens, trie in zip(context.tokens, tries, strict=True):
            path = [tokens[-1] + place + 1 + 1000 * (place >= self.right) for place in range(3)]
            trie.add_path(path, [0.9, 0.8, 0.7])


def run(sources: Sequence[Counting], clock: Clock, steps: int, step_s: float = 0.025) -> float:
    """Texts that count upwards, as far as guesses are right; tokens a second."""
    asking, tokens, purse = Sources(sources, clock), [0], Purse(Pace({1: step_s}))
    for _ in range(2):
        purse.saw(1, 1, Lap(step_s, 1.0), guesses=False, trial=False)
    for _ in range(steps):
        begun, trie = clock.now, Trie(tokens[-1])
        asking.ask(Context([tokens], torch.tensor([tokens[-1]]), torch.zeros(1, 4)), [trie], 0.0, purse)
        clock.now += step_s
        kept, node = 0, trie.child(0, tokens[-1] + 1)
        while node is not None:
            kept += 1
            node = trie.child(node, tokens[-1] + kept + 1)
        tokens = [*tokens, *range(tokens[-1] + 1, tokens[-1] + kept + 2)]
        lap = Lap(clock.now - begun, kept + 1.0, asked=asking.seconds)
        purse.saw(4 if asking.seconds else 1, 1, lap, guesses=False, trial=asking.on_trial)
    return tokens[-1] / clock.now


@pytest.mark.parametrize(("seconds", "right", "is_worth_it"), [(0.002, 2, True), (0.2, 2, False), (0.002, 0, False)])
def test_a_source_is_asked_as_long_as_it_brings_more_than_it_costs(
    seconds: float, right: int, is_worth_it: bool
) -> None:
    clock = Clock()
    source = Counting(clock, seconds, right)
    rate = run([source], clock, 600)
    if is_worth_it:
        assert source.num_asked == 600
    else:
        assert source.num_asked < 60
        assert rate > 0.6 / 0.025, "the text goes on nearly at the plain pace"


def test_it_is_tried_again_ever_more_rarely_and_is_back_when_it_pays() -> None:
    clock = Clock()
    source = Counting(clock, 0.2, 0)
    run([source], clock, 2000)
    rested = source.num_asked
    assert 0 < rested < 40
    worth = Worth()
    for _ in range(400):
        if worth.is_due(40.0):
            worth.took(0.2, 0.025)
            worth.brought(0)
    asked = 0
    for _ in range(3 * REST_MOST):
        if worth.is_due(40.0):
            asked += 1
            worth.took(0.001, 0.025)
            worth.brought(3)
    assert asked > REST_MOST // 2


def test_what_another_guessed_before_is_to_the_credit_of_that_one() -> None:
    clock = Clock()
    cheap, dear = Counting(clock, 0.001, 2), Counting(clock, 0.01, 2)
    run([cheap, dear], clock, 300)
    assert cheap.num_asked == 300
    assert dear.num_asked < 60


def test_at_no_known_pace_every_source_is_asked() -> None:
    clock = Clock()
    source = Counting(clock, 9.0, 0)
    asking, tokens = Sources([source], clock), [0]
    for _ in range(50):
        asking.ask(Context([tokens], torch.tensor([0]), torch.zeros(1, 4)), [Trie(0)], 0.0)
    assert source.num_asked == 50


def test_a_slow_function_costs_a_drafter_little() -> None:
    clock = Clock()
    source = Counting(clock, 0.3, 0)
    drafter = GatheredDrafter([source], Budget(4, Pace({1: 0.02, 2: 0.022, 8: 0.03})), clock=clock)
    tokens = [0]
    drafter.join(0, [tokens], None)
    for _ in range(200):
        drafter.propose(Context([tokens], torch.tensor([tokens[-1]]), torch.zeros(1, 4)))
        clock.now += 0.02
        tokens = [*tokens, tokens[-1] + 1]
    assert source.num_asked < 25

"""Guesses are made while they pay, left out while they don't, and tried again later."""

import torch

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.contracts import Context, Draft
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.adaptive import WatchedDrafter
from medusa_cli.drafters.memory import NoMemory
from medusa_cli.drafters.purse import PLAIN_EVERY
from medusa_cli.drafters.worth import REST_MOST
from medusa_cli.trees.tree import TokenTree
from tests.fakes import DRAFTERS, SHAPES, WIDE_PATHS
from tests.tiny_models import NUM_NEW, known, target_of, tiny_model


class Chain(NoMemory):
    """Guesses one token."""

    name, size = "chain", 1

    def propose(self, context: Context) -> Draft:
        return Draft(context.root_B[:, None].repeat(1, 2), TokenTree.chain(1))


class Machine:
    """A clock and a text: a step over one node takes a second, one over two takes `cost`, and brings `tokens`."""

    def __init__(self, cost: float, tokens: int) -> None:
        self.cost, self.tokens = cost, tokens
        self.time, self.text = 0.0, [1]
        self.drafter = WatchedDrafter(Chain(), clock=lambda: self.time)
        self.drafter.join(0, [self.text], None)

    def run(self, steps: int) -> list[bool]:
        """Whether each step guessed."""
        guessed = []
        for _ in range(steps):
            nodes = self.drafter.propose(self._context()).tree.num_nodes
            guessed.append(nodes > 1)
            self.time += self.cost if nodes > 1 else 1.0
            self.text += [1] * (self.tokens if nodes > 1 else 1)
        return guessed

    def _context(self) -> Context:
        return Context([self.text], torch.tensor([1]), torch.zeros(1, 4))


def test_guesses_that_pay_are_made_nearly_always() -> None:
    guessed = Machine(cost=1.5, tokens=2).run(1000)
    assert sum(guessed) >= 0.93 * len(guessed)
    assert not all(guessed), "a plain step now and then says what these cost"


def test_guesses_that_do_not_pay_are_soon_left_out() -> None:
    guessed = Machine(cost=1.5, tokens=1).run(4000)
    assert sum(guessed[:400]) < 120
    assert 0 < sum(guessed[1000:]) < 0.05 * 3000, "rarely tried, but tried"


def test_guesses_come_back_when_they_pay_again() -> None:
    machine = Machine(cost=1.5, tokens=1)
    machine.run(500)
    machine.tokens = 3
    guessed = machine.run(2 * REST_MOST + 1000)
    assert sum(guessed[-500:]) >= 0.9 * 500


def test_a_step_that_was_interrupted_does_not_end_the_guessing() -> None:
    machine = Machine(cost=1.2, tokens=2)
    machine.run(100)
    machine.time += 1000.0
    assert sum(machine.run(PLAIN_EVERY)) >= PLAIN_EVERY - 4


def test_what_other_rows_do_before_is_no_step() -> None:
    machine = Machine(cost=1.2, tokens=2)
    machine.run(50)
    lost = machine.drafter.purse.lost
    machine.time += 1000.0
    machine.drafter.join(1, [machine.text], None)
    machine.run(1)
    assert machine.drafter.purse.lost == max(0.0, lost)


def test_the_text_is_the_plain_one() -> None:
    texts, target = known("llama"), target_of(tiny_model("llama"))
    random = DRAFTERS["random"](texts.texts, SHAPES["wide"])
    random.name, random.size = "random", len(WIDE_PATHS)
    drafter = WatchedDrafter(random, clock=iter(range(10**6)).__next__)
    found = collect(Parts(target, drafter, Greedy()), texts.prompts, Limits(NUM_NEW), 2)
    assert [each.token_ids for each in found] == texts.wanted(3)

"""From "the target chose this token after that node" to the path that survives, against a slow walk."""

import random
from dataclasses import dataclass

import pytest
import torch

from medusa_cli.acceptance.path import path_to, verdict_from
from medusa_cli.contracts import Draft, Verdict
from medusa_cli.trees.tree import TokenTree

VOCAB = 6


@dataclass
class Case:
    """A draft for some rows as lists, and the token the target chose after every node."""

    parents: list[list[int]]
    tokens: list[list[int]]
    real: list[list[bool]]
    chosen: list[list[int]]

    def verdict(self) -> Verdict:
        parents_XN = torch.tensor(self.parents)
        tree = TokenTree(parents_XN, torch.zeros_like(parents_XN), torch.tensor(self.real))
        return verdict_from(Draft(torch.tensor(self.tokens), tree), torch.tensor(self.chosen))

    def walk(self, row: int) -> list[int]:
        """From the root to the real child that holds the token chosen, as long as there is one."""
        of = row % len(self.parents)
        path = [0]
        while True:
            following = [
                node
                for node in range(1, len(self.parents[of]))
                if self.parents[of][node] == path[-1]
                and self.real[of][node]
                and self.tokens[row][node] == self.chosen[row][path[-1]]
            ]
            if not following:
                return path
            path.append(following[0])


def random_case(rng: random.Random, num_rows: int, one_tree: bool) -> Case:
    """Random trees whose siblings hold distinct tokens, some nodes being padding."""
    num_nodes = rng.randrange(1, 14)
    num_trees = 1 if one_tree else num_rows
    parents: list[list[int]] = []
    while len(parents) < num_trees:
        line = [0, *(rng.randrange(node) for node in range(1, num_nodes))]
        if all(line[1:].count(node) <= VOCAB for node in range(num_nodes)):
            parents.append(line)
    tokens = []
    for row in range(num_rows):
        line, mine = parents[row % num_trees], [rng.randrange(VOCAB)]
        for node in range(1, num_nodes):
            taken = {mine[other] for other in range(1, node) if line[other] == line[node]}
            mine.append(rng.choice([token for token in range(VOCAB) if token not in taken]))
        tokens.append(mine)
    real = [[True, *(rng.random() < 0.8 for _ in range(1, num_nodes))] for _ in parents]
    return Case(parents, tokens, real, [[rng.randrange(VOCAB) for _ in range(num_nodes)] for _ in range(num_rows)])


@pytest.mark.parametrize("one_tree", [True, False])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_path_is_the_one_a_walk_from_the_root_finds(num_rows: int, one_tree: bool) -> None:
    rng = random.Random(num_rows)
    lengths = set()
    for _ in range(300):
        case = random_case(rng, num_rows, one_tree)
        verdict = case.verdict()
        for row in range(num_rows):
            path = case.walk(row)
            lengths.add(len(path))
            found = verdict.path_BD[row].tolist()
            assert found[: len(path)] == path
            assert set(found[len(path) :]) <= {-1}
            assert int(verdict.kept_B[row]) == len(path)
            assert int(verdict.next_B[row]) == case.chosen[row][path[-1]]
    assert len(lengths) >= 4


def test_a_shorter_path_is_not_lengthened_by_its_padding() -> None:
    # Medusa#64: a path padded with token 0 "matched" where the target's best token was 0
    tree = TokenTree.from_paths([[0], [1], [0, 0], [0, 0, 0]])
    draft = Draft(torch.tensor([[5, 1, 2, 3, 4]]), tree)
    zero_after_all_but_the_root = torch.tensor([[2, 0, 0, 0, 0]])
    verdict = verdict_from(draft, zero_after_all_but_the_root)
    assert verdict.path_BD.tolist() == [[0, 2, -1, -1]]
    assert verdict.kept_B.tolist() == [2]
    assert verdict.next_B.tolist() == [0]


def test_a_padding_node_is_never_kept_however_right_its_token() -> None:
    tree = TokenTree(torch.tensor([[0, 0, 1]]), torch.zeros(1, 3).long(), torch.tensor([[True, False, True]]))
    verdict = verdict_from(Draft(torch.tensor([[5, 1, 2]]), tree), torch.tensor([[1, 2, 3]]))
    assert verdict.kept_B.tolist() == [1]
    assert verdict.next_B.tolist() == [1]


def test_a_root_alone_is_kept_and_followed_by_what_was_chosen() -> None:
    verdict = verdict_from(Draft(torch.tensor([[5], [6]]), TokenTree.empty()), torch.tensor([[1], [2]]))
    assert verdict.path_BD.tolist() == [[0], [0]]
    assert verdict.next_B.tolist() == [1, 2]


def test_of_two_siblings_with_one_token_the_one_that_goes_deeper_is_kept() -> None:
    tree = TokenTree.from_paths([[0], [1], [1, 0]])
    verdict = verdict_from(Draft(torch.tensor([[5, 1, 1, 2]]), tree), torch.tensor([[1, 2, 2, 3]]))
    assert verdict.path_BD.tolist() == [[0, 2, 3]]


def test_the_path_to_a_node_holds_the_nodes_above_it_from_the_root_down() -> None:
    tree = TokenTree.from_paths([[0], [1], [1, 0], [1, 1], [1, 1, 0]])
    found = path_to(tree, torch.tensor([0, 1, 2, 4, 5]))
    assert found.tolist() == [[0, -1, -1, -1], [0, 1, -1, -1], [0, 2, -1, -1], [0, 2, 4, -1], [0, 2, 4, 5]]

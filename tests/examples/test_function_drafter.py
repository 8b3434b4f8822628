"""A drafter that is any function, as another package brings it: this file and one entry point, no change elsewhere."""

from collections.abc import Callable, Sequence

import pytest
import torch

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.assemble import DrafterChoice, load_drafter
from medusa_cli.cli.app import main
from medusa_cli.contracts import Context
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.function import FunctionGuesses
from medusa_cli.drafters.trie import Trie
from medusa_cli.errors import PartError
from tests.examples.conftest import Install
from tests.tiny_models import NUM_NEW, known, target_of, tiny_model

Function = Callable[[Sequence[int]], Sequence[int]]
"""The tokens so far to those that are expected next."""


def echo(tokens: Sequence[int]) -> Sequence[int]:
    """The last tokens once more."""
    return tokens[-4:]


class HalfDrafter:
    """Knows of no rows."""

    def __init__(self, target: object) -> None: ...

    def propose(self, context: object) -> None: ...


NO_DRAFTER = 3


def oracle(name: str) -> Function:
    """What the model will write."""
    texts = known(name).texts
    return lambda tokens: next(text[len(tokens) :][:4] for text in texts if text[: len(tokens)] == list(tokens))


FUNCTIONS: dict[str, Callable[[str], Function]] = {
    "oracle": oracle,
    "echo": lambda name: echo,
    "nothing": lambda name: lambda tokens: [],
    "wrong": lambda name: lambda tokens: [1, 2, 3],
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
def test_whatever_the_function_guesses_the_text_is_the_greedy_one(
    name: str, function: str, rows: int, monkeypatch: pytest.MonkeyPatch, install: Install
) -> None:
    install("medusa.drafters", "echo", "tests.examples.test_function_drafter:echo")
    target = target_of(tiny_model(name))
    monkeypatch.setattr("tests.examples.test_function_drafter.echo", FUNCTIONS[function](name))
    drafter = load_drafter(DrafterChoice("echo", speculate="on"), target)
    found = collect(Parts(target, drafter, Greedy()), known(name).prompts[:rows], Limits(NUM_NEW), max_rows=rows)
    assert [each.token_ids for each in found] == known(name).wanted(rows)
    if function == "oracle":
        assert max(each.num_steps for each in found) <= NUM_NEW // 4


@pytest.mark.parametrize("token", [-1, 10**9, "a", 1.5])
def test_what_is_no_token_is_told_with_whose_it_is(token: object, install: Install) -> None:
    install("medusa.drafters", "echo", "tests.examples.test_function_drafter:echo")
    source = FunctionGuesses(lambda tokens: [1, token], 97, "echo of another-echo", "raise")
    with pytest.raises(PartError, match=r"echo of another-echo guesses .*, which is no (token|path)"):
        source.paths([1, 2])


def test_a_function_is_believed_as_far_as_it_was_right() -> None:
    source, tokens, chances = FunctionGuesses(lambda tokens: [len(tokens)] * 2, 97, "x"), [5, 6], []
    for _ in range(30):
        trie = Trie(tokens[-1])
        source.add_guesses(Context([tokens], torch.tensor([tokens[-1]]), torch.zeros(1, 4)), [trie], 0.0)
        chances.append(trie.chances[1:])
        tokens = [*tokens, len(tokens), 0]
    assert chances[-1][0] > 0.9 > chances[0][0]
    assert chances[-1][1] < 0.1 < chances[0][1]


def test_the_command_line_knows_the_name(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Hi", "--drafter", "ecko"]) == 2
    assert "echo?" not in capsys.readouterr().err
    install("medusa.drafters", "echo", "tests.examples.test_function_drafter:echo")
    assert main(["generate", "Hi", "--drafter", "ecko"]) == 2
    assert "did you mean echo?" in capsys.readouterr().err
    assert main(["generate", "Hi", "--drafter", "echo", "--heads", "runs/mine"]) == 1
    assert "--drafter echo needs no heads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (
            "tests.examples.test_function_drafter:NO_DRAFTER",
            "is neither a function nor a class with add_guesses or propose",
        ),
        ("tests.examples.test_function_drafter:HalfDrafter", "is no Drafter: it lacks join, keep, move, drop"),
        ("tests.examples.test_function_drafter:GONE", "can't be imported: .*GONE"),
        ("no_such_package_here:echo", "can't be imported: No module named"),
    ],
)
def test_a_part_that_is_none_is_told_with_whose_it_is(value: str, told: str, install: Install) -> None:
    install("medusa.drafters", "echo", value)
    with pytest.raises(PartError, match=f"another-echo brings as medusa.drafters: echo, {told}"):
        load_drafter(DrafterChoice("echo"), target_of(tiny_model("llama")))

"""A drafter that is any function, as another package brings it: this file and one entry point, no change elsewhere."""

from collections.abc import Callable, Iterator, Sequence

import pytest

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.assemble import DrafterChoice, load_drafter
from medusa_cli.cli.app import main
from medusa_cli.contracts import Context
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.trie import Trie
from medusa_cli.errors import MedusaError
from medusa_cli.registry import DrafterKind
from tests.examples.conftest import Install
from tests.tiny_models import NUM_NEW, known, target_of, tiny_model

Function = Callable[[Sequence[int]], Sequence[int]]
"""The tokens so far to those that are expected next."""


class FunctionGuesses:
    """A function as a source of guesses: one path for each row, surer at its beginning."""

    def __init__(self, function: Function, vocab: int) -> None:
        self.function = function
        self.vocab = vocab

    def start(self, context: Context) -> None:
        """A function remembers nothing."""

    def add_guesses(self, context: Context, tries: Sequence[Trie], floor: float) -> None:
        """What the function expects, up to the first that is no token."""
        for tokens, trie in zip(context.tokens, tries, strict=True):
            trie.add_path(list(self._real(self.function(tokens))), (0.9**depth for depth in range(1, 9)))

    def _real(self, guesses: Sequence[int]) -> Iterator[int]:
        for token in guesses:
            if not 0 <= token < self.vocab:
                return
            yield token


def echo(tokens: Sequence[int]) -> Sequence[int]:
    """The last tokens once more."""
    return tokens[-4:]


KIND = DrafterKind(make=lambda target: FunctionGuesses(echo, target.real_vocab))
NO_KIND = 3


def oracle(name: str) -> Function:
    """What the model will write."""
    texts = known(name).texts
    return lambda tokens: next(text[len(tokens) :][:4] for text in texts if text[: len(tokens)] == list(tokens))


FUNCTIONS: dict[str, Callable[[str], Function]] = {
    "oracle": oracle,
    "echo": lambda name: echo,
    "nothing": lambda name: lambda tokens: [],
    "no tokens": lambda name: lambda tokens: [-1, 10**9],
    "wrong": lambda name: lambda tokens: [1, 2, 3],
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
def test_whatever_the_function_guesses_the_text_is_the_greedy_one(
    name: str, function: str, rows: int, monkeypatch: pytest.MonkeyPatch, install: Install
) -> None:
    install("medusa.drafters", "echo", "tests.examples.test_function_drafter:KIND")
    target = target_of(tiny_model(name))
    made = DrafterKind(make=lambda target: FunctionGuesses(FUNCTIONS[function](name), target.real_vocab))
    monkeypatch.setattr("tests.examples.test_function_drafter.KIND", made)
    drafter = load_drafter(DrafterChoice("echo", speculate="on"), target)
    found = collect(Parts(target, drafter, Greedy()), known(name).prompts[:rows], Limits(NUM_NEW), max_rows=rows)
    assert [each.token_ids for each in found] == known(name).wanted(rows)
    if function == "oracle":
        assert max(each.num_steps for each in found) <= NUM_NEW // 4


def test_the_command_line_knows_the_name(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Hi", "--drafter", "ecko"]) == 2
    assert "echo?" not in capsys.readouterr().err
    install("medusa.drafters", "echo", "tests.examples.test_function_drafter:KIND")
    assert main(["generate", "Hi", "--drafter", "ecko"]) == 2
    assert "did you mean echo?" in capsys.readouterr().err
    assert main(["generate", "Hi", "--drafter", "echo", "--heads", "runs/mine"]) == 1
    assert "--drafter echo needs no heads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("tests.examples.test_function_drafter:NO_KIND", "is no DrafterKind"),
        ("tests.examples.test_function_drafter:GONE", "can't be imported: .*GONE"),
        ("no_such_package_here:KIND", "can't be imported: No module named"),
    ],
)
def test_a_part_that_is_none_is_told_with_whose_it_is(value: str, told: str, install: Install) -> None:
    install("medusa.drafters", "echo", value)
    with pytest.raises(MedusaError, match=f"another-echo brings as medusa.drafters: echo, {told}"):
        load_drafter(DrafterChoice("echo"), target_of(tiny_model("llama")))

"""The reference decoder by itself: the text is the model's, whatever is guessed and whatever breaks."""

import ast
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import medusa_cli.reference
from medusa_cli.reference import DecodeError, DraftModel, Greedy, Sampling, Step, Text, Trie, Verifier, decode
from medusa_cli.reference.candidates import as_trie

FOLDER = Path(medusa_cli.reference.__file__).parent
SIGNS: Sequence[Hashable] = ("a", "b", ("a", "pair"), 7, None, frozenset({1}), 2.5)
"""Tokens of any kind, None among them, as it stands at a trie's root."""


def table(seed: object) -> Any:
    """A model: probabilities by the last two tokens, some of them 0, equals among them."""

    def model(text: Sequence[Hashable]) -> Mapping[Hashable, float]:
        drawn = random.Random(f"{seed} {list(map(repr, text[-2:]))}")
        found = {token: float(drawn.choice([0, 1, 2, 2, 9])) for token in SIGNS}
        return found if any(found.values()) else dict.fromkeys(SIGNS, 1.0)

    return model


def mostly(right: float, model: Any, seed: object) -> Any:
    """A cheaper model that agrees so often."""
    other = table(f"{seed} other")
    return lambda text: (model if random.Random(f"{seed} {len(text)}").random() < right else other)(text)


def written(text: Text, model: Any, drafter: Any = None, rule: Any = None) -> list[Step]:
    with closing(Verifier(model)) as verifier:
        return list(decode(text, verifier, drafter, rule))


def plainly(
    model: Any, prompt: Sequence[Hashable], budget: int, rule: Any, stops: Sequence[Hashable] = ()
) -> list[Any]:
    """One token after the other, with nothing of the decoder's but its rule."""
    text = list(prompt)
    while len(text) < len(prompt) + budget and not (len(text) > len(prompt) and text[-1] in stops):
        text.append(rule(model(text), len(text)))
    return text[len(prompt) :]


@pytest.mark.parametrize("seed", range(60))
def test_the_text_is_the_models_whatever_is_guessed(seed: int) -> None:
    rng = random.Random(seed)
    model, prompt = table(seed), rng.choices(SIGNS, k=rng.randint(0, 3))
    rule = rng.choice([Greedy(), Sampling(seed)])
    stops = rng.sample(SIGNS, rng.randint(0, 2))
    drafter = DraftModel(mostly(rng.random(), model, seed), rng.randint(0, 12), rng.randint(0, 5), rng.randint(1, 4))
    text = Text(prompt, rng.randint(0, 25), stops)
    steps = written(text, model, drafter, rule)
    assert text.tokens == plainly(model, prompt, text.budget, rule, stops)
    assert [token for step in steps for token in step.tokens] == text.tokens
    assert all(step.trie.num_guesses <= drafter.size and len(step.tokens) <= drafter.depth + 1 for step in steps)
    for step in steps:
        assert [step.trie.tokens[node] for node in step.kept] == step.tokens[: len(step.kept)]
    ended = "stop" if text.tokens and text.tokens[-1] in stops else "length"
    assert text.finish_reason == ended
    assert (len(text.tokens) == text.budget) or ended == "stop"


def test_right_guesses_are_committed_as_a_whole_path_with_the_bonus_token() -> None:
    model = table(3)
    text = Text(["a"], 10)
    steps = written(text, model, DraftModel(model, size=4, depth=4, width=1))
    assert [len(step.tokens) for step in steps] == [5, 5]
    assert [len(step.kept) for step in steps] == [4, 4]


def test_a_likely_guess_that_is_not_the_likeliest_is_no_text() -> None:
    steps = written(Text([], 3), lambda text: {"best": 0.51, "good": 0.49}, lambda text: [["good", "best"], ["good"]])
    assert [step.tokens for step in steps] == [["best"]] * 3
    assert not any(step.kept for step in steps)


def test_a_guess_is_sampled_as_often_as_the_model_says() -> None:
    chances = {"often": 0.6, "seldom": 0.3, "never": 0.0, "rarely": 0.1}
    counts: Counter[Hashable] = Counter()
    for seed in range(4000):
        text = Text([], 2)
        (step,) = written(text, lambda text: chances, lambda text: [["seldom"], ["never"]], Sampling(seed))[:1]
        counts[text.tokens[0]] += 1
        assert bool(step.kept) is (text.tokens[0] == "seldom")
    squares = sum((counts[token] - 4000 * p) ** 2 / (4000 * p) for token, p in chances.items() if p)
    assert counts["never"] == 0
    assert squares < 13.8, "chi-square with 2 degrees of freedom passes it once in 1,000 times"


@pytest.mark.parametrize("guesses", [[], [[]], Trie(), ()])
def test_no_guesses_are_one_token_a_step(guesses: Any) -> None:
    steps = written(Text(["a"], 4), table(1), lambda text: guesses)
    assert [len(step.tokens) for step in steps] == [1] * 4


def test_paths_that_begin_alike_share_nodes() -> None:
    trie = as_trie([["a", "b"], ["a", "c"], ["a", "b", "d"]])
    assert trie.num_guesses == 4
    assert trie.path(4) == ["a", "b", "d"]
    assert trie.drawn(kept=[1]).splitlines() == [
        "└─ 'a' 1.00 *",
        "   ├─ 'b' 1.00",
        "   │  └─ 'd' 1.00",
        "   └─ 'c' 1.00",
    ]
    assert Trie().drawn() == "(no guesses)"


def test_the_likeliest_paths_are_taken_first() -> None:
    draft = {(): {"a": 6, "b": 4}, ("a",): {"c": 1, "d": 1}, ("b",): {"e": 1}}
    trie = DraftModel(lambda text: draft.get(tuple(text), {"z": 1}), size=4, depth=2, width=2)([])
    assert [trie.path(node) for node in range(1, 5)] == [["a"], ["b"], ["b", "e"], ["a", "c"]]
    assert trie.chances[1:] == pytest.approx([0.6, 0.4, 0.4, 0.3])


def failing(after: int, failure: BaseException) -> Any:
    model = table(5)

    def fails(text: Sequence[Hashable]) -> Mapping[Hashable, float]:
        if len(text) > after:
            raise failure
        return model(text)

    return fails


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (failing(4, ValueError("the worker fell over")), "ValueError: the worker fell over"),
        (failing(4, TimeoutError("a socket's own")), "TimeoutError: a socket's own"),
        (lambda text: {"a": 1.0} if len(text) < 5 else {"a": float("nan")}, "gave nan as the probability of 'a'"),
        (lambda text: {"a": 1.0} if len(text) < 5 else {"a": -1.0}, "gave -1.0 as the probability of 'a'"),
        (lambda text: {"a": 1.0} if len(text) < 5 else {"a": "1"}, "gave '1' as the probability"),
        (lambda text: {"a": 1.0} if len(text) < 5 else {}, "knows no next token"),
        (lambda text: {"a": 1.0} if len(text) < 5 else [0.5, 0.5], "gave list, not probabilities by token"),
    ],
)
def test_a_step_that_fails_loses_no_text(model: Any, told: str) -> None:
    text = Text(["a"], 20)
    seen: list[Hashable] = []
    with closing(Verifier(model)) as verifier, pytest.raises(DecodeError, match=told) as raised:
        seen.extend(token for step in decode(text, verifier) for token in step.tokens)
    assert len(seen) == 4
    assert raised.value.tokens == text.tokens == seen
    assert text.finish_reason is None
    assert "step after 4 new tokens" in str(raised.value)


def test_a_drafter_that_fails_ends_the_step_as_clearly() -> None:
    with pytest.raises(DecodeError, match="after 0 new tokens: ZeroDivisionError"):
        written(Text([], 3), table(1), lambda text: 1 // 0)


def test_a_model_that_is_too_slow_is_told_with_the_time() -> None:
    def slow(text: Sequence[Hashable]) -> Mapping[Hashable, float]:
        time.sleep(0.0 if len(text) < 2 else 0.5)
        return {"a": 1.0}

    text = Text([], 9)
    with closing(Verifier(slow, timeout=0.2)) as verifier, pytest.raises(DecodeError, match="longer than 0.2 s"):
        list(decode(text, verifier))
    assert text.tokens == ["a", "a"]


def test_nodes_are_asked_side_by_side_and_what_broke_off_is_not_begun() -> None:
    asked: list[int] = []

    def slow(text: Sequence[Hashable]) -> Mapping[Hashable, float]:
        asked.append(len(text))
        time.sleep(0.05)
        if len(text) == 1:
            raise ValueError("broken")
        return {"a": 1.0}

    began, trie = time.monotonic(), as_trie([["a", "b", "c", "d"]])
    with closing(Verifier(slow, workers=9)) as verifier:
        verifier(["x", "y"], trie)
    assert time.monotonic() - began < 0.05 * 4
    with closing(Verifier(slow, workers=1)) as verifier, pytest.raises(ValueError, match="broken"):
        verifier(["x"], trie)
    time.sleep(0.15)
    assert asked.count(1) == 1
    assert len(asked) <= 5 + 2


def test_the_demonstration_is_twice_as_fast_and_says_so() -> None:
    ran = subprocess.run([sys.executable, "-m", "medusa_cli.reference"], capture_output=True, text=True, check=True)
    told = ran.stdout.splitlines()
    assert "the same text without guesses: yes" in told
    assert float(told[-1].rpartition(" ")[2].removesuffix("x")) >= 2
    assert "└─" in ran.stdout


def modules() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(FOLDER.glob("*.py")):
        # the grammar of Python 3.9
        yield file.name, ast.parse(file.read_text(encoding="utf-8"), feature_version=(3, 9))


def test_it_needs_the_standard_library_alone_and_is_read_in_an_evening() -> None:
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert node.module is not None
                room = node.module.split(".")[0]
                ours = node.module.startswith("medusa_cli.reference")
                assert ours or room in sys.stdlib_module_names, f"{name} imports {node.module}"
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in FOLDER.glob("*.py")) < 400


@pytest.mark.skipif(shutil.which("python3.9") is None, reason="no Python 3.9 here")
def test_it_runs_on_python_3_9() -> None:
    command = ["python3.9", "-m", "medusa_cli.reference", "--new-tokens", "8"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parents[1])
    if "pyenv" in ran.stderr:
        pytest.skip("its launcher is here, and it isn't")
    assert ran.returncode == 0, ran.stderr
    assert "the same text without guesses: yes" in ran.stdout


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (FOLDER.parents[1] / "docs" / "reference.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(example, "docs/reference.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1] == "['yes', 'yes', 'yes', 'yes', 'yes', 'yes', 'yes', 'yes'] length"

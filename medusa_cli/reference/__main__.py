"""A run of the reference decoder: a slow made-up model, a quick one that agrees with it most of the time, one trie."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Hashable, Sequence
from contextlib import closing

from medusa_cli.reference import DraftModel, Step, Text, Verifier, decode

WORDS = ("the", "a", "quick", "slow", "red", "old", "fox", "dog", "hen", "sees", "hears", "likes", "and", "near", ".")


def probabilities(text: Sequence[Hashable], salt: str = "") -> dict[Hashable, float]:
    """A made-up language: what comes next depends on the last three words, by chance."""
    drawn = random.Random(f"{salt} {text[-3:]}")
    return dict(zip(WORDS, (drawn.random() ** 8 for _ in WORDS)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the same text without guesses and with them."""
    parser = argparse.ArgumentParser("python -m medusa_cli.reference", description=__doc__)
    for flag, default, meaning in (
        ("--new-tokens", 48, "tokens to write"),
        ("--latency", 0.03, "seconds that the model takes to answer"),
        ("--right", 0.9, "how often the quick model agrees with it, 0 to 1"),
        ("--depth", 4, "guesses one after the other"),
        ("--size", 6, "guesses of a step at most"),
    ):
        parser.add_argument(flag, type=type(default), default=default, help=f"{meaning} (default: {default})")
    wanted = parser.parse_args(arguments)

    def model(text: Sequence[Hashable]) -> dict[Hashable, float]:
        time.sleep(wanted.latency)
        return probabilities(text)

    def quick(text: Sequence[Hashable]) -> dict[Hashable, float]:
        agrees = random.Random(f"quick {text}").random() < wanted.right
        return probabilities(text, salt="" if agrees else "other")

    def run(size: int) -> tuple[Text, list[Step], float]:
        text, began = Text(["the", "old", "fox"], wanted.new_tokens), time.perf_counter()
        with closing(Verifier(model, workers=size + 1)) as verifier:
            steps = list(decode(text, verifier, DraftModel(quick, size, wanted.depth)))
        return text, steps, time.perf_counter() - began

    (plain, _, without), (text, steps, took) = run(0), run(wanted.size)
    largest = max(steps, key=lambda step: step.trie.num_guesses)
    print(f"one step (* right):\n{largest.trie.drawn(largest.kept)}\n\n{' '.join(map(str, text.tokens))}\n")
    kept, guesses = sum(len(step.kept) for step in steps), sum(step.trie.num_guesses for step in steps)
    print(f"the same text without guesses: {'yes' if text.tokens == plain.tokens else 'NO'}")
    print(f"tokens/s: {len(plain.tokens) / without:.1f} without guesses, {len(text.tokens) / took:.1f} with")
    print(
        f"{len(text.tokens) / len(steps):.2f} tokens a step, {kept} of {guesses} guesses right, {without / took:.2f}x"
    )


if __name__ == "__main__":
    main()

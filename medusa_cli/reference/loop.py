"""Output loop: draft, verify, accept, commit, until the text ends."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from medusa_cli.reference.acceptance import Greedy, Rule, accept
from medusa_cli.reference.candidates import Drafter, as_trie
from medusa_cli.reference.trie import Trie
from medusa_cli.reference.verifier import Verifier


class DecodeError(Exception):
    """A step that failed. `tokens`: what was written before it, which nothing takes away."""

    def __init__(self, message: str, tokens: Sequence[Hashable]) -> None:
        super().__init__(message)
        self.tokens = list(tokens)


@dataclass
class Text:
    """Acceptance buffer: what is committed, and how much more may be.

    budget   new tokens at most
    stops    tokens that end the text, which they belong to
    """

    prompt: Sequence[Hashable]
    budget: int
    stops: Collection[Hashable] = ()
    tokens: list[Hashable] = field(default_factory=list)

    @property
    def finish_reason(self) -> str | None:
        """One of "stop" and "length"; None while the text goes on."""
        if self.tokens and self.tokens[-1] in self.stops:
            return "stop"
        return "length" if len(self.tokens) >= self.budget else None

    def commit(self, tokens: Sequence[Hashable]) -> list[Hashable]:
        """Take what a step brought, up to the text's end; what was taken."""
        before = len(self.tokens)
        for token in tokens:
            if self.finish_reason is None:
                self.tokens.append(token)
        return self.tokens[before:]


@dataclass(frozen=True)
class Step:
    """What one step did: its guesses, the nodes of those that were right, and the tokens that became text."""

    trie: Trie
    kept: list[int]
    tokens: list[Hashable]


def decode(text: Text, verifier: Verifier, drafter: Drafter | None = None, rule: Rule | None = None) -> Iterator[Step]:
    """Write a text, step by step. Raises DecodeError.

    drafter   tokens so far to guesses (a trie, or paths); None, or no guesses: a step brings one token
    rule      which token the model writes (acceptance.py); None: the likeliest
    """
    rule = rule or Greedy()
    while text.finish_reason is None:
        so_far = [*text.prompt, *text.tokens]
        try:
            trie = as_trie(drafter(so_far)) if drafter else Trie()
            nodes, tokens = accept(trie, verifier(so_far, trie), rule, len(so_far))
        except Exception as failed:
            raise DecodeError(
                f"step after {len(text.tokens)} new tokens: {type(failed).__name__}: {failed}", text.tokens
            ) from failed
        taken = text.commit(tokens)
        yield Step(trie, nodes[: len(taken)], taken)

"""Draft trie: guesses that begin alike share their nodes, so each prefix is asked of the model once."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator


class Trie:
    """Nodes by number, parents before children. Node 0 is the root: the text itself, no guess.

    tokens      the guess of each node; None at the root
    parents     the node that each one hangs under; -1 at the root
    chances     what the drafter thinks of each path, 0 to 1; 1 where it doesn't say
    children    token -> node, for each node: siblings differ
    """

    def __init__(self) -> None:
        self.tokens: list[Hashable] = [None]
        self.parents = [-1]
        self.chances = [1.0]
        self.children: list[dict[Hashable, int]] = [{}]

    @property
    def num_guesses(self) -> int:
        """Nodes under the root."""
        return len(self.tokens) - 1

    def add(self, parent: int, token: Hashable, chance: float = 1.0) -> int:
        """The child of a node with this token, new if it has none yet."""
        if token not in self.children[parent]:
            self.children[parent][token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.chances.append(chance)
            self.children.append({})
        return self.children[parent][token]

    def add_path(self, tokens: Iterable[Hashable], chance: float = 1.0) -> int:
        """Guesses one after the other, from the root; the last one's node."""
        node = 0
        for token in tokens:
            node = self.add(node, token, chance)
        return node

    def path(self, node: int) -> list[Hashable]:
        """The guesses from the root to a node, its own included."""
        found = []
        while node:
            found.append(self.tokens[node])
            node = self.parents[node]
        return found[::-1]

    def drawn(self, kept: Collection[int] = ()) -> str:
        """The trie as lines of text; nodes in `kept` are marked with a star."""
        return "\n".join(self._lines(0, "", kept)) or "(no guesses)"

    def _lines(self, node: int, indent: str, kept: Collection[int]) -> Iterator[str]:
        children = list(self.children[node].values())
        for child in children:
            last = child == children[-1]
            star = " *" if child in kept else ""
            yield f"{indent}{'└─' if last else '├─'} {self.tokens[child]!r} {self.chances[child]:.2f}{star}"
            yield from self._lines(child, indent + ("   " if last else "│  "), kept)

"""Which step brought which words, for a stream that asks. No step is told before all of its words are.

So what is held back for a stop string stays back, in ids and trees too.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from medusa_cli.decode.drafted import Verified
from medusa_cli.decode.text import TextStream
from medusa_cli.serve.worker import News


@dataclass
class _Token:
    """A token, the text that became certain with it, and how long the whole text is once that is told.

    until   None while its bytes are no character yet, or it is no text: then it is told with the next that is
    """

    id: int
    text: str
    until: int | None


@dataclass
class _Step:
    tokens: list[_Token]
    guessed: int
    tree: Verified | None


@dataclass
class StepTeller:
    """The steps of one text.

    stream   the text's ids as words, not cut at stop strings: it says where each token ends
    """

    stream: TextStream
    _waiting: deque[_Step] = field(default_factory=deque)
    _unfinished: list[_Token] = field(default_factory=list)
    _length: int = 0

    def saw(self, news: News) -> None:
        """A step has brought tokens."""
        if news.tokens:
            tokens = [self._token(token) for token in news.tokens]
            tree = news.tree if news.tree is not None and len(news.tree.ids) > 1 else None
            self._waiting.append(_Step(tokens, len(tokens) - 1 if tree else 0, tree))

    def tell(self, told: int, words: Callable[[int], str], *, is_over: bool) -> list[dict[str, Any]]:
        """The steps that may be told now that `told` characters of the text are.

        is_over   the text has ended. Then all steps are told, without what a stop string cut off; one that lost some of
                  its tokens, without its tree
        """
        if is_over:
            rest = self.stream.flush()
            self._length += len(rest)
            if self._unfinished:
                self._unfinished[-1].text += rest
            self._finish()
        found = []
        while self._waiting:
            step = self._waiting[0]
            tokens = [token for token in step.tokens if token.until is not None and token.until <= told]
            is_whole = len(tokens) == len(step.tokens)
            if not is_whole and not is_over:
                break
            self._waiting.popleft()
            found.append(_document(step, tokens, step.tree if is_whole else None, words))
        return found

    def _token(self, token: int) -> _Token:
        found = _Token(token, self.stream.feed([token]), None)
        self._length += len(found.text)
        self._unfinished.append(found)
        if found.text and not self.stream.unfinished:
            self._finish()
        return found

    def _finish(self) -> None:
        for token in self._unfinished:
            token.until = self._length
        self._unfinished.clear()


def _document(step: _Step, tokens: list[_Token], tree: Verified | None, words: Callable[[int], str]) -> dict[str, Any]:
    """One entry of `steps`."""
    shown = tree and {
        "parents": tree.parents,
        "ids": tree.ids,
        "texts": [words(token) for token in tree.ids],
        "kept": tree.kept,
    }
    return {
        "tokens": [{"id": token.id, "text": token.text} for token in tokens],
        "guessed": min(step.guessed, len(tokens)),
        "tree": shown,
    }

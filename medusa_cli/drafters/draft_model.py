"""Guesses of a smaller model: a chain of its likeliest tokens, and beside each of them the next likely ones.

Speculative decoding with a draft model (Leviathan et al. 2023, arXiv 2211.17192), each guess certain. The model's cache
follows the texts: only what changed at their ends is read again.
Shape letters: B rows, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_cli.config.recipe import TargetSettings
from medusa_cli.contracts import Context, Draft
from medusa_cli.drafters.source import Wishes
from medusa_cli.drafters.translation import Guessed, Translation, between
from medusa_cli.drafters.trie import Trie
from medusa_cli.model.loading.load import load_unchecked
from medusa_cli.model.target import Target
from medusa_cli.model.weights import step_bytes
from medusa_cli.trees.tree import TokenTree

DEPTH = 6  # guesses of a chain at most
WIDTH = 3  # likeliest tokens of each place
READ_AT_ONCE = 16  # tokens that are read in about the time of one
UNLIKELY = 0.2  # a chain that is right with less than this chance is not drawn on


class ModelGuesses:
    """The source of guesses: another causal model with a cache of its own."""

    taps: tuple[int, ...] = ()

    @classmethod
    def of(cls, target: Target, wishes: Wishes) -> "ModelGuesses":
        """The model that was named, where the target is and in its dtype. Raises TargetError."""
        assert wishes.draft_model is not None
        settings = TargetSettings(model=wishes.draft_model, device=str(target.device), dtype=target.dtype_name)
        draft = load_unchecked(settings)
        translation = between(target.tokenizer, draft.tokenizer, (target.name, draft.name))
        return cls(draft, translation, step_bytes(draft) / max(1, step_bytes(target)))

    def __init__(self, draft: Target, translation: Translation, relative_cost: float = 0.0) -> None:
        """relative_cost: of one of its steps, in the target's."""
        self._draft = draft
        self._relative_cost = relative_cost
        self._translation = translation
        self._texts: list[list[int]] = []  # what each row of the cache holds, guesses included
        self._cache = draft.new_cache(1, 0)

    def join(self, first_row: int, prompts: Sequence[Sequence[int]], taps_BTLH: Tensor | None) -> None:
        """New texts; they are read when guesses are wanted, which may be never."""
        rows = range(first_row, first_row + len(prompts))
        if rows.stop > self._cache.num_rows:
            self._cache.reshape(rows.stop, self._cache.layers[0].capacity)
        for row in rows:
            self._cache.drop(row)
        self._texts[first_row : rows.stop] = [[] for _ in prompts]

    def price(self, context: Context, usual: float | None) -> float:
        """By the bytes that a step reads, and what there is to read."""
        unread = sum(max(0, len(tokens) - len(held)) for tokens, held in zip(context.tokens, self._texts, strict=False))
        chain = self._relative_cost * DEPTH if usual is None else usual
        return chain + self._relative_cost * max(0, unread - DEPTH) / READ_AT_ONCE

    def keep(self, context: Context, taps_BDLH: Tensor | None) -> None:
        """Texts are compared when guesses are wanted."""

    def move(self, source: int, row: int) -> None:
        """The row's text goes with it."""
        self._cache.copy_row(source, row)
        self._texts[row] = self._texts[source]

    def drop(self, row: int) -> None:
        """Forget the row."""
        self._cache.drop(row)
        self._texts[row] = []

    @torch.inference_mode()
    def add_guesses(self, context: Context, tries: Sequence[Trie], floor: float) -> None:
        """A chain for each row, down to where it is unlikely, with its next best tokens as siblings."""
        wanted = [self._translation.to_draft(tokens) for tokens in context.tokens]
        texts = self._readable(wanted)
        fits = [text is each for text, each in zip(texts, wanted, strict=True)]
        logits_BV = self._after(texts)
        paths: list[Guessed] = [Guessed([], []) for _ in texts]
        found: list[list[Guessed]] = [[] for _ in texts]
        for _ in range(DEPTH):
            chances_BW, ids_BW = (each.tolist() for each in logits_BV.float().softmax(-1).topk(WIDTH))
            for row, path in enumerate(paths):
                reached = path.chances[-1] if path.chances else 1.0
                longer = [
                    Guessed([*path.ids, token], [*path.chances, reached * chance])
                    for token, chance in zip(ids_BW[row], chances_BW[row], strict=True)
                ]
                found[row] += longer
                paths[row] = longer[0]
            likely = (path.chances[-1] for path, fit in zip(paths, fits, strict=True) if fit)
            if max(likely, default=0.0) < max(floor, UNLIKELY):
                break
            logits_BV = self._next([path.ids[-1] for path in paths])
        for row, trie in enumerate(tries):
            for path in found[row] if fits[row] else ():
                guess = self._translation.from_draft(context.tokens[row], texts[row], path)
                trie.add_path(guess.ids, (chance for chance in guess.chances if chance >= floor))

    def _readable(self, texts: Sequence[list[int]]) -> list[list[int]]:
        """The texts; a token instead of those that are too long for the model, which it then makes no guesses for."""
        limit = self._draft.context_limit
        return [text if text and (limit is None or len(text) + DEPTH <= limit) else [0] for text in texts]

    def _after(self, texts: Sequence[list[int]]) -> Tensor:
        """Logits [B, V] after each row's text, of which what the cache doesn't hold is read."""
        for row, text in enumerate(texts):
            held = self._texts[row]
            same = next((place for place, pair in enumerate(zip(held, text, strict=False)) if pair[0] != pair[1]), None)
            same = min(len(held), len(text)) if same is None else same
            self._cache.shorten(
                row, min(same, len(text) - 1, self._cache.lengths[row])
            )  # the last one tells what is next
            self._texts[row] = list(text)
        return self._draft.prefill(texts, self._cache).logits_BNV[:, 0]

    def _next(self, tokens: Sequence[int]) -> Tensor:
        """Logits [B, V] after one more token in each row."""
        tokens_B1 = torch.tensor(tokens, device=self._draft.device)[:, None]
        logits_BNV = self._draft.verify(Draft(tokens_B1, TokenTree.empty()), self._cache).logits_BNV
        self._cache.commit(slice(0, len(tokens)), [1] * len(tokens))
        for text, token in zip(self._texts, tokens, strict=False):
            text.append(token)
        return logits_BNV[:, 0]

"""What the functions of the data stage work with, and what the stage leaves."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medusa_cli.config.recipe import Recipe
from medusa_cli.data.template import template_text
from medusa_cli.heads.kinds import heads_class
from medusa_cli.model.target import Target
from medusa_cli.train.store import HiddenStore, Inner

OnProgress = Callable[[str, int, int, int], None]
"""(stage, samples done, samples wanted, tokens written in this run)"""


@dataclass(frozen=True)
class Stage:
    """One run's data stage: what is wanted, of which target, where it is kept, and who is told how far it is."""

    recipe: Recipe
    target: Target
    folder: Path
    on_progress: OnProgress

    @property
    def longest_text(self) -> int:
        """Tokens a prompt and its answer may have together."""
        wanted = self.recipe.data.max_seq_length
        return min(wanted, self.target.context_limit or wanted)

    @property
    def answer_tokens(self) -> int:
        """Tokens of an answer at most: at least half of the longest text is left to prompts."""
        return min(self.recipe.data.max_answer_tokens, self.longest_text // 2)

    @property
    def inner(self) -> Inner | None:
        """What is kept of inner layers, for heads that look at some: then samples are whole texts. None for others."""
        heads, target = self.recipe.heads, self.target
        described = heads_class(heads.type).describes
        if not described.looks_back:
            return None
        taps = described.taps_of(heads, target.num_layers)
        return Inner(taps, len(taps) * target.tap_size if self.recipe.train.states == "stored" else 0)

    @property
    def template(self) -> str | None:
        """A short hash of the chat template, None without one: with it the text around answers can be told apart."""
        tokenizer = self.target.tokenizer
        if not tokenizer.chat_template:
            return None
        return hashlib.sha256(template_text(tokenizer).encode()).hexdigest()[:16]


def open_store(stage: Stage, folder: Path) -> HiddenStore:
    """The store in this folder for states of the stage's target. Raises TrainingError."""
    target = stage.target
    return HiddenStore(
        folder,
        hidden_size=target.hidden_size,
        fingerprint=target.fingerprint,
        longest=stage.longest_text,
        inner=stage.inner,
    )


@dataclass(frozen=True)
class Gathered:
    """A store of samples, and what is to be known of it.

    by_target  the target wrote the tokens that are learnt, greedily
    answers    who wrote them and how: names and numbers for provenance.json
    counts     rows by what became of them
    notes      sentences for the user; `warnings` are those that even --quiet shows
    prompts    ids of the whole prompts that the target answered, by key: such a sample begins with its prompt's last
               id, or with the whole of it
    """

    store: Path
    by_target: bool
    answers: Mapping[str, Any]
    counts: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    prompts: Mapping[str, Sequence[int]] = field(default_factory=dict)

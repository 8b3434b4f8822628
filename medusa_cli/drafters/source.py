"""Sources of guesses: whoever can say what may follow a row's tokens. A drafter gathers them under one budget."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from medusa_cli.contracts import Context, Memory
from medusa_cli.drafters.trie import Trie


class Source(Memory, Protocol):
    """Adds guesses to each row's trie."""

    def add_guesses(self, context: Context, tries: Sequence[Trie], floor: float) -> None:
        """Guesses for the tokens after each row's root; those with a chance below `floor` may be left out."""


class Priced(Protocol):
    """A source that can tell beforehand what guesses will take: nobody needs to try it to find out."""

    def price(self, context: Context, usual: float | None) -> float:
        """Plain steps of the target that guesses for these texts will take; usual: those it takes; None: not known."""


@dataclass(frozen=True)
class Wishes:
    """What sources are told besides the target.

    draft_model   the model that guesses: a name for transformers, or a .gguf file
    errors        what a function's failure does: "warn" leaves its guesses out from then on, "raise" stops
    memory        the file that earlier replies are kept in, for who copies from them
    function      what `python:` stands for where it isn't named: Python's own callable
    """

    draft_model: str | None = None
    errors: Literal["warn", "raise"] = "warn"
    memory: Path | None = None
    function: Callable[..., Any] | None = None


def price_of(source: Source, context: Context, usual: float | None) -> float | None:
    """What guesses will take, in plain steps; None where nobody knows."""
    if not hasattr(source, "price"):
        return usual
    return cast(Priced, source).price(context, usual)


def is_source(part: object) -> bool:
    """Whether it adds guesses to tries, and isn't a drafter of its own."""
    return hasattr(part, "add_guesses")

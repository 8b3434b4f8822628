"""Prompts of people as a target takes them: messages to ids, and where the text after them ends. Prints nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from medusa_cli.data.conversations import Message
from medusa_cli.data.tokens import prompt_ids
from medusa_cli.decode.rows import Limits
from medusa_cli.decode.stop_strings import StopStrings
from medusa_cli.decode.text import TextStream, Vocabulary
from medusa_cli.errors import DataError
from medusa_cli.model.target import Target


def ids_of(target: Target, messages: Sequence[Message], chat: bool | None = None) -> list[int]:
    """The ids to decode from.

    chat   None: through the chat template where there is one. Raises DataError where it is asked for and there is none,
           and as `prompt_ids`
    """
    has_template = bool(target.tokenizer.chat_template)
    if chat and not has_template:
        raise DataError(f"{target.name} has no chat template", "leave out --chat: the prompt is taken as plain text")
    return prompt_ids(target.tokenizer, messages, chat=has_template if chat is None else chat)


@dataclass(frozen=True)
class Ends:
    """Where texts end, and what of them is no text.

    stops    strings that end a text, and that it doesn't hold
    hidden   ids that end a turn and are no text
    """

    limits: Limits
    stops: tuple[str, ...]
    hidden: frozenset[int]
    tokenizer: Any

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Which ids don't show; all these texts share it."""
        return Vocabulary(self.tokenizer, self.hidden)

    def stream(self) -> TextStream:
        """One text's ids as words, while they come."""
        return TextStream(self.tokenizer, self.stops, self.hidden, self.vocabulary)

    def text(self, ids: Sequence[int]) -> str:
        """The words of whole ids."""
        stream = self.stream()
        return stream.feed(ids) + stream.flush()


def ends_of(target: Target, max_new_tokens: int, stops: Sequence[str] = (), *, ignore_eos: bool = False) -> Ends:
    """Where texts of this target end: at its stop ids, these strings, the budget, and the context's last position.

    ignore_eos   stop ids don't end a text; those of them that are words are words then
    Raises RecipeError as `stops_of`.
    """
    tokenizer = target.tokenizer
    hidden = frozenset(target.stop_ids & tokenizer.added_tokens_decoder.keys()) if ignore_eos else target.stop_ids
    new_finder = StopStrings(stops, tokenizer, hidden).finder if stops else None
    stop_ids = frozenset[int]() if ignore_eos else target.stop_ids
    return Ends(Limits(max_new_tokens, stop_ids, target.context_limit, new_finder), tuple(stops), hidden, tokenizer)

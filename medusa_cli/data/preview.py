"""One sample as runs of text, learnt or not, for `--preview-masks`. This file knows no printing."""

import itertools
from dataclasses import dataclass
from typing import Any

from medusa_cli.data.tokens import Tokens


@dataclass(frozen=True)
class Segment:
    """A run of text whose tokens are all learnt, or all not."""

    text: str
    supervised: bool


def segments(tokenizer: Any, tokens: Tokens) -> list[Segment]:
    """The sample's text, special tokens shown, cut where learning starts and stops.

    The texts join to the decoded sample; each run is decoded behind those before it, as some tokenizers drop a space at
    the start of what they decode.
    """
    found = []
    past = shown = 0
    for supervised, run in itertools.groupby(tokens.supervised):
        past += len(list(run))
        text = tokenizer.decode(tokens.ids[:past], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        found.append(Segment(text[shown:], supervised))
        shown = len(text)
    return found

"""Names of the parts that can be chosen: drafters and kinds of heads, with a line on each. Imports none of them."""

from medusa_cli.util import plugins

DRAFTERS = {
    "medusa": "heads of that kind in a tree",
    "hydra": "heads that see each other's guesses",
    "ngram": "what followed the same tokens earlier in the text",
    "mixed": "heads and n-grams together, as far as they pay",
    "none": "no guesses: plain decoding",
}
HEADS = {
    "medusa": "each head guesses by itself",
    "hydra": "each head sees the guesses before its own",
}


def drafter_names() -> list[str]:
    """Those of this program, then those that other packages bring."""
    return list(dict.fromkeys([*DRAFTERS, *plugins.plugins(plugins.DRAFTERS)]))


def guessing_names() -> list[str]:
    """The drafters that guess something."""
    return [name for name in drafter_names() if name != "none"]


def head_kinds() -> list[str]:
    """Those of this program, then those that other packages bring."""
    return list(dict.fromkeys([*HEADS, *plugins.plugins(plugins.HEADS)]))

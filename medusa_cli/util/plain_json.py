"""JSON that others may have written, read with a bound on its depth.

What is nested without end is a ValueError like all else that is no JSON: what is done with a value afterwards, such as
showing it in a message, goes no deeper than Python's own calls.
"""

import json
from typing import Any

MOST_DEPTH = 100


def parse_json(text: str | bytes) -> Any:
    """The value. Raises ValueError (json.JSONDecodeError where a place can be named)."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise _too_deep() from error
    opened = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    if opened > MOST_DEPTH and _depth_is_beyond(value):
        raise _too_deep()
    return value


def _depth_is_beyond(value: Any) -> bool:
    """Whether it is nested more than MOST_DEPTH deep; without recursion."""
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for holder in level
            if isinstance(holder, list | dict)
            for inner in (holder.values() if isinstance(holder, dict) else holder)
        ]
    return bool(level)


def _too_deep() -> ValueError:
    return ValueError(f"nested more than {MOST_DEPTH} deep")

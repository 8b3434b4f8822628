"""What is wrong with a recipe, in words: pydantic's faults, each with what is wanted and the nearest name."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

_WANTED = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "model_type": "is a section, with its settings indented below it",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "too_large": "is larger than what can be computed with",
    "string_too_short": "must not be empty",
    "too_short": "must hold at least {min_length}",
}


def in_words(errors: Iterable[Mapping[str, Any]], patterns: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """A sentence for each of pydantic's errors.

    patterns  setting -> what its pattern lets through, in words
    names     dotted names of all settings
    """
    known = list(names)
    return [_sentence(error, patterns, known) for error in errors]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The setting that was meant: of the same last part wherever it is, else the one spelt most alike.

    Where no section is named and several have it, the first one's.
    """
    known, plain = list(known), name.lower().replace("-", "_")
    last = _last_part(plain)
    of_last: dict[str, list[str]] = {}
    for one in known:
        of_last.setdefault(_last_part(one), []).append(one)
    if last == plain and last in of_last:
        return of_last[last][0]
    if last in of_last:
        return difflib.get_close_matches(plain, of_last[last], n=1, cutoff=0.0)[0]
    if near := difflib.get_close_matches(plain, known, n=1, cutoff=0.6):
        return of_last[_last_part(near[0])][0] if last == plain else near[0]
    alike = difflib.get_close_matches(last, of_last, n=1, cutoff=0.75)
    return of_last[alike[0]][0] if alike else None


def _last_part(name: str) -> str:
    """epochs of train.epochs."""
    return name.rpartition(".")[2]


def _sentence(error: Mapping[str, Any], patterns: Mapping[str, str], known: list[str]) -> str:
    """What is wrong with one setting, by the kind of pydantic's error."""
    name = ".".join(str(part) for part in error["loc"])
    kind, context, given = error["type"], error.get("ctx", {}), error["input"]
    if kind in ("extra_forbidden", "invalid_key"):
        near = nearest(name, known)
        return f"{name} is no setting" + (f": did you mean {near}?" if near else "")
    if kind == "value_error":  # of a validator of ours
        return f"{name} {context['error']}"
    if kind == "literal_error":
        choices = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        return f"{name} is one of {', '.join(choices)}, not {_shown(given)}" + _meant(given, choices)
    if kind == "string_pattern_mismatch":
        return f"{name} is {patterns[name]}, not {_shown(given)}"
    if kind == "too_short":
        given = context["actual_length"]
    wanted = _WANTED[kind].format(**context) if kind in _WANTED else f"is wrong ({error['msg']}),"
    quotes = ": put it in quotes" if kind == "string_type" and isinstance(given, (int, float)) else ""
    return f"{name} {wanted}, not {_shown(given)}{quotes}"


def _meant(given: object, choices: list[str]) -> str:
    """The choice that was meant, as the end of a sentence; the usual short names of number formats included."""
    text = str(given).lower()
    short = {"fp32": "float32", "f32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}.get(text)
    near = [short] if short in choices else difflib.get_close_matches(text, choices, n=1)
    return f": did you mean {near[0]}?" if near else ""


def _shown(value: object) -> str:
    """A value as YAML would have it, shortened."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"

"""JSON of others: any value, and a ValueError for what is none or nested without end."""

import json

import pytest

from medusa_cli.util.plain_json import MOST_DEPTH, parse_json


@pytest.mark.parametrize("text", ['{"a": [1, "[[[", null]}', b"[1]", "7", "[" + "[]," * 500 + "[]]"])
def test_a_value_is_read(text: str | bytes) -> None:
    assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize(("start", "end"), [("[", "]"), ('{"a":', "}")])
def test_what_is_nested_without_end_is_no_json(start: str, end: str) -> None:
    parse_json(start * MOST_DEPTH + "0" + end * MOST_DEPTH)
    for depth in (MOST_DEPTH + 1, 900, 1000, 100_000):
        with pytest.raises(ValueError, match="nested more than 100 deep"):
            parse_json(start * depth + "0" + end * depth)


@pytest.mark.parametrize("text", ["", "{", "[1,]", b"\xff", "1" * 5000])
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match="."):
        parse_json(text)

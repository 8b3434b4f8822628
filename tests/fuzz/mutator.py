"""Damage for files: what a disk, a copy, an editor or a stranger may do to them. The same seed does the same."""

import json
import random
import struct
from collections.abc import Callable
from typing import Any

import yaml

DEEP = 5000
WORDS = ["", "x", "0", "-1", "1e9", "\ud800", "\0", "true", "null", "../..", "a" * 300, "é", "<s>", "{{ 1 / 0 }}"]
NUMBERS = [0, 1, -1, 2, 7, 0.5, -0.0, 1e-300, 1e308, 2**31, 2**63, 2**64, 10**400, -(2**63), 3.7]
NOT_FINITE = [float("nan"), float("inf"), float("-inf")]
MARKS = [b"&a [*a]", b"!!python/object:os.system {}", b"{{", b"{%", b"- ", b"  ", b"\t", b"? ", b": ", b"0x", b"1e999",
         b".nan", b"2024-99-99", b"(" * DEEP, b"[" * 100_000, b"x = ", b"'''", b"# "]  # fmt: skip
SHAPES: list[Any] = [None, True, False, [], {}, [[]], [None], {"": None}, [0, 0], ["x"], [{}], {"a": {"b": []}}]
LENGTHS = [0, 1, 7, 255, 2**16, 2**31 - 1, 2**32, 2**40, 2**63 - 1, 2**64 - 1]

Mutator = Callable[[bytes, bytes, random.Random], bytes]


def mutated(content: bytes, other: bytes, form: str, rng: random.Random) -> bytes:
    """The content with one to three faults.

    other   another file of the same kind, to be spliced in
    form    how it is built: json, jsonl, yaml, text, safetensors, binary
    """
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        mutator = _bytes if rng.random() < 0.3 else FORMS[form]
        try:
            content = mutator(content, other, rng)
        except (
            ValueError,
            TypeError,
            struct.error,
            yaml.YAMLError,
            RecursionError,
        ):  # an earlier fault has taken its form
            content = _bytes(content, other, rng)
    return content


# --- bytes ---


def _bytes(content: bytes, other: bytes, rng: random.Random) -> bytes:
    return rng.choice(
        [_flip, _flip, _cut, _take_out, _put_in, _splice, _encode_anew, _repeat, _empty, _set_length, _set_length]
    )(content, other, rng)


def _place(content: bytes, rng: random.Random) -> int:
    """Anywhere; often near the start, where headers are."""
    return rng.randrange(min(len(content), 256) if rng.random() < 0.5 and content else len(content) or 1)


def _flip(content: bytes, _: bytes, rng: random.Random) -> bytes:
    held = bytearray(content or b"\0")
    for _ in range(rng.choice([1, 1, 2, 8])):
        held[_place(held, rng)] ^= 1 << rng.randrange(8)
    return bytes(held)


def _cut(content: bytes, _: bytes, rng: random.Random) -> bytes:
    return content[: _place(content, rng)]


def _take_out(content: bytes, _: bytes, rng: random.Random) -> bytes:
    place = _place(content, rng)
    return content[:place] + content[place + rng.choice([1, 2, 8, 100]) :]


def _put_in(content: bytes, _: bytes, rng: random.Random) -> bytes:
    piece = rng.choice(
        [b"[", b"]", b"{", b"}", b'"', b",", b":", b"\n", b"-", b"\\", b"\xff\xfe", b"\0", b"[" * DEEP, b'{"a":' * DEEP,
         rng.randbytes(rng.choice([1, 8, 100]))]
    )  # fmt: skip
    place = _place(content, rng)
    return content[:place] + piece + content[place:]


def _splice(content: bytes, other: bytes, rng: random.Random) -> bytes:
    return content[: _place(content, rng)] + other[_place(other, rng) :]


def _encode_anew(content: bytes, _: bytes, rng: random.Random) -> bytes:
    text = content.decode("utf-8", "replace")
    return rng.choice([b"\xef\xbb\xbf" + content, text.encode("utf-16"), text.encode("utf-32"), b"\xff" + content])


def _repeat(content: bytes, _: bytes, rng: random.Random) -> bytes:
    return content * rng.choice([2, 3])


def _empty(_: bytes, __: bytes, rng: random.Random) -> bytes:
    return rng.choice([b"", b"", b"\n", b"null", b"0", b"{}", b"[]", b'"x"', b"\0" * 64])


def _set_length(content: bytes, _: bytes, rng: random.Random) -> bytes:
    """Eight bytes, or four, that may be a length."""
    number, width = rng.choice(LENGTHS), rng.choice([4, 8])
    place = _place(content, rng)
    return content[:place] + (number % 2 ** (8 * width)).to_bytes(width, "little") + content[place + width :]


# --- JSON ---


def json_of(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode()


def _json(content: bytes, other: bytes, rng: random.Random) -> bytes:
    value = json.loads(content)
    return rng.choice([_change, _change, _change, _change, _change, _two_keys, _deepen])(value, _known(other), rng)


def _known(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _slots(value: Any) -> list[tuple[Any, Any]]:
    """Every place of a document: what holds it, and its key."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else []
        found += [(holder, key) for key in keys]
        waiting += [holder[key] for key in keys]
    return found


def _slot(value: Any, rng: random.Random) -> tuple[Any, Any]:
    """One of them; every other time one at the top, or a long list below would get all the faults."""
    slots = _slots(value)
    top = [slot for slot in slots if slot[0] is value]
    if not slots:
        raise ValueError("nothing to change")
    return rng.choice(top if top and rng.random() < 0.5 else slots)


def _change(value: Any, other: Any, rng: random.Random) -> bytes:
    holder, key = _slot(value, rng)
    old = holder[key]
    fate = rng.random()
    if fate < 0.12 and isinstance(holder, dict):
        del holder[key]
    elif fate < 0.2 and isinstance(holder, dict):
        holder[rng.choice([str(key).upper(), f"{key}s", "", "\ud800", "__class__"])] = holder.pop(key)
    elif fate < 0.3 and isinstance(holder, dict):
        holder[rng.choice(WORDS)] = _new(old, value, other, rng)
    else:
        holder[key] = _new(old, value, other, rng)
    return json_of(value)


def _new(old: Any, value: Any, other: Any, rng: random.Random) -> Any:
    """Another value for a place: of another type, larger, wrapped, or from elsewhere."""
    kind = rng.randrange(8)
    if kind == 0 and isinstance(old, int | float) and abs(old) < 1e300:
        return rng.choice([-old, old + 1, old - 1, old * 2, old * 1000, float(old), str(old), not old, [old]])
    if kind == 1 and isinstance(old, str):
        return rng.choice([old.upper(), old + "x", old[:-1], [old], {old: old}, old * 100])
    if kind == 2:
        holder, key = _slot(other if isinstance(other, dict | list) and other else value, rng)
        return json.loads(json.dumps(holder[key]))
    if kind == 3:
        return rng.choice([[old], [old] * 3, {"a": old}, str(old)[:300], [[[old]]]])
    return rng.choice([rng.choice(WORDS), rng.choice(NUMBERS), rng.choice(NOT_FINITE), rng.choice(SHAPES)])


def _two_keys(value: Any, other: Any, rng: random.Random) -> bytes:
    holder, key = _slot(value, rng)
    text = json_of(value)
    if not isinstance(holder, dict):
        raise ValueError("a list names nothing twice")
    name = json_of(key) + b":"
    return text.replace(name, name + b" " + json_of(_new(holder[key], value, other, rng)) + b", " + name, 1)


def _deepen(value: Any, _: Any, rng: random.Random) -> bytes:
    """A value nested thousands deep, or a little; json.dumps would refuse it."""
    holder, key = _slot(value, rng)
    holder[key] = "HERE"
    depth = rng.choice([3, 30, 90, 200, rng.randrange(800, 1000), DEEP, 100_000])
    start, end = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    return json_of(value).replace(b'"HERE"', start * depth + b"0" + end * depth, 1)


# --- other forms ---


def _jsonl(content: bytes, other: bytes, rng: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    if not lines:
        raise ValueError("no line")
    place, others = rng.randrange(len(lines)), other.splitlines() or [b"null"]
    fate = rng.random()
    if fate < 0.1:
        lines.insert(place, rng.choice(lines))
    elif fate < 0.15:
        del lines[place]
    else:
        lines[place] = (
            FORMS[rng.choice(["json", "json", "json", "bytes"])](lines[place], rng.choice(others), rng) + b"\n"
        )
    return b"".join(lines)


def _yaml(content: bytes, other: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.4:
        return _text(content, other, rng)
    return _json(json_of(yaml.safe_load(content)), json_of(yaml.safe_load(other)), rng)


def _text(content: bytes, other: bytes, rng: random.Random) -> bytes:
    """Words and marks put in, taken out, and doubled."""
    lines = content.splitlines(keepends=True) or [b""]
    place = rng.randrange(len(lines))
    at = rng.randrange(len(lines[place]) or 1)
    fate = rng.randrange(4)
    if fate == 0:
        lines[place] = lines[place][:at] + rng.choice(MARKS) + lines[place][at:]
    elif fate == 1:
        lines.insert(place, rng.choice(other.splitlines(keepends=True) or [b""]))
    elif fate == 2:
        del lines[place]
    else:
        lines[place] = rng.choice(MARKS) + lines[place]
    return b"".join(lines)


def _safetensors(content: bytes, other: bytes, rng: random.Random) -> bytes:
    """The header changed, with the length that goes with it or without; or the numbers."""
    (length,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + length], content[8 + length :]
    if rng.random() < 0.25:
        return content[: 8 + length] + _numbers(data, rng)
    (other_length,) = struct.unpack("<Q", other[:8])
    changed = _json(header, other[8 : 8 + other_length], rng)
    said = rng.choice(LENGTHS) if rng.random() < 0.15 else len(changed)
    return struct.pack("<Q", said) + changed + data


def _numbers(data: bytes, rng: random.Random) -> bytes:
    held = bytearray(data)
    for _ in range(rng.choice([1, 16])):
        place = rng.randrange(len(held) // 4 or 1) * 4
        held[place : place + 4] = struct.pack("<f", rng.choice([*NOT_FINITE, 0.0, 1e38, -1e38, 1e-45]))
    return bytes(held[: len(data)])


FORMS: dict[str, Mutator] = {
    "bytes": _bytes,
    "json": _json,
    "jsonl": _jsonl,
    "yaml": _yaml,
    "text": _text,
    "safetensors": _safetensors,
    "binary": _bytes,
}

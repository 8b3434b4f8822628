"""Guesses of the longest match: the automaton against a plain search, chances, loops, and remembered replies."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from medusa_cli.contracts import Context
from medusa_cli.drafters.source import Wishes
from medusa_cli.drafters.suffix import LATEST, NODES, START, Automaton, Reader, Suffixes, _following
from medusa_cli.drafters.suffix_memory import LEAST, SuffixMemory
from medusa_cli.drafters.trie import Trie
from medusa_cli.errors import DataError
from tests.decode.tiny_llama import TARGET


def automaton_of(text: Sequence[int]) -> Automaton:
    made = Automaton()
    for token in text:
        made.add(token)
    return made


def state_of(automaton: Automaton, part: Sequence[int]) -> int | None:
    state = START
    for token in part:
        if token not in automaton.next[state]:
            return None
        state = automaton.next[state][token]
    return state


@pytest.mark.parametrize("seed", range(20))
def test_every_part_is_found_and_counted(seed: int) -> None:
    rng = random.Random(seed)
    text = rng.choices(range(rng.choice([2, 4])), k=40)
    made = automaton_of(text)
    parts = {tuple(text[start:end]) for start in range(40) for end in range(start + 1, min(41, start + 9))}
    for part in parts:
        state = state_of(made, part)
        assert state is not None
        starts = [start for start in range(40) if tuple(text[start : start + len(part)]) == part]
        assert made.counts[state] == len(starts)
    for _ in range(200):
        other = tuple(rng.choices(range(4), k=rng.randint(2, 6)))
        there = any(tuple(text[start : start + len(other)]) == other for start in range(40))
        assert (state_of(made, other) is not None) is there
    assert len(made.next) <= 80, "twice as many states as tokens"


def longest_before(text: Sequence[int]) -> int:
    """Length of the longest end that stands earlier, by looking everywhere."""
    return max(
        (
            length
            for length in range(1, len(text))
            if any(text[start : start + length] == text[-length:] for start in range(len(text) - length))
        ),
        default=0,
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_match_is_the_longest_there_is(seed: int) -> None:
    rng = random.Random(seed)
    text, reader = [], Reader(None)
    for _ in range(60):
        text.append(rng.randrange(3))
        reader.read(text)
        matches = reader.matches()
        assert (matches[0].length if matches else 0) == longest_before(text)


def guessed(source: Suffixes, tokens: Sequence[int]) -> Trie:
    trie = Trie(tokens[-1])
    source.add_guesses(Context([tokens], torch.tensor([tokens[-1]]), torch.zeros(1, 4)), [trie], 0.0)
    return trie


def first_path(trie: Trie) -> list[int]:
    """Down the likeliest children."""
    path, node = [], 0
    while children := [child for child in range(1, len(trie.tokens)) if trie.parents[child] == node]:
        node = max(children, key=lambda child: trie.chances[child])
        path.append(trie.tokens[node])
    return path


def joined(prompt: Sequence[int], memory: SuffixMemory | None = None) -> Suffixes:
    source = Suffixes(memory)
    source.join(0, [prompt], None)
    return source


def test_what_followed_is_copied_and_a_copy_past_the_end_goes_on_in_a_loop() -> None:
    trie = guessed(joined([]), [9, 1, 2, 3, 4, 5, 9, 1, 2])
    assert first_path(trie)[:7] == [3, 4, 5, 9, 1, 2, 3]
    assert len(trie.tokens) <= 3 * NODES
    assert all(child <= trie.chances[parent] for child, parent in zip(trie.chances, trie.parents, strict=True))


def test_what_followed_more_often_is_likelier_and_of_equals_what_followed_last() -> None:
    trie = guessed(joined([]), [1, 7, 2, 1, 7, 3, 1, 8, 4, 1, 9, 5, 1])
    chances = [trie.chances[trie.child(0, token) or 0] for token in (7, 9, 8)]
    assert [chance / chances[2] for chance in chances] == pytest.approx([2, 1 + LATEST, 1])
    assert [token for token, _, _ in _following(automaton_of([1, 7, 1, 7, 1, 8]), START)][0] == 1


def test_a_text_without_a_repeat_gives_nothing() -> None:
    assert guessed(joined([]), [1, 2, 3, 4]).tokens == [4]
    assert guessed(joined([]), [1]).tokens == [1]


def test_long_matches_are_believed_and_belief_follows_what_came_true() -> None:
    source = joined([])
    text = [*range(20), *range(5)]
    before = guessed(source, text).chances[1]
    for token in range(5, 12):
        text = [*text, token]
        after = guessed(source, text).chances[1]
    assert after > before
    wrong = joined([])
    rng = random.Random(1)
    for _ in range(60):
        trie = guessed(wrong, text := [*text, rng.choice([1, 2])])
    assert trie.chances[1] < 0.75


def test_a_row_that_joins_copies_nothing_from_the_texts_before() -> None:
    source = joined([7, 8, 9])
    assert first_path(guessed(source, [7, 8, 9, 7]))[:2] == [8, 9]
    source.join(0, [[1, 2, 3]], None)
    assert guessed(source, [1, 2, 3, 7]).tokens == [7]


def test_a_row_takes_its_text_along() -> None:
    source = Suffixes()
    source.join(0, [[1, 2], [7, 8, 9]], None)
    tokens = [[1, 2, 5], [7, 8, 9, 7]]
    source.add_guesses(Context(tokens, torch.tensor([5, 7]), torch.zeros(2, 4)), [Trie(5), Trie(7)], 0.0)
    source.move(1, 0)
    source.drop(1)
    assert first_path(guessed(source, [7, 8, 9, 7, 8]))[:2] == [9, 7]


# --- replies that are remembered ---

REPLY = list(range(30, 30 + LEAST + 4))


def written(source: Suffixes, prompt: list[int], reply: list[int]) -> None:
    """A row that joins, is told of its text and goes."""
    source.join(0, [prompt], None)
    source.keep(Context([[*prompt, *reply]], torch.tensor([reply[-1]]), torch.zeros(1, 4)), None)
    source.drop(0)


def test_a_reply_is_copied_in_this_run_and_in_the_next(tmp_path: Path) -> None:
    file = tmp_path / "replies"
    first = Suffixes(SuffixMemory.open(file, "ours"))
    written(first, [1, 2, 3], REPLY)
    for source in (first, Suffixes(SuffixMemory.open(file, "ours"))):
        source.join(0, [[5, 6]], None)
        assert first_path(guessed(source, [5, 6, *REPLY[:3]]))[:3] == REPLY[3:6]
        source.join(0, [[5, 6]], None)
        assert guessed(source, [5, 1, 2]).tokens == [2], "prompts are nobody else's"


def test_no_copy_goes_on_from_one_reply_into_another(tmp_path: Path) -> None:
    source = Suffixes(SuffixMemory.open(tmp_path / "replies", "ours"))
    written(source, [1], REPLY)
    written(source, [1], [token + 40 for token in REPLY])
    source.join(0, [[5]], None)
    assert first_path(guessed(source, [5, *REPLY[-3:-1]])) == [REPLY[-1]]


def test_rows_that_move_are_remembered_once_each(tmp_path: Path) -> None:
    file = tmp_path / "replies"
    source = Suffixes(SuffixMemory.open(file, "ours"))
    other = [token + 20 for token in REPLY]
    source.join(0, [[1], [2]], None)
    source.keep(Context([[1, *REPLY], [2, *other]], torch.tensor([0, 0]), torch.zeros(2, 4)), None)
    source.move(1, 0)  # the first has ended
    source.drop(1)
    assert list(SuffixMemory.open(file, "ours").replies) == [REPLY]
    source.drop(0)
    assert list(SuffixMemory.open(file, "ours").replies) == [REPLY, other]


def test_the_oldest_are_forgotten_beyond_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_cli.drafters.suffix_memory.MOST", 40)
    file = tmp_path / "replies"
    memory = SuffixMemory.open(file, "ours")
    for number in range(6):
        memory.add([number] * 12)
    assert [reply[0] for reply in SuffixMemory.open(file, "ours").replies] == [3, 4, 5]
    assert len(file.read_text(encoding="utf-8").splitlines()) == 4


HEAD = json.dumps({"kind": "medusa-suffix-memory", "model": "ours"})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nonsense\n", "is no memory of replies"),
        ("[1, 2]\n", "is no memory of replies"),
        ('{"kind": "else", "model": "ours"}\n', "is no memory of replies"),
        (HEAD.replace("ours", "theirs") + "\n", r"holds replies of another model \(theirs\), and this is ours"),
        (HEAD + "\n[1, 2\n", "is damaged at line 2"),
        (HEAD + "\n[1, 2]\n[-1]\n", "is damaged at line 3"),
        (HEAD + '\n{"a": 1}\n', "is damaged at line 2"),
        (HEAD + "\n" + "[" * 5000 + "\n", "is damaged at line 2"),
    ],
)
def test_a_file_of_others_is_refused_by_name(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "replies"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=told) as raised:
        SuffixMemory.open(file, "ours")
    assert str(file) in raised.value.message
    assert file.read_text(encoding="utf-8") == text


def test_what_can_not_be_read_or_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="can't be read"):
        SuffixMemory.open(tmp_path, "ours")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="can't be read"):
        SuffixMemory.open(tmp_path / "bytes", "ours")
    memory = SuffixMemory.open(tmp_path / "nowhere" / "replies", "ours")
    with pytest.raises(DataError, match="can't be written"):
        memory.add(REPLY)


def test_the_source_is_made_for_a_target(tmp_path: Path) -> None:
    file = tmp_path / "replies"
    written(Suffixes.of(TARGET(), Wishes(memory=file)), [1], REPLY)
    assert json.loads(file.read_text(encoding="utf-8").splitlines()[0])["model"] == TARGET().fingerprint
    assert Suffixes.of(TARGET(), Wishes())._memory is None

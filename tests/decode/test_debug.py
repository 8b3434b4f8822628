"""The loop's watches: silent where all is well, and exact about where it is not."""

import json
from pathlib import Path

import pytest

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.contracts import Verdict
from medusa_cli.decode.debug import watching
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.errors import DataError, ExactnessError
from medusa_cli.model.cache import TreeCache
from tests.fakes import DRAFTERS, SHAPES
from tests.tiny_models import NUM_NEW, known, target_of, tiny_model

TARGET = target_of(tiny_model("llama"))


def parts_of(shape: str = "wide") -> Parts:
    return Parts(TARGET, DRAFTERS["random"](known("llama").texts, SHAPES[shape]), Greedy())


def write(parts: Parts) -> list[list[int]]:
    return [each.token_ids for each in collect(parts, known("llama").prompts, Limits(NUM_NEW), max_rows=2)]


def test_nothing_is_watched_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "", "0"):
        if value is not None:
            monkeypatch.setenv("MEDUSA_CHECK", value)
        with watching(TARGET) as watches:
            assert watches == []


@pytest.mark.parametrize("shape", ["wide", "dynamic", "empty"])
def test_a_sound_cache_passes_after_every_step(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_CHECK", "1")
    assert write(parts_of(shape)) == known("llama").wanted(3)


def test_a_cache_that_kept_a_loser_is_found_at_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_CHECK", "1")

    def keep_the_first_nodes(cache: TreeCache, verdict: Verdict) -> None:
        cache.commit(slice(0, len(verdict.kept)), verdict.kept)

    monkeypatch.setattr(TreeCache, "keep", keep_the_first_nodes)
    with pytest.raises(ExactnessError, match=r"step \d+, text \d: the (keys|values) of layer \d at position \d+ are"):
        write(parts_of())


def test_a_trace_has_every_token_after_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEDUSA_TRACE", str(tmp_path / "steps.jsonl"))
    texts = write(parts_of())
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").open()]
    for key, text in enumerate(texts):
        mine = [line for line in lines if line["text"] == key]
        assert [token for line in mine for token in line["tokens"]] == text[1:]
        assert [line["place"] for line in mine] == [
            1 + sum(len(line["tokens"]) for line in mine[:index]) for index in range(len(mine))
        ]


def test_a_replay_passes_with_another_tree_and_stops_at_the_first_other_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "steps.jsonl"
    monkeypatch.setenv("MEDUSA_TRACE", str(file))
    write(Parts(TARGET, NoDrafter(), Greedy()))
    monkeypatch.delenv("MEDUSA_TRACE")
    monkeypatch.setenv("MEDUSA_REPLAY", str(file))
    assert write(parts_of()) == known("llama").wanted(3)
    lines = [json.loads(line) for line in file.open()]
    changed = next(line for line in lines if line["text"] == 1 and line["place"] == 7)
    changed["tokens"][0] = (changed["tokens"][0] + 1) % 97
    file.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ExactnessError, match="text 1 parts from the trace at token 7: "):
        write(parts_of())


@pytest.mark.parametrize("content", [None, "no json", '{"text": 1}', "[1]", "[" * 10**5])
def test_what_is_no_trace_is_told(content: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("MEDUSA_REPLAY", str(file))
    with pytest.raises(DataError, match="is no trace"):
        write(parts_of())


def test_a_trace_that_can_not_be_written_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEDUSA_TRACE", str(tmp_path / "no" / "steps.jsonl"))
    with pytest.raises(DataError, match="can't write the trace"):
        write(parts_of())

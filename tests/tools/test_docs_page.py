"""Result files become the generated parts of the page: merged by set-up, the same each time, the prose untouched."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from medusa_cli.bench.baselines import Reply
from medusa_cli.bench.compare import Comparison, Divergence, Same, compare
from medusa_cli.bench.document import Run
from medusa_cli.bench.report import Setup, build_report
from medusa_cli.bench.results import columns, read_result
from medusa_cli.bench.run import Trial
from medusa_cli.errors import FormatError
from tests.bench.fakes_bench import FakeClock, no_margin, reply, timed
from tests.tools import docs_page

BEGIN, END = "<!-- bench:begin speed -->", "<!-- bench:end speed -->"
PROSE = f"# Benchmarks\n\nWritten by hand.\n\n{BEGIN}\n{END}\n\n## Noise\n\nMore by hand.\n"
RUN = {
    "date": "2026-11-30T10:00:00+00:00", "machine": "a machine, 2 cores", "versions": {"medusa": "1", "torch": "2"},
    "command": "medusa bench -o runs/one", "prompts": "abc", "num_prompts": 2, "max_new_tokens": 128, "batch_size": 1,
    "repeats": 1,
}  # fmt: skip
# 13 tokens in 3 steps, and in 12
QUICK, PLAIN = reply([4, 4, 4], 8), reply([1] * 12)


def _trials(seconds: dict[str, float], ids: Sequence[str], categories: Sequence[str]) -> list[Trial]:
    replies: dict[str, list[Reply]] = {"medusa": [QUICK] * len(ids), "greedy": [PLAIN] * len(ids)}
    replies |= {name: [PLAIN] * len(ids) for name in seconds if name not in replies}
    trials = timed(FakeClock(), {name: replies[name] for name in seconds}, seconds)
    named = {f"p{n}": (name, category) for n, (name, category) in enumerate(zip(ids, categories, strict=True))}
    return [_renamed(trial, *named[trial.prompt.id]) for trial in trials]


def _renamed(trial: Trial, name: str, category: str) -> Trial:
    prompt = type(trial.prompt)(name, category, trial.prompt.ids)
    return Trial(trial.arm, prompt, trial.repeat, trial.reply, trial.duration, trial.share)


def write_result(
    file: Path,
    seconds: dict[str, float],
    ids: Sequence[str] = ("a", "b"),
    *,
    categories: Sequence[str] = ("c0", "c1"),
    runner: str = "eager",
    divergences: Sequence[Divergence] = (),
    **run: Any,
) -> Path:
    """A result as `medusa bench --output-json` writes it."""
    trials = _trials(seconds, ids, categories)
    if divergences:
        arms = {name: Same(len(ids) - sum(row.arm == name for row in divergences), len(ids)) for name in seconds}
        comparison = Comparison({name: same for name, same in arms.items() if name != "medusa"}, divergences)
    else:
        comparison = compare(trials, "medusa", "float32", no_margin)
    report = build_report(
        Setup("tiny", "float32", "cpu", runner, 2), trials, "medusa", comparison, [], Run(**{**RUN, **run})
    )
    file.write_text(json.dumps(report.document()))
    return file


@pytest.fixture
def doc(tmp_path: Path) -> Path:
    file = tmp_path / "docs" / "benchmarks.md"
    file.parent.mkdir()
    file.write_text(PROSE)
    return file


def _write(doc: Path, *files: Path, near_ties: Path | None = None) -> str:
    assert docs_page.write_page(files, doc, near_ties) == ["speed"]
    return doc.read_text()


def _rows(text: str) -> dict[str, list[str]]:
    """Rows of the tables by their first cell."""
    lines = [line.strip("|") for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    return {first: rest for first, *rest in cells}


def test_a_result_becomes_a_table_with_machine_date_versions_and_command(doc: Path, tmp_path: Path) -> None:
    text = _write(doc, write_result(tmp_path / "a.json", {"medusa": 1.0, "greedy": 2.0}))
    rows = _rows(text)
    assert rows["measured"] == ["2026-11-30"]
    assert rows["machine"] == ["a machine, 2 cores"]
    assert rows["versions"] == ["medusa 1, torch 2"]
    assert "```\nmedusa bench -o runs/one\n```" in text
    assert rows["prompts"] == ["2"]
    assert rows["replies equal to `greedy`"] == ["2 of 2"]
    assert rows["tokens a step, with the bonus token"] == ["4.00"]
    assert rows["tokens a second"] == ["13.0"]
    assert rows["times as fast as `greedy`"] == ["2.00x (2.00 to 2.00)"]
    assert rows["c1"] == ["1", "4.00", "2.00x"]


def test_what_people_wrote_stays_and_the_same_results_make_the_same_page(doc: Path, tmp_path: Path) -> None:
    file = write_result(tmp_path / "a.json", {"medusa": 1.0, "greedy": 2.0})
    once = _write(doc, file)
    before, _, rest = once.partition(BEGIN)
    assert (before, rest.partition(END)[2]) == (PROSE.partition(BEGIN)[0], PROSE.partition(END)[2])
    assert _write(doc, file) == once
    other = _write(doc, write_result(tmp_path / "b.json", {"medusa": 1.0, "greedy": 3.0}))
    assert "3.00x" in other
    assert "2.00x" not in other


def test_parts_of_one_measurement_are_one_column_of_totals_with_the_spread_over_parts(
    doc: Path, tmp_path: Path
) -> None:
    files = [
        write_result(tmp_path / "0.json", {"medusa": 1.0, "greedy": 2.0}, ["a", "b"]),
        write_result(tmp_path / "1.json", {"medusa": 1.0, "greedy": 4.0}, ["c", "d"], date="2026-12-01T00:00:00+00:00"),
    ]
    rows = _rows(_write(doc, *files))
    assert rows["prompts"] == ["4"]
    assert rows["measured"] == ["2026-11-30 to 2026-12-01"]
    assert rows["replies equal to `greedy`"] == ["4 of 4"]
    assert rows["times as fast as `greedy`"] == ["3.00x (2.00 to 4.00)"]
    assert rows["c0"] == ["2", "4.00", "3.00x"]


def test_another_runner_is_a_column_of_its_own_and_an_arm_it_lacks_a_hole(doc: Path, tmp_path: Path) -> None:
    files = [
        write_result(tmp_path / "0.json", {"medusa": 1.0, "greedy": 2.0, "ngram": 1.5}),
        write_result(tmp_path / "1.json", {"medusa": 2.0, "greedy": 3.0}, runner="blocks"),
    ]
    rows = _rows(_write(doc, *files))
    assert rows["what"] == ["medusa, eager", "medusa, blocks"]
    assert rows["times as fast as `greedy`"] == ["2.00x (2.00 to 2.00)", "1.50x (1.50 to 1.50)"]
    assert rows["times as fast as `ngram`"] == ["1.50x (1.50 to 1.50)", ""]


def test_columns_that_differ_in_more_than_the_runner_say_in_what(doc: Path, tmp_path: Path) -> None:
    files = [
        write_result(tmp_path / "0.json", {"medusa": 1.0, "greedy": 2.0}),
        write_result(tmp_path / "1.json", {"medusa": 1.0, "greedy": 2.0}, batch_size=4),
        write_result(tmp_path / "2.json", {"medusa": 1.0, "ngram": 2.0}, batch_size=4),
    ]
    titles = _rows(_write(doc, *files))["what"]
    assert titles == [
        "medusa, eager, batch 1",
        "medusa, eager, batch 4, beside greedy",
        "medusa, eager, batch 4, beside ngram",
    ]


def test_the_faster_of_several_dtypes_is_chosen_over_all_parts(doc: Path, tmp_path: Path) -> None:
    def arms(first: float, second: float) -> dict[str, float]:
        return {"medusa": 1.0, "hf-greedy@float32": first, "hf-greedy@bfloat16": second}

    files = [
        write_result(tmp_path / "0.json", arms(4.0, 3.0), ["a", "b"]),
        write_result(tmp_path / "1.json", arms(4.0, 6.0), ["c", "d"]),
    ]
    rows = _rows(_write(doc, *files))
    assert rows["times as fast as `hf-greedy`"] == ["4.00x (4.00 to 4.00)"]
    assert "tokens a second of `hf-greedy`, the faster of float32 and bfloat16" in rows
    assert rows["replies equal to `hf-greedy@bfloat16`"] == ["4 of 4"]


def test_near_ties_are_told_with_their_gaps_and_listed_in_a_file(doc: Path, tmp_path: Path) -> None:
    parted = [Divergence("b", "greedy", 7, 0.25, "near-tie"), Divergence("a", "greedy", 3, 0.125, "near-tie")]
    file = write_result(tmp_path / "a.json", {"medusa": 1.0, "greedy": 2.0}, divergences=parted)
    ties = doc.parent / "near-ties.csv"
    text = " ".join(_write(doc, file, near_ties=ties).split())
    assert "wrote 0 of 2 replies alike. 2 part at near ties, where the gap is 0.1250 to 0.2500" in text
    assert "[near-ties.csv](near-ties.csv)" in text
    assert ties.read_text() == "prompt,arm,token,gap\na,greedy,3,0.1250\nb,greedy,7,0.2500\n"
    elsewhere = _write(doc, file, near_ties=tmp_path / "ties.csv")
    assert "ties.csv" not in elsewhere, "a link out of the folder of the page leads nowhere in a clone"


def test_a_mismatch_is_told(doc: Path, tmp_path: Path) -> None:
    parted = [Divergence("b", "greedy", 7, 2.5, "mismatch")]
    text = _write(doc, write_result(tmp_path / "a.json", {"medusa": 1.0, "greedy": 2.0}, divergences=parted))
    assert "1 part where the model was not near a tie." in text


def test_a_folder_of_a_bench_stands_for_its_result_and_one_that_has_not_ended_is_named(tmp_path: Path) -> None:
    write_result(tmp_path / "bench.json", {"medusa": 1.0, "greedy": 2.0})
    assert read_result(tmp_path).ours == "medusa"
    (tmp_path / "bench.json").unlink()
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(FormatError, match="has not ended") as caught:
        read_result(tmp_path)
    assert "goes on" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "no result of medusa bench"),
        ("{}", "no result of medusa bench: model: Field required"),
        ({"arms": {}}, "arms: Dictionary should have at least 1 item"),
        ({"threads": "many"}, "threads: "),
        ({"run": {}}, "run.date: Field required"),
        ({"identical": {}}, "greedy is compared with nothing"),
    ],
)
def test_a_bad_result_is_an_error_that_names_the_file_the_place_and_what_to_do(
    doc: Path, tmp_path: Path, content: str | dict[str, Any], said: str
) -> None:
    file = write_result(tmp_path / "a.json", {"medusa": 1.0, "greedy": 2.0})
    file.write_text(content if isinstance(content, str) else json.dumps({**json.loads(file.read_text()), **content}))
    with pytest.raises(FormatError) as caught:
        docs_page.write_page([file], doc, None)
    assert str(file) in caught.value.message
    assert said in caught.value.message
    assert "--output-json" in caught.value.hint
    assert doc.read_text() == PROSE


def test_a_prompt_in_two_parts_of_one_measurement_is_refused(tmp_path: Path) -> None:
    files = [write_result(tmp_path / name, {"medusa": 1.0, "greedy": 2.0}) for name in ("a.json", "b.json")]
    with pytest.raises(FormatError, match="the prompt a is in .*a.json and in .*b.json"):
        columns([(file, read_result(file)) for file in files])


@pytest.mark.parametrize("text", ["# No lines\n", f"{BEGIN}\nno end\n", PROSE + BEGIN, f"{END}\n{BEGIN}\n"])
def test_a_page_without_a_place_for_the_part_is_left_as_it_is(doc: Path, tmp_path: Path, text: str) -> None:
    doc.write_text(text)
    with pytest.raises(FormatError, match="no place for the part 'speed'") as caught:
        docs_page.write_page([write_result(tmp_path / "a.json", {"medusa": 1.0, "greedy": 2.0})], doc, None)
    assert BEGIN in caught.value.hint
    assert doc.read_text() == text


def test_the_program_says_what_it_wrote_and_mistakes_in_two_lines(
    doc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_result(tmp_path / "a.json", {"medusa": 1.0, "greedy": 2.0})
    docs_page.main([str(file), "--page", str(doc)])
    assert capsys.readouterr().out == f"{doc}: speed\n"
    with pytest.raises(SystemExit) as caught:
        docs_page.main([str(tmp_path / "nothing.json"), "--page", str(doc)])
    assert str(caught.value.code).splitlines()[0].startswith("error: can't read ")
    assert str(caught.value.code).splitlines()[1].startswith(" hint: ")
    with pytest.raises(SystemExit) as caught:
        docs_page.main([str(file), "--page", str(tmp_path / "nothing.md")])
    assert "nothing.md" in str(caught.value.code)


def test_the_page_of_the_project_has_a_place_for_each_part() -> None:
    text = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    assert docs_page.placed(text, {"speed": "words", "gpu": "words"}, docs_page.PAGE).count("words") >= 2

"""Result files become the generated parts of docs/benchmarks.md; what people wrote there stays as it is.

`python -m tests.tools.docs_page RESULT…` (make bench, make bench-gpu). A part stands between two lines of its own,
<!-- bench:begin NAME --> and <!-- bench:end NAME -->: `speed` is made of results of medusa bench, `gpu` of one of
tests.benchmarks.step_speed. The same results make the same text.
"""

import argparse
import csv
import io
import re
import statistics
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from medusa_cli.bench.compare import Divergence
from medusa_cli.bench.document import Report
from medusa_cli.bench.report import Table, markdown
from medusa_cli.bench.results import Column, columns, read_result
from medusa_cli.errors import FormatError, MedusaError
from medusa_cli.util.files import write_atomically
from tests.benchmarks import step_speed

PAGE = Path("docs/benchmarks.md")
_WIDTH = 118


def speed_section(found: Sequence[Column], near_ties: str | None = None) -> str:
    """The part `speed`: where the figures come from, the table of all columns, near ties, categories.

    near_ties   what the file that lists the near ties is called on this page; None when none is written
    """
    parts = [
        "### Measured by `make bench`",
        "```\n" + "\n".join(dict.fromkeys(part.run.command for one in found for part in one.parts)) + "\n```",
        markdown(_setup_table(found)),
        markdown(_speed_table(found)),
        _fill(_spread_in_words(found)),
        *(_fill(text) for one in found for text in _partings(one, near_ties)),
    ]
    if len(set(found[0].prompts.values())) > 1:
        parts += [f"By category, {_titles(found)[0]}:", markdown(_category_table(found[0]))]
    return "\n\n".join(parts)


def _titles(found: Sequence[Column]) -> list[str]:
    """What each column is called: drafter and runner, and what else tells it from another."""
    firsts = [one.first for one in found]
    facts = {
        "model": [one.model for one in firsts],
        "dtype": [one.dtype for one in firsts],
        "threads": [f"{one.threads} threads" for one in firsts],
        "batch": [f"batch {one.run.batch_size}" for one in firsts],
        "tokens": [f"{one.run.max_new_tokens} tokens" for one in firsts],
        "machine": [one.run.machine for one in firsts],
    }
    told = [values for values in facts.values() if len(set(values)) > 1]
    names = [", ".join([one.ours, one.runner, *rest]) for one, *rest in zip(firsts, *told, strict=True)]
    doubled = {name for name in names if names.count(name) > 1}
    return [
        f"{name}, beside {' and '.join(one.kinds)}" if name in doubled else name
        for name, one in zip(names, found, strict=True)
    ]


def _setup_table(found: Sequence[Column]) -> Table:
    """When, where and with what."""
    runs = [part.run for one in found for part in one.parts]
    firsts = [one.first for one in found]
    days = sorted({run.date[:10] for run in runs})
    versions = [", ".join(f"{name} {number}" for name, number in run.versions.items()) for run in runs]
    rows = [
        ("measured", days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"),
        ("machine", _listed(run.machine for run in runs)),
        ("versions", _listed(versions)),
        ("model", _listed(f"{one.model}, {one.dtype} on {one.device}, {one.threads} threads" for one in firsts)),
        ("prompt set", _listed(f"{run.num_prompts} prompts, hash {run.prompts}" for run in runs)),
        ("budget", _listed(f"{run.max_new_tokens} new tokens, greedy, batch {run.batch_size}" for run in runs)),
    ]
    return Table(("what", "value"), rows)


def _speed_table(found: Sequence[Column]) -> Table:
    """A column for each set-up."""
    kinds = list(dict.fromkeys(kind for one in found for kind in one.kinds))
    arms = list(dict.fromkeys(arm for one in found for arm in one.first.others))
    rows = [["prompts", *(str(len(one.prompts)) for one in found)]]
    rows += [[f"replies equal to `{arm}`", *(_same(one, arm) for one in found)] for arm in arms]
    rows.append(["tokens a step, with the bonus token", *(_figure(one.tokens_per_step, ".2f") for one in found)])
    rows.append(["tokens a second", *(_figure(one.tokens_per_second(one.subject), ".1f") for one in found)])
    for kind in kinds:
        names = list(dict.fromkeys(arm for arm in arms if arm.startswith(f"{kind}@")))
        which = f", the faster of {' and '.join(name.partition('@')[2] for name in names)}" if len(names) > 1 else ""
        rows.append([f"tokens a second of `{kind}`{which}", *(_speed(one, kind) for one in found)])
        rows.append([f"times as fast as `{kind}`", *(_speedup(one, kind) for one in found)])
    return Table(("what", *_titles(found)), rows)


def _category_table(one: Column) -> Table:
    """The subject in each category."""
    headers = ("category", "prompts", "tokens a step", *(f"over `{kind}`" for kind in one.kinds))
    rows = []
    for category in sorted(set(one.prompts.values())):
        speed, steps = one.category(one.subject, category)
        others = [one.category(one.fastest(kind), category)[0] for kind in one.kinds]
        ratios = [speed / other if speed and other else None for other in others]
        count = sum(found == category for found in one.prompts.values())
        rows.append([category, str(count), _figure(steps, ".2f"), *(_figure(ratio, ".2f", "x") for ratio in ratios)])
    return Table(headers, rows)


def _spread_in_words(found: Sequence[Column]) -> str:
    """What least and most are taken over."""
    several = [len(one.parts) for one in found if len(one.parts) > 1]
    over = [f"the {several[0]} parts of a run"] if several else []
    if len(several) < len(found):
        over.append("repeats, or over thirds of the prompts for one repeat")
    return f"In brackets: the least and the most over {', else over '.join(over)}. Speeds include reading the prompts."


def _partings(one: Column, near_ties: str | None) -> list[str]:
    """A sentence for each arm whose replies aren't all the same: near ties with their gaps, mismatches by number."""
    said = []
    for arm in one.first.others:
        rows, same = one.divergences(arm), one.identical(arm)
        margins = sorted(row.margin for row in rows if row.verdict == "near-tie" and row.margin is not None)
        wrong = sum(row.verdict == "mismatch" for row in rows)
        sentences = [f"{one.subject} on {one.first.runner} and `{arm}` wrote {same.same} of {same.of} replies alike."]
        if margins:
            listed = f"; all are listed in [{Path(near_ties).name}]({near_ties})" if near_ties else ""
            sentences.append(
                f"{len(margins)} part at near ties, where the gap is {margins[0]:.4f} to {margins[-1]:.4f}, "
                f"at the median {statistics.median(margins):.4f}{listed}."
            )
        if wrong:
            sentences.append(f"{wrong} part where the model was not near a tie.")
        said += [" ".join(sentences)] if rows else []
    return said


def near_ties_csv(found: Sequence[Column]) -> str:
    """Every near tie, a line each: prompt, arm, token, gap."""
    rows = {(row.id, row.arm): row for one in found for arm in one.first.others for row in one.divergences(arm)}
    ties: list[Divergence] = [rows[key] for key in sorted(rows) if rows[key].verdict == "near-tie"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("prompt", "arm", "token", "gap"))
    writer.writerows((row.id, row.arm, row.index, f"{row.margin:.4f}") for row in ties)
    return out.getvalue()


def placed(text: str, sections: Mapping[str, str], page: Path) -> str:
    """The page with these parts between their lines. Raises FormatError where the lines of a part aren't there."""
    for name, section in sections.items():
        begin, end = f"<!-- bench:begin {name} -->", f"<!-- bench:end {name} -->"
        lines = re.compile(rf"^{re.escape(begin)}\n.*?^{re.escape(end)}$", re.MULTILINE | re.DOTALL)
        found = lines.search(text)
        if text.count(begin) != 1 or text.count(end) != 1 or not found:
            raise FormatError(
                f"{page} has no place for the part '{name}'", f"add two lines, once each: {begin} and {end}"
            )
        text = f"{text[: found.start()]}{begin}\n{section}\n{end}{text[found.end() :]}"
    return text


def write_page(files: Sequence[Path], page: Path, near_ties: Path | None) -> list[str]:
    """Put what these files hold into the page; names of the parts that were written. Raises MedusaError."""
    shapes = [file for file in files if not file.is_dir() and step_speed.is_document(file)]
    if len(shapes) > 1:
        raise FormatError(f"{shapes[0]} and {shapes[1]} both are measurements of a shape", "name one of them")
    results: list[tuple[Path, Report]] = [(file, read_result(file)) for file in files if file not in shapes]
    found = columns(results)
    sections = {"speed": speed_section(found, _link(near_ties, page))} if found else {}
    if shapes:
        sections["gpu"] = step_speed.section(step_speed.read_document(shapes[0]))
    try:
        text = page.read_text(encoding="utf-8")
        changed = placed(text, sections, page)
        if near_ties and found:
            write_atomically(near_ties, near_ties_csv(found))
        if changed != text:
            write_atomically(page, changed)
    except OSError as error:
        raise MedusaError(
            f"can't write {error.filename or page}: {error.strerror}", "name a page with --page"
        ) from error
    return list(sections)


def _link(file: Path | None, page: Path) -> str | None:
    """What the file is called on the page; None for one outside the page's folder, which a clone would lack."""
    folder = page.absolute().parent
    if file is None or not file.absolute().is_relative_to(folder):
        return None
    return str(file.absolute().relative_to(folder))


def _same(one: Column, arm: str) -> str:
    if arm not in one.first.others:
        return ""
    same = one.identical(arm)
    return f"{same.same} of {same.of}"


def _speed(one: Column, kind: str) -> str:
    return _figure(one.tokens_per_second(one.fastest(kind)), ".1f") if kind in one.kinds else ""


def _speedup(one: Column, kind: str) -> str:
    """2.00x (1.90 to 2.10)."""
    if kind not in one.kinds:
        return ""
    spread = one.spread(kind)
    words = f" ({spread[0]:.2f} to {spread[1]:.2f})" if spread else ""
    return _figure(one.speedup(kind), ".2f", "x") + words


def _figure(value: float | None, form: str, unit: str = "") -> str:
    """A figure, or a dash for one that can't be had."""
    return "-" if value is None else f"{value:{form}}{unit}"


def _listed(texts: Iterable[str]) -> str:
    """Different texts, once each."""
    return "; ".join(dict.fromkeys(texts))


def _fill(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def main(args: Sequence[str] | None = None) -> None:
    """Write the page and say which parts; a user's mistake is two lines on stderr and exit code 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.docs_page", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT", help="a result file, or a bench's folder")
    parser.add_argument("--page", type=Path, default=PAGE, help=f"the page to write into [default: {PAGE}]")
    parser.add_argument("--near-ties", type=Path, metavar="FILE", help="list every near tie in a .csv file")
    asked = parser.parse_args(args)
    try:
        written = write_page(asked.results, asked.page, asked.near_ties)
    except MedusaError as error:
        sys.exit(f"error: {error.message}\n hint: {error.hint}")
    print(f"{asked.page}: {', '.join(written)}")


if __name__ == "__main__":
    main()

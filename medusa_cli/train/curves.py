"""How a training run went, read from its train.jsonl: for the picture in the run folder, and in words for the card."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_cli.util.markdown import table_of
from medusa_cli.util.plain_json import parse_json

PICTURE = "training.png"
_SHOWN_ROWS = 12
_NOTHING = "–"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Curves:
    """The rows of each kind, in the order of their steps; what a row holds is said at train/events.py's Event."""

    train: Sequence[Row]
    evaluated: Sequence[Row]
    decoded: Sequence[Row]

    @classmethod
    def read(cls, folder: Path) -> "Curves":
        """Those of a run folder; nothing where no step was logged."""
        file = folder / "train.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
        rows = [parse_json(line) for line in lines if line.endswith("}\n")]
        return cls(*([row for row in rows if row["kind"] == kind] for kind in ("train", "eval", "decode")))

    @property
    def kept_step(self) -> int | None:
        """The step whose heads decoded best, where decodes decide which heads are stored."""
        return self.decoded[-1].get("best_step") if self.decoded else None

    @property
    def stored(self) -> Row | None:
        """The decode with the heads that are stored: the best one where decodes decide, else the last."""
        kept = [row for row in self.decoded if row["step"] == self.kept_step] or list(self.decoded)
        return kept[-1] if kept else None

    def account(self) -> str:
        """A sentence on where training ended and whose heads were kept; empty when nothing was learnt."""
        if not self.train:
            return ""
        last = self.train[-1]
        done, total, kept = last["step"], last["total_steps"], self.kept_step
        ended = f"Stopped after step {done:,} of {total:,}" if done < total else f"All {total:,} steps were taken"
        if kept is None:
            return f"{ended}."
        return f"{ended}; the heads are those of step {kept:,}, which decoded best."


def as_markdown(curves: Curves, *, drawn: bool) -> str:
    """The card's account of the training: the picture where there is one, else some of its numbers."""
    shown = f"![How the heads learnt]({PICTURE})" if drawn else _table(curves)
    return "\n\n".join(part for part in (curves.account(), shown, _how_decoded(curves)) if part)


def _how_decoded(curves: Curves) -> str:
    """What the figures of decodes are, and those of the heads that are stored."""
    row = curves.stored
    if row is None:
        return ""
    return (
        f"Held-out prompts decoded after step {row['step']:,}, with a chain of all heads: {row['tokens_per_step']:.2f} "
        f"tokens a step, {row['speedup']:.2f}x plain decoding by what such a step cost there. The fitted tree differs."
    )


def _table(curves: Curves) -> str:
    """Loss and acceptance at up to _SHOWN_ROWS steps, spread evenly, the last one among them."""
    found: dict[int, dict[str, Any]] = {}
    for row in (*curves.evaluated, *curves.decoded):
        found.setdefault(row["step"], {}).update({name: value for name, value in row.items() if value is not None})
    if not found:
        return ""
    steps = _spread(sorted(found))
    heads = max(len(found[step].get("conditional_K", ())) for step in steps)
    names = ["step", "held-out loss", *(f"head {head + 1}" for head in range(heads)), "tokens a step", "speed-up"]
    table = table_of(names, [_line(step, found[step], heads) for step in steps])
    return f"Heads: how often the best guess is right where those of all heads before were.\n\n{table}"


def _line(step: int, row: Row, heads: int) -> list[str]:
    """One step's cells."""
    right = row.get("conditional_K") or [None] * heads
    figures: Iterable[float | None] = (row.get("loss"), *right, row.get("tokens_per_step"), row.get("speedup"))
    return [f"{step:,}", *(_NOTHING if figure is None else f"{figure:.2f}" for figure in figures)]


def _spread(steps: Sequence[int]) -> list[int]:
    """At most _SHOWN_ROWS of the steps, the last one among them."""
    if len(steps) <= _SHOWN_ROWS:
        return list(steps)
    return [steps[(number + 1) * len(steps) // _SHOWN_ROWS - 1] for number in range(_SHOWN_ROWS)]

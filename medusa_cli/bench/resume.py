"""What a bench has measured, kept in a folder batch by batch: one that was stopped goes on, and nothing is lost.

run.json says what is measured, on what, and since when. trials.jsonl has a line for each batch that every arm has
written. bench.json is the report of a run that ended.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError

from medusa_cli.bench.baselines import Reply
from medusa_cli.bench.document import Report
from medusa_cli.bench.origin import Origin
from medusa_cli.bench.prompt_set import BenchPrompt
from medusa_cli.bench.results import first_fault
from medusa_cli.bench.run import Trial
from medusa_cli.errors import FormatError, MedusaError
from medusa_cli.util.files import write_atomically
from medusa_cli.util.plain_json import parse_json

_ELSEWHERE = "name another folder with --output-dir"
_REPLY = ("token_ids", "finish_reason", "num_steps", "kept", "num_nodes", "draft_depth", "time_split")
_AS_REPLY = TypeAdapter(Reply)


class BenchFolder:
    """A folder that this bench may write to. Raises MedusaError when it can't be, or holds another one.

    asked   what is measured, as far as the command line and the prompts say: plain JSON
    """

    def __init__(self, path: Path, asked: Mapping[str, Any]) -> None:
        if path == Path():
            raise MedusaError("--output-dir names no folder", "give a folder of its own to this bench")
        self.path = path
        self.asked = json.loads(json.dumps(asked))
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MedusaError(f"can't write to {path}: {error.strerror}", _ELSEWHERE) from error
        self._found = _read(path / "run.json")
        if "asked" not in self._found and any(not file.name.startswith(".") for file in path.iterdir()):
            raise MedusaError(f"{path} holds something else than a bench", _ELSEWHERE)
        self._origin = _origin(path / "run.json", self._found) if self._found else None
        self._refuse_other("asked", self.asked)

    @property
    def report(self) -> Report | None:
        """The report of a run that ended; None while there is more to measure. Raises FormatError."""
        file = self.path / "bench.json"
        if not (found := _read(file)):
            return None
        try:
            return Report.model_validate(found)
        except ValidationError as error:
            raise FormatError(
                f"{file} is no report of a bench: {first_fault(error)}",
                "delete it: the same command makes it anew of the replies kept here",
            ) from error

    @contextmanager
    def to_itself(self) -> Iterator[None]:
        """No other bench writes here meanwhile. Raises MedusaError when one does."""
        try:
            # the system drops the lock of a process that dies
            lock = FileLock(self.path / ".lock").acquire(blocking=False)
        except Timeout as error:
            raise MedusaError(
                f"another bench is writing to {self.path}", f"wait until it ends, or {_ELSEWHERE}"
            ) from error
        with lock:
            yield

    def claim(self, on: Mapping[str, Any], origin: Origin) -> Origin:
        """Mark the folder as this bench's, run by these models here; the origin of what it holds.

        Raises MedusaError when a part was measured otherwise: seconds of two machines don't go into one figure.
        """
        where = json.loads(json.dumps({**on, "machine": origin.machine, "versions": origin.versions}))
        if self._origin is not None:
            self._refuse_other("on", where)
            return self._origin
        mark = {"asked": self.asked, "on": where, "origin": asdict(origin)}
        self._write("run.json", mark)
        return origin

    def finish(self, report: Report) -> None:
        """Keep the report. Raises MedusaError."""
        self._write("bench.json", report.document())

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        try:
            write_atomically(self.path / name, json.dumps(content, indent=2, allow_nan=False) + "\n")
        except OSError as error:
            raise _full(self.path / name, error) from error

    def _refuse_other(self, part: str, ours: Mapping[str, Any]) -> None:
        theirs = self._found.get(part, {})
        differing = [name for name in ours if self._found and theirs.get(name) != ours[name]]
        if differing:
            raise MedusaError(
                f"{self.path} is a bench with other settings: {', '.join(differing)}",
                f"{_ELSEWHERE}, or go back to the settings it was begun with",
            )


class KeptTrials:
    """The batches of trials.jsonl. Raises FormatError for a line that is no batch of these prompts and arms.

    A last line that a kill cut off is dropped: that batch runs again, on every arm.
    """

    def __init__(self, folder: Path, prompts: Sequence[BenchPrompt], arms: Iterable[str]) -> None:
        self._file = folder / "trials.jsonl"
        self._held: dict[tuple[int, int], list[Trial]] = {}
        if not self._file.exists():
            return
        content = self._file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        by_id, wanted = {prompt.id: prompt for prompt in prompts}, set(arms)
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                batch = parse_json(line)
                trials = [_trial(one, batch["repeat"], by_id) for one in batch["trials"]]
                if {trial.arm for trial in trials} != wanted:
                    raise ValueError(f"not every arm of {', '.join(sorted(wanted))}, or another one")
                self._held[batch["repeat"], batch["batch"]] = trials
            except (ValueError, TypeError, KeyError, IndexError) as error:
                raise FormatError(
                    f"{self._file}, line {number} is no batch of this bench ({_in_a_line(error)})",
                    "delete that line, and the same command measures the batch again",
                ) from error
        if len(whole) < len(content):
            os.truncate(self._file, len(whole))

    @property
    def num_replies(self) -> int:
        """Replies that are there."""
        return sum(map(len, self._held.values()))

    def held(self, repeat: int, batch: int) -> list[Trial] | None:
        """What every arm wrote for this batch; None when it isn't there yet."""
        return self._held.get((repeat, batch))

    def keep(self, repeat: int, batch: int, trials: Sequence[Trial]) -> None:
        """Add a batch that every arm has written. Raises MedusaError, and then the file is as before."""
        content = {"repeat": repeat, "batch": batch, "trials": [_row(trial) for trial in trials]}
        line = json.dumps(content, allow_nan=False) + "\n"
        before = self._file.stat().st_size if self._file.exists() else 0
        try:
            with self._file.open("ab") as stream:
                stream.write(line.encode())
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            if self._file.exists():
                os.truncate(self._file, before)
            raise _full(self._file, error) from error


def _row(trial: Trial) -> dict[str, Any]:
    """A trial as JSON."""
    reply = {name: getattr(trial.reply, name) for name in _REPLY}
    reply["time_split"] = dict(trial.reply.time_split)
    return {"arm": trial.arm, "prompt": trial.prompt.id, "duration": trial.duration, "share": trial.share, **reply}


def _trial(row: Mapping[str, Any], repeat: int, prompts: Mapping[str, BenchPrompt]) -> Trial:
    """The trial that `_row` wrote. Raises one of the errors that `KeptTrials` catches."""
    reply = _AS_REPLY.validate_python({name: row[name] for name in _REPLY})
    duration, share = float(row["duration"]), float(row["share"])
    seconds = (duration, share, *reply.time_split.values())
    if not all(math.isfinite(each) and each >= 0 for each in seconds):
        raise ValueError("seconds that no clock shows")
    return Trial(row["arm"], prompts[row["prompt"]], repeat, reply, duration, share)


def _origin(file: Path, mark: Mapping[str, Any]) -> Origin:
    """The origin that run.json holds. Raises FormatError when it isn't what `claim` writes."""
    try:
        if not all(isinstance(mark[part], dict) for part in ("asked", "on", "origin")):
            raise ValueError("asked, on or origin is no JSON object")
        return TypeAdapter(Origin).validate_python(mark["origin"])
    except (KeyError, ValueError) as error:
        raise FormatError(f"{file} is no mark of a bench ({_in_a_line(error)})", _ELSEWHERE) from error


def _in_a_line(error: Exception) -> str:
    """What is wrong, without the lines of advice that a validator adds."""
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:3])
    return " ".join(str(error).split())


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is no such file. Raises FormatError."""
    if not file.exists():
        return {}
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        raise FormatError(f"{file} can't be read: {error}", _ELSEWHERE) from error
    return content


def _full(file: Path, error: OSError) -> MedusaError:
    return MedusaError(
        f"can't write {file}: {error.strerror}", "free some space and run the same command again: it goes on"
    )

"""The run folder and what it belongs to: run.json says with which model, data and settings it was started.

run.json holds {"fingerprint", "runner", "seed", "data", "training", "order"}: the settings that decide what is written,
what `auto` was, and, once training has begun, the settings that decide what is learnt, and "keys" when samples were
split in the order of their keys.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from filelock import FileLock, Timeout

from medusa_cli.config.recipe import DataSettings, Recipe, TargetSettings
from medusa_cli.errors import DataError, MedusaError, TrainingError
from medusa_cli.train.checkpoint import Checkpoints, RunIdentity, learning_settings, recipe_hash
from medusa_cli.util.files import parts_beside, parts_in, write_atomically
from medusa_cli.util.paths import expanded
from medusa_cli.util.plain_json import parse_json
from medusa_cli.util.sealed import sha256_of

# Settings of the data that may change from run to run: more samples are written to those that are there.
FREE_DATA = {
    "num_samples", "rows", "workers", "held_out", "streaming", "on_bad_row", "server_timeout", "server_tries",
    "max_disk_gb",
}  # fmt: skip


@dataclass(frozen=True)
class RunFolder:
    """A folder that this recipe may write to."""

    path: Path
    recipe: Recipe
    found: Mapping[str, Any]
    wanted: Mapping[str, Any]

    @contextmanager
    def to_itself(self) -> Iterator[None]:
        """No other run writes here meanwhile, and files that a kill left half-written are gone.

        Raises TrainingError when another run does, or has since this folder was looked at.
        """
        try:
            # the system drops the lock of a process that dies
            lock = FileLock(self.path / _LOCK).acquire(blocking=False)
        except Timeout as error:
            raise TrainingError(
                f"another run is writing to {self.path}", "wait until it ends, or choose another --output-dir"
            ) from error
        with lock:
            if _found(self.path) != self.found:
                raise TrainingError(f"another run has just written to {self.path}", "run the same command again")
            for left in _left_over(self.path):
                left.unlink(missing_ok=True)
            try:
                yield
            except MedusaError:
                self._leave()
                raise

    def _leave(self) -> None:
        """Take the folder away again when nothing was written there: a run that never began leaves none."""
        with suppress(OSError):  # it holds something, or is gone
            if [each.name for each in self.path.iterdir()] == [_LOCK]:
                (self.path / _LOCK).unlink()
                self.path.rmdir()

    @property
    def target_settings(self) -> TargetSettings:
        """The recipe's, with the runner this run began with where they say auto: states have its last bits."""
        asked, before = self.recipe.target, self.found.get("runner")
        movable = asked.runner == "auto" and asked.quantize == "none" and asked.device_map == "one"
        if not movable or before not in get_args(TargetSettings.model_fields["runner"].annotation):
            return asked
        return asked.model_copy(update={"runner": before})

    def claim(self, fingerprint: str, runner: str = "auto") -> None:
        """Mark the folder as this recipe's and this model's. Raises TrainingError when it is another model's."""
        theirs = self.found.get("fingerprint", fingerprint)
        if theirs != fingerprint:
            raise TrainingError(
                f"{self.path} was started with a model of the fingerprint {theirs}; this one's is {fingerprint}",
                "choose another --output-dir, or the model it was started with",
            )
        before = {"training": self.found.get("training"), "order": self.found.get("order")}
        self._mark({**self.wanted, "fingerprint": fingerprint, "runner": runner, **before})

    @property
    def by_keys(self) -> bool:
        """Samples are split in the order of their keys; not so where checkpoints were learnt from another order."""
        return self.found.get("order") == "keys" or not self.checkpoints("").exists()

    def begin_training(self, fingerprint: str, runner: str = "auto") -> None:
        """Note the settings that the checkpoints will depend on."""
        marks = {"training": learning_settings(self.recipe), "order": "keys" if self.by_keys else None}
        self._mark({**self.wanted, "fingerprint": fingerprint, "runner": runner, **marks})

    def checkpoints(self, fingerprint: str) -> Checkpoints:
        """The states of the training run in this folder."""
        return Checkpoints(self.path, RunIdentity(recipe_hash(self.recipe), fingerprint))

    def _mark(self, content: Mapping[str, Any]) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path / "run.json", json.dumps(content, indent=2) + "\n")
        except OSError as error:
            raise TrainingError(f"can't write to {self.path}: {error.strerror}", _ELSEWHERE) from error


_LOCK = ".lock"
FILES = (
    "run.json", "heads.safetensors", "heads.json", "tree.json", "accuracy.json", "train.jsonl", "training.png",
    "provenance.json", "README.md",
)  # fmt: skip
FOLDERS = ("written", "checkpoints", "joint", "adapter")
"""What a run writes, right in its folder."""


def _left_over(path: Path) -> list[Path]:
    """What killed writers of this run's files left: in its own folders, and right in `path` beside its own names."""
    ours = [folder for name in FOLDERS for folder in (path / name, *(path / name).glob("*")) if folder.is_dir()]
    own = [folder for folder in ours if not folder.is_symlink()]
    beside = [part for name in FILES for part in parts_beside(path / name)]
    return beside + [part for folder in own for part in parts_in(folder)]


def _refuse_others_files(path: Path) -> None:
    """Raise TrainingError for a folder without a run that holds something else: a model, a project, heads of others."""
    if (path / "run.json").is_file() or not path.is_dir():
        return
    theirs = sorted(each.name for each in path.iterdir() if not each.name.startswith(".") and each.name not in FOLDERS)
    if theirs:
        more = f" and {len(theirs) - 1} more" if len(theirs) > 1 else ""
        raise TrainingError(
            f"{path} holds {theirs[0]}{more}, which no run of medusa wrote: nothing there is replaced",
            "name a new or an empty folder with --output-dir",
        )


_ELSEWHERE = "choose another --output-dir, or free some space"


def open_folder(recipe: Recipe, *, resume: bool) -> RunFolder:
    """The run folder, as far as can be told before the model is loaded.

    Raises TrainingError when it is another run's, needs `resume` or can't be written, and DataError when the recipe's
    data set is a file that can't be read.
    """
    path = expanded(recipe.output_dir)
    _refuse_others_files(path)
    wanted = {"seed": recipe.seed, "data": _data_identity(recipe)}
    folder = RunFolder(path, recipe, _found(path), wanted)
    _check_data(folder)
    if folder.checkpoints("").exists():
        _check_training(folder, resume)
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / _LOCK).touch()  # run.json is whole or not there
    except OSError as error:
        raise TrainingError(f"can't write to {path}: {error.strerror}", _ELSEWHERE) from error
    return folder


def _data_identity(recipe: Recipe) -> dict[str, Any]:
    """What decides which samples there are; a file counts by what it holds, wherever it lies."""
    settings: dict[str, Any] = recipe.data.model_dump(mode="json", exclude=FREE_DATA)
    if recipe.data.server:
        settings["answers_from"] = "a server"  # the same one may listen elsewhere tomorrow
    file = expanded(recipe.data.dataset)
    if recipe.data.dataset != "self" and file.is_file():
        try:
            settings["dataset"] = f"sha256:{sha256_of(file)}"
        except OSError as error:
            raise DataError(f"can't read {file}: {error.strerror}", "name a readable file") from error
    return settings


def _found(path: Path) -> dict[str, Any]:
    """run.json of a folder that was used before; nothing when there is none yet. Raises TrainingError."""
    mark = path / "run.json"
    if not mark.is_file():
        return {}
    try:
        text = mark.read_text(encoding="utf-8")
        content = parse_json(text or "{}")
    except (OSError, ValueError) as error:
        raise TrainingError(f"{mark} can't be read: {error}", _MARK) from error
    if not isinstance(content, dict) or not isinstance(content.get("data", {}), dict):
        raise TrainingError(f"{mark} is damaged: it names no settings", _MARK)
    # alone, an empty one is of a run that was killed at its start
    if not content and any((path / name).exists() for name in ("written", "checkpoints")):
        raise TrainingError(f"{mark} is empty, so whose run this is can't be told", _MARK)
    return content


_MARK = "put run.json back, or choose another --output-dir"


def _check_data(folder: RunFolder) -> None:
    """Raise TrainingError when the folder holds samples that other settings made."""
    if not folder.found:
        return
    # a setting that run.json doesn't know had its default
    theirs = DataSettings().model_dump(mode="json", exclude=FREE_DATA) | folder.found.get("data", {})
    differing = _differing(folder.wanted["data"], theirs)
    if folder.found.get("seed") != folder.recipe.seed:
        differing.append("seed")
    if "dataset" in differing and str(theirs.get("dataset", "")).startswith("sha256:"):
        raise TrainingError(
            f"{folder.path} was started with another content of the data set than {folder.recipe.data.dataset} holds",
            "choose another --output-dir, or give the file it was started with",
        )
    if differing:
        names = ", ".join(name if name == "seed" else f"data.{name}" for name in differing)
        raise TrainingError(
            f"{folder.path} is a run with other settings: {names}",
            "choose another --output-dir, or go back to the settings it was started with",
        )


def _check_training(folder: RunFolder, resume: bool) -> None:
    """Raise TrainingError unless the checkpoints are of these settings and going on is asked for."""
    trained = folder.found.get("training")
    differing = _differing(learning_settings(folder.recipe), trained) if trained else []
    if differing:
        raise TrainingError(
            f"{folder.path} was trained with other settings: {', '.join(differing)}",
            f"go back to them, or delete {folder.path / 'checkpoints'} to train anew on what is written there",
        )
    if not resume:
        raise TrainingError(
            f"{folder.path} holds a run that was started before",
            "go on with --resume-from-checkpoint, or choose another --output-dir",
        )


def _differing(wanted: Mapping[str, Any], found: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the settings that are not the same."""
    names = []
    for name in wanted.keys() | found.keys():
        ours, theirs = wanted.get(name), found.get(name)
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            names += _differing(ours, theirs, f"{prefix}{name}.")
        elif ours != theirs:
            names.append(prefix + name)
    return sorted(names)

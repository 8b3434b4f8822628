"""Saved states a training run goes on from, bit for bit, after a stop or a kill at any moment.

A checkpoint is one file, checkpoints/step-NNNNNNNN.pt, written beside and renamed, so it is whole or absent; the last
two are kept. The run's log, train.jsonl, is cut back to the step a run goes on from. This file knows no loss.
"""

import hashlib
import io
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_cli.config.recipe import Recipe
from medusa_cli.errors import TrainingError
from medusa_cli.heads.base import Heads
from medusa_cli.train.early_stopping import Best
from medusa_cli.util.files import write_atomically
from medusa_cli.util.plain_json import parse_json

_VERSION = 1
_KEPT = 2
# What may change between a stop and going on: where things are kept and shown, and how the target is run.
_FREE: dict[str, Any] = {
    "output_dir": True,
    "target": {"device", "device_map", "runner", "attention"},
    # what these change is which samples there are: run.json holds them, and the runs are told apart by it
    "data": {
        "dataset_config",
        "streaming",
        "on_bad_row",
        "answers_from",
        "server_model",
        "server_temperature",
        "server_timeout",
        "server_tries",
        "max_disk_gb",
    },
    # in how many pieces a step's gradient is taken changes it by rounding only
    "train": {"report_to", "save_steps", "eval_steps", "micro_batch_size", "states"},
    # the heads learn alone first: an adapter that learns with them afterwards changes nothing of that
    "lora": True,
}


# settings that came later, as they were before
_LATER: dict[str, Any] = {"losses": {"ce": 1.0, "l1": 0.0, "kl": 0.0}, "place_share": 1.0, "clip": None}


def learning_settings(recipe: Recipe) -> dict[str, Any]:
    """Every setting that changes what is learned, as JSON holds it."""
    settings: dict[str, Any] = recipe.model_dump(mode="json", exclude=_FREE)
    if recipe.target.quantize == "none":  # said only where it changes something: folders made without it go on
        del settings["target"]["quantize"]
    for name, default in _LATER.items():  # likewise
        if settings["train"][name] == default:
            del settings["train"][name]
    if recipe.train.patience is None:  # decodes decide nothing then
        del settings["train"]["patience"], settings["train"]["decode_steps"]
    return settings


def recipe_hash(recipe: Recipe) -> str:
    """A short hash of every setting that changes what is learned."""
    settings = learning_settings(recipe)
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class RunIdentity:
    """What a run folder belongs to: the recipe's hash and the target's fingerprint."""

    recipe: str
    fingerprint: str


@dataclass(frozen=True)
class TrainState:
    """Everything that changes while training: modules are read on saving and filled on restoring.

    order    what the order of examples depends on; a run only goes on with an equal one
    best     the heads that decoded best, where these are kept
    adapter  parameters by name that learn beside the heads
    """

    heads: Heads
    optimizer: torch.optim.Optimizer
    order: Mapping[str, int | float]
    best: Best | None = None
    adapter: Mapping[str, Tensor] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path, identity: RunIdentity) -> None:
        self.folder = folder / "checkpoints"
        self.identity = identity

    def save(self, step: int, state: TrainState) -> Path:
        """Save the state after `step` steps and drop all but the last two.

        Raises TrainingError when the disk takes no more; the earlier checkpoints are then untouched.
        """
        content = {
            "version": _VERSION,
            "step": step,
            "recipe": self.identity.recipe,
            "fingerprint": self.identity.fingerprint,
            "order": dict(state.order),
            "heads": state.heads.state_dict(),
            "optimizer": state.optimizer.state_dict(),
            "generators": _generators(),
            "best": state.best.content() if state.best else None,
        }
        if state.adapter:
            content["adapter"] = {name: value.detach() for name, value in state.adapter.items()}
        buffer = io.BytesIO()
        torch.save(content, buffer)
        path = self.folder / f"step-{step:08d}.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, buffer.getbuffer())
            for old in self._files()[:-_KEPT]:
                old.unlink()
        except OSError as error:
            raise TrainingError(
                f"can't save step {step} to {self.folder}: {error}",
                "the checkpoint before is whole: free some space, then go on with --resume-from-checkpoint",
            ) from error
        return path

    @property
    def newest_step(self) -> int:
        """The step of the newest checkpoint, whole or not; 0 when there is none."""
        files = self._files()
        return int(files[-1].stem.partition("-")[2]) if files else 0

    def restore(self, state: TrainState) -> int:
        """Fill `state` from the newest whole checkpoint and return its step; 0 when there is none.

        Raises TrainingError when the folder is another recipe's or model's, or no checkpoint in it can be read.
        """
        files = self._files()
        if not files:
            return 0
        contents = (content for file in reversed(files) if (content := _read(file)) is not None)
        content = next(contents, None)
        if content is None:
            raise TrainingError(f"no checkpoint in {self.folder} can be read", "delete the folder to start anew")
        self._check(content, state)
        state.heads.load_state_dict(content["heads"])
        with torch.no_grad():
            for name, parameter in state.adapter.items():
                parameter.copy_(content["adapter"][name])
        state.optimizer.load_state_dict(content["optimizer"])
        _set_generators(content["generators"])
        if state.best is not None:
            state.best.fill(content["best"])
        return int(content["step"])

    def exists(self) -> bool:
        """True when the folder holds a checkpoint to go on from."""
        return bool(self._files())

    def _files(self) -> list[Path]:
        """All checkpoints, the oldest first."""
        return sorted(self.folder.glob("step-*.pt"))

    def _check(self, content: Mapping[str, Any], state: TrainState) -> None:
        """Raise TrainingError unless the checkpoint is of this run."""
        hint = "choose another --output-dir, or go back to the settings the run was started with"
        for what, found, wanted in (
            ("checkpoint version", content["version"], _VERSION),
            ("recipe", content["recipe"], self.identity.recipe),
            ("model", content["fingerprint"], self.identity.fingerprint),
            ("training set", content["order"], dict(state.order)),
        ):
            if found != wanted:
                raise TrainingError(f"{self.folder} is of another {what}: {found}, not {wanted}", hint)


class TrainLog:
    """train.jsonl: one line for each thing that happened, in order, each step's lines once."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "train.jsonl"

    def rewind(self, step: int) -> bool:
        """Drop what was written about steps after `step`, and lines that can't be read: one cut short by a kill.

        Says whether what is left ends with the news that `step` was saved. Raises TrainingError.
        """
        try:
            lines = self.file.read_bytes().splitlines(keepends=True) if self.file.exists() else []
            kept = [(line, news) for line in lines if (news := _news(line)) and news["step"] <= step]
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.file, b"".join(line for line, _ in kept))
        except OSError as error:
            raise _log_error(self.file, error) from error
        return bool(kept) and (kept[-1][1].get("kind"), kept[-1][1]["step"]) == ("save", step)

    def append(self, values: Mapping[str, Any]) -> None:
        """Add one line; `values` has a "step". Raises TrainingError."""
        try:
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(dict(values)) + "\n")
        except OSError as error:
            raise _log_error(self.file, error) from error


def _news(line: bytes) -> dict[str, Any] | None:
    """What a line of the log tells; None when it tells nothing."""
    try:
        values = parse_json(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return values if isinstance(values, dict) and isinstance(values.get("step"), int) else None


def _log_error(file: Path, error: OSError) -> TrainingError:
    """The error for a log that takes no more lines."""
    return TrainingError(f"can't write {file}: {error}", "free some space, then go on with --resume-from-checkpoint")


def _read(file: Path) -> dict[str, Any] | None:
    """A checkpoint's content; None when the file is damaged, which a copy can be though a save can't."""
    held = io.BytesIO(file.read_bytes())  # what the disk refuses is no damage
    try:
        content = torch.load(held, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError):
        return None
    return content if isinstance(content, dict) and "version" in content else None


def _generators() -> dict[str, Any]:
    """The states of torch's global generators."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def _set_generators(states: Mapping[str, Any]) -> None:
    """Go on drawing where the saved run stopped; a run moved to a machine without its GPUs keeps the CPU's state."""
    torch.set_rng_state(states["cpu"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])

"""Curves to Weights & Biases. Needs the package wandb, which is asked for when a run is to be reported."""

import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from medusa_cli.errors import TrainingError
from medusa_cli.util.optional import need

START_SECONDS = 300.0
"""Its helper process may take that long to start; the package's own limit is too short for a machine that is busy."""


class WandbReporter:
    """A run of its own, which stays in ./wandb (or $WANDB_DIR) with WANDB_MODE=offline."""

    def __init__(self, project: str, config: Mapping[str, Any]) -> None:
        """Raises TrainingError when it can't start, and asks nothing: no key, no network, no answer in time."""
        wandb = self._wandb = need("wandb", "wandb")
        # silent for the whole package: then it raises where a key is missing instead of asking for one
        settings = wandb.Settings(silent=True, x_service_wait=START_SECONDS)
        name = secrets.token_hex(8)
        try:
            wandb.setup(settings)
            self._run = wandb.init(project=project, config=dict(config), settings=settings, id=name)
        except (wandb.Error, OSError) as error:
            wandb.teardown()  # what it read from the environment would stay for the next run of this process
            _take_away(name)
            raise TrainingError(
                f"Weights & Biases can't start: {error}",
                "log in with `wandb login`, set WANDB_MODE=offline, or leave out --report-to",
            ) from error

    @property
    def offline_folder(self) -> Path | None:
        """Where a run lies that was sent nowhere; None for one that was sent."""
        return Path(self._run.dir).parent if self._run.offline else None

    def close(self) -> None:
        """Hand in what is not written yet, and wait until it is."""
        self._run.finish()
        # finish asks the helper process to write its last buffer and doesn't wait: only the process's end says it did
        self._wandb.teardown()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take the named numbers of a step."""
        self._run.log(dict(values), step=step)


def _take_away(name: str) -> None:
    """What a run of this name that never started left in ./wandb, and that folder if nothing else is in it."""
    place = Path(os.environ.get("WANDB_DIR") or ".") / "wandb"
    for left in place.glob(f"*run-*-{name}"):
        shutil.rmtree(left, ignore_errors=True)
    with suppress(OSError):  # there is none, or it holds other runs
        for link in place.iterdir():
            if link.is_symlink() and not link.exists():
                link.unlink()
        place.rmdir()

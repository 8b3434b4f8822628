"""Curves to Weights & Biases. Needs the package wandb, which is asked for when a run is to be reported."""

from collections.abc import Mapping
from typing import Any

from medusa_cli.errors import TrainingError
from medusa_cli.lazy import need

START_SECONDS = 300.0
"""Its helper process may take that long to start; the package's own limit is too short for a machine that is busy."""


class WandbReporter:
    """A run of its own, which stays in ./wandb (or $WANDB_DIR) with WANDB_MODE=offline."""

    def __init__(self, project: str, config: Mapping[str, Any]) -> None:
        """Raises TrainingError when it can't start, and asks nothing: no key, no network, no answer in time."""
        wandb = self._wandb = need("wandb", "wandb")
        # silent for the whole package: then it raises where a key is missing instead of asking for one
        settings = wandb.Settings(silent=True, x_service_wait=START_SECONDS)
        try:
            wandb.setup(settings)
            self._run = wandb.init(project=project, config=dict(config), settings=settings)
        except (wandb.Error, OSError) as error:
            wandb.teardown()  # what it read from the environment would stay for the next run of this process
            raise TrainingError(
                f"Weights & Biases can't start: {error}",
                "log in with `wandb login`, set WANDB_MODE=offline, or leave out --report-to",
            ) from error

    def close(self) -> None:
        """Hand in what is not written yet, and wait until it is."""
        self._run.finish()
        # finish asks the helper process to write its last buffer and doesn't wait: only the process's end says it did
        self._wandb.teardown()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take the named numbers of a step."""
        self._run.log(dict(values), step=step)

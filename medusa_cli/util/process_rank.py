"""Which of several processes this one is, by the names that torchrun and accelerate launch leave in the environment.

Imports no torch: the command line asks it before anything heavy is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from medusa_cli.errors import TrainingError


@dataclass(frozen=True)
class Place:
    """This process's place among those that were launched together; one process alone is 0 of 1.

    rank, size              among all
    local_rank, local_size  among those on this machine
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes, prints and decides."""
        return self.rank == 0


def place_of(environment: Mapping[str, str]) -> Place:
    """The place a launcher gave this process. Raises TrainingError for names that contradict each other."""
    size = _number(environment, "WORLD_SIZE", 1)
    if size <= 1:
        return Place()
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise TrainingError(
            f"WORLD_SIZE={size} in the environment promises {size} processes, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set",
            "launch with torchrun or accelerate, or unset WORLD_SIZE to train in one process",
        )
    rank = _number(environment, "RANK", 0)
    local_rank = _number(environment, "LOCAL_RANK", 0)
    local_size = _number(environment, "LOCAL_WORLD_SIZE", local_rank + 1)
    if not (rank < size and local_rank < local_size <= size):
        raise TrainingError(
            f"RANK={rank}, WORLD_SIZE={size}, LOCAL_RANK={local_rank} and LOCAL_WORLD_SIZE={local_size} in the "
            "environment contradict each other",
            "launch with torchrun or accelerate",
        )
    return Place(rank, size, local_rank, local_size)


def follows(environment: Mapping[str, str]) -> bool:
    """Whether another process speaks for this one."""
    return environment.get("WORLD_SIZE", "1") != "1" and environment.get("RANK", "0") != "0"


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    """A number in the environment. Raises TrainingError when it is none."""
    text = environment.get(name, str(default))
    if not (text.isascii() and text.isdigit()):
        raise TrainingError(f"{name}={text} in the environment is no number", "launch with torchrun or accelerate")
    return int(text)

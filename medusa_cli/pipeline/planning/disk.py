"""Does what a run keeps fit on the disk, and under the recipe's cap? Asked before the first forward.

Hidden states are what takes room: H numbers of 16 bits for each token. `data.max_disk_gb` bounds them.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from medusa_cli.config.recipe import DataSettings
from medusa_cli.data.conversations import Message
from medusa_cli.decode.chat import ids_of
from medusa_cli.errors import TrainingError
from medusa_cli.pipeline.data_context import Stage
from medusa_cli.train.store import DATA, TAPS, bytes_per_place

GB = 10**9
# two checkpoints are kept while a third is written: weights and AdamW's two moments; and the heads themselves
COPIES_AT_ONCE = 3 * 3 + 1


@dataclass(frozen=True)
class Disk:
    """Bytes of hidden states, with the ids and flags beside them, and what there is for them.

    states   all that a run may keep, those included that are there
    missing  what of it is still to be written, at most
    cap      what the recipe allows; None: as much as is free
    free     on the run folder's disk now
    """

    states: int
    missing: int
    cap: int | None
    free: int

    @property
    def fault(self) -> str | None:
        """What keeps the run from starting, in words; None when nothing is missing or there is room."""
        if not self.missing:
            return None
        if self.cap is not None and self.states > self.cap:
            return f"the hidden states may take {in_gb(self.states)}; data.max_disk_gb allows {in_gb(self.cap)}"
        if self.missing > self.free:
            return f"the hidden states may take {in_gb(self.missing)} more, and {in_gb(self.free)} are free"
        return None


def disk_of(data: DataSettings, folder: Path, there: int, missing: int) -> Disk:
    """The room for states, `there` bytes of which are in the run folder and `missing` may join them."""
    cap = None if data.max_disk_gb is None else int(data.max_disk_gb * GB)
    return Disk(there + missing, missing, cap, free_on_disk(folder))


def check_states(stage: Stage, store: Path, tokens: int) -> None:
    """Raise TrainingError, with the numbers, when so many more tokens at most don't fit into a store of states."""
    disk = disk_of(stage.recipe.data, stage.folder, stored_bytes(store), tokens * bytes_a_token(stage))
    if disk.fault:
        raise TrainingError(
            disk.fault,
            "fewer samples (--num-samples) or shorter ones (--max-seq-length, data.max_answer_tokens) take less; "
            "free some space, or raise data.max_disk_gb",
        )


def check_answers(stage: Stage, wanted: int) -> None:
    """As `check_states`, before a prompt is written or a server asked: every answer may be as long as is allowed."""
    store = stage.folder / ("read" if stage.recipe.data.server else "answers")
    # of its own answer the target keeps the states alone that decided it, for most heads; other answers are read with
    # their prompts
    data = stage.recipe.data
    longest = stage.answer_tokens + 1
    if data.server or stage.inner is not None:
        longest = stage.longest_text
        if data.dataset == "self" and not data.server:
            around = len(ids_of(stage.target, [Message("user", "")]))
            longest = min(longest, around + data.max_prompt_tokens + stage.answer_tokens)
    check_states(stage, store, max(0, wanted - stored_samples(store)) * longest)


def check_training(heads: nn.Module, folder: Path) -> None:
    """Raise TrainingError when the checkpoints of these heads would not fit beside what is in the run folder."""
    numbers = sum(parameter.numel() * parameter.element_size() for parameter in heads.parameters())
    there = sum(file.stat().st_size for file in folder.glob("checkpoints/step-*.pt"))
    needed, free = COPIES_AT_ONCE * numbers - there, free_on_disk(folder)
    if needed > free:
        raise TrainingError(
            f"checkpoints and heads take {in_gb(needed)}, and {in_gb(free)} are free in {folder}",
            "free some space and run the same command again: what is written there is kept",
        )


def bytes_a_token(stage: Stage) -> int:
    """Bytes that a token takes in a store."""
    inner = stage.inner
    return sum(bytes_per_place(stage.target.hidden_size, inner.width if inner else 0).values())


def stored_samples(store: Path) -> int:
    """Whole samples that are there."""
    return count_lines(store / "samples.jsonl")


def count_lines(file: Path) -> int:
    """Whole lines of a file; 0 when it is not there."""
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def stored_bytes(store: Path) -> int:
    """Bytes of states, ids and flags that are there."""
    return sum((store / name).stat().st_size for name in (*DATA, TAPS) if (store / name).is_file())


def free_on_disk(folder: Path) -> int:
    """Bytes that may be written below this folder, which needn't be there yet."""
    there: Sequence[Path] = [folder.absolute(), *folder.absolute().parents]
    return shutil.disk_usage(next(place for place in there if place.exists())).free


def in_gb(size: int) -> str:
    """Bytes for people."""
    return f"{size / GB:.3g} GB"

"""What a target is called, and which weights it holds: whatever is remembered of a model goes by it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Identity:
    """What a target is called and which weights it holds.

    adapter   the folder of what was merged into them, if any
    files     what tells the files they came from, if they came from files (`fetch.weights_identity`)
    rows      a hash over numbers of every row of the embeddings and of the output matrix
    dtype     what its linear layers multiply in, where that isn't the dtype of the other numbers
    """

    name: str
    fingerprint: str
    runner: str
    attention: str
    licence: str | None = None
    adapter: Path | None = None
    files: str | None = None
    rows: str | None = None
    dtype: str | None = None

"""`medusa cache`: what is kept between runs, how much of the disk it takes, and how to be rid of it."""

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from medusa_cli.cli import options
from medusa_cli.util import remembered
from medusa_cli.util.paths import cache_home

# folders of the home, and what each is for; all of it is made anew when it is asked for
KEPT = {
    "models": "models converted from .gguf files",
    "blocks": "weights of models in blocks of 4 or 8 bits",
    "forwards": "compiled forwards (runner compiled)",
    "kernels": "compiled kernels",
    "checks": "self-checks that models have passed",
    "costs": "what steps cost here",
    "runners": "how quick each runner is here",
    "auto": "which runner auto takes here",
    "chat": "what was typed in medusa chat",
}
_FOLDERS = {
    "models": "models",
    "blocks": "blocks",
    "forwards": "code/forwards",
    "kernels": "code/kernels",
    "chat": "chat",
}
# the home may be a folder with other things in it: ours end in a hash, before what tells the kind of file (but one)
_OURS = re.compile(r"\.?([\w.+-]+-)?[0-9a-f]{12,64}(\.[\w-]+)*|history\.jsonl")

_IN_THE_MAKING = (".lock", ".partial", ".part")


@dataclass(frozen=True)
class Kept:
    """One kind of what is kept: where, how many of it, and their bytes."""

    name: str
    what: str
    path: Path
    count: int
    bytes: int


def command() -> None:
    """Show what is kept between runs on this machine, or clear it: all of it is made anew when it is needed."""


def ls(output: options.Output) -> None:
    """List what is kept, with sizes."""
    console = output.console
    found = [_kept(name) for name in KEPT]
    whole = sum(one.bytes for one in found)
    rows = [(one.name, one.count, _size(one.bytes), one.what) for one in found]
    console.table(("name", "kept", "size", "what"), rows)
    console.out(f"{_size(whole)} in {cache_home()}")
    document = {"home": cache_home(), "bytes": whole, "kept": [asdict(one) for one in found]}
    console.print_json(document, output.output_json)


def clear(
    *,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="What to clear, as ls names it. [default: all]", show_default=False),
    ] = None,
    output: options.Output,
) -> None:
    """Delete what is kept: all of it, or kinds by name. Nothing but what medusa made there is touched."""
    unknown = [name for name in names or () if name not in KEPT]
    if unknown:
        raise typer.BadParameter(f"nothing is kept under the name {unknown[0]}; there are {', '.join(KEPT)}")
    console = output.console
    gone = [_kept(name) for name in dict.fromkeys(names or KEPT)]
    for one in gone:
        for entry in _ours(one.path):
            _delete(entry)
    freed = sum(one.bytes for one in gone)
    console.out(f"cleared {_size(freed)} in {cache_home()}: {', '.join(one.name for one in gone if one.count) or '-'}")
    console.print_json(
        {"home": cache_home(), "bytes": freed, "cleared": [asdict(one) for one in gone]}, output.output_json
    )


SUBCOMMANDS = (ls, clear)


def _kept(name: str) -> Kept:
    """What is there of one kind."""
    folder = cache_home() / _FOLDERS[name] if name in _FOLDERS else remembered.folder(name)
    entries = [*_ours(folder)]
    return Kept(name, KEPT[name], folder, len(entries), sum(_bytes(entry) for entry in entries))


def _ours(folder: Path) -> Iterator[Path]:
    """Files and folders there whose names are of the kind that medusa gives, but what another process may be making."""
    if folder.is_dir() and not folder.is_symlink():
        ours = (entry for entry in sorted(folder.iterdir()) if _OURS.fullmatch(entry.name))
        yield from (entry for entry in ours if entry.suffix not in _IN_THE_MAKING)


def _bytes(entry: Path) -> int:
    """Bytes of a file, or of all files in a folder; what is linked to is elsewhere."""
    if entry.is_symlink() or not entry.is_dir():
        return entry.lstat().st_size
    return sum((Path(place) / name).lstat().st_size for place, _, names in os.walk(entry) for name in names)


def _delete(entry: Path) -> None:
    """A file, a link or a folder; another process may have been quicker."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)


def _size(count: int) -> str:
    """1234567 -> 1.2 MB."""
    size, units = float(count), iter(("B", "kB", "MB", "GB"))
    unit = next(units)
    while size >= 1000 and unit != "GB":
        size, unit = size / 1000, next(units)
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"

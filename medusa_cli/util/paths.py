"""Where medusa keeps what it makes once: converted models, compiled code, checks and measurements; and what ~ means.

Code is run from there, so nobody but this user and the system's own may be able to write to it.
"""

import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from medusa_cli.errors import MedusaError

OURS_ALONE = 0o700
SYSTEM = 0  # the user who may write anywhere in any case

logger = logging.getLogger(__name__)


def cache_home() -> Path:
    """MEDUSA_HOME, or medusa/ in the user's cache folder: an absolute path, made for this user alone where it can be.

    Where others may write to it, or to a folder above, the next place that is private is taken, and a line says so.
    Raises MedusaError for a relative MEDUSA_HOME, and when there is no private place.
    """
    faults: dict[Path, str] = {}
    for place in _places():
        if not os.environ.get("MEDUSA_HOME"):
            _close(place)
        fault = why_not_private(place)
        if fault is None:
            with suppress(OSError):  # where it can't be made, writing to it says so
                make_private(place)
            for left_out, reason in faults.items():
                say_once(f"{left_out} isn't used, for {reason}; {place} is used instead")
            return place
        faults[place] = fault
    raise MedusaError(
        "there is no folder to keep things in: " + "; ".join(faults.values()),
        "set MEDUSA_HOME to a folder that is yours alone (mode 0700)",
    )


def why_not_private(path: Path) -> str | None:
    """What lets others change what is at this path, in words; None when nobody can but this user and root.

    Each folder above it counts, as far as others can come from there: what is in a folder they can't enter is safe.
    What isn't there yet is as private as the folders above.
    """
    if not hasattr(os, "geteuid"):
        return None  # a system without owners and modes
    reachable = True
    for each in (*reversed(path.parents), path):
        try:
            found = os.lstat(each)
        except OSError:
            return None  # nothing is there, or nothing that this process could read
        if not belongs_to_us(found):
            return f"{each} belongs to {_name_of(found.st_uid)}"
        if stat.S_ISLNK(found.st_mode):
            continue  # its mode says nothing, and where it leads is asked by its own name
        if reachable and is_writable_by_others(found):
            return f"others may write to {each}"
        if stat.S_ISDIR(found.st_mode) and not found.st_mode & (stat.S_IXGRP | stat.S_IXOTH):
            reachable = False
    return None


def make_private(folder: Path) -> None:
    """Make a folder and what lacks above it, for this user alone, whatever the umask. Raises OSError."""
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(OURS_ALONE, exist_ok=True)


def belongs_to_us(found: os.stat_result) -> bool:
    """Whether the owner is this user or root; anything is ours where a system knows no owners."""
    return not hasattr(os, "geteuid") or found.st_uid in (SYSTEM, os.geteuid())


def is_writable_by_others(found: os.stat_result) -> bool:
    """Whether the mode lets anyone but the owner put something else in the place of what is there.

    In a sticky folder nobody can, and a group that is this user's own holds nobody else.
    """
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX:
        return False
    by_group = found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)
    return bool(by_group or found.st_mode & stat.S_IWOTH)


@cache
def say_once(line: str, level: int = logging.WARNING) -> None:
    """A line of log that this process shows once."""
    logger.log(level, "%s", line)


def expanded(path: str | Path) -> Path:
    """The path with ~ put in full; as it is when it names a user this machine doesn't have."""
    return Path(os.path.expanduser(path))


def _places() -> Iterator[Path]:
    """Where the home may be, the place that is asked for first; no link is left in any."""
    if home := os.environ.get("MEDUSA_HOME"):
        wanted = expanded(home)
        if not wanted.is_absolute():
            raise MedusaError(
                f"MEDUSA_HOME is {home}, which is another folder wherever a command is started: code is run from it",
                f"give the whole path: MEDUSA_HOME={wanted.absolute()}",
            )
        yield Path(os.path.realpath(wanted))
    # relative ones are invalid by the specification of these folders, and would run code from the current one
    named = (os.environ.get("XDG_CACHE_HOME"), os.path.expanduser("~/.cache"), _listed_home())
    yield from (Path(os.path.realpath(each)) / "medusa" for each in named if each and os.path.isabs(each))
    if hasattr(os, "geteuid"):
        yield Path(os.path.realpath(tempfile.gettempdir())) / f"medusa-{os.geteuid()}"


def _close(home: Path) -> None:
    """Keep others out of a home that an earlier version left open. One that MEDUSA_HOME names stays as it was made."""
    with suppress(OSError):
        found = home.lstat()
        is_ours = stat.S_ISDIR(found.st_mode) and hasattr(os, "geteuid") and found.st_uid == os.geteuid()
        if is_ours and stat.S_IMODE(found.st_mode) != OURS_ALONE:
            home.chmod(OURS_ALONE)


def _listed_home() -> str | None:
    """The cache folder in the home that the system's list of users names, whatever HOME says."""
    with suppress(ImportError, KeyError):
        import pwd

        return os.path.join(pwd.getpwuid(os.geteuid()).pw_dir, ".cache")
    return None


@cache
def _is_own_group(number: int) -> bool:
    """Whether the group is this user's private one, as many systems make for each user: of the same name, and empty.

    Group 0 is nobody's own: containers give it to users of any number.
    """
    with suppress(ImportError, KeyError):
        import grp
        import pwd

        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
        return number != 0 and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    return False


def _name_of(user: int) -> str:
    """A user's name and number."""
    with suppress(ImportError, KeyError):
        import pwd

        return f"{pwd.getpwuid(user).pw_name} ({user})"
    return f"user {user}"

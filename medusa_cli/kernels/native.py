"""Compile a C++ file for this machine, once, and load it. Who has no compiler goes without."""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from medusa_cli.errors import MedusaError
from medusa_cli.util import sealed
from medusa_cli.util.paths import cache_home, say_once

FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared", "-std=c++17")
COMPILERS = ("c++", "g++", "clang++")
PATIENCE_S = 300.0
_ONE_AT_A_TIME = threading.Lock()  # threads that want the same library: the second takes what the first compiled


class CannotCompile(Exception):
    """Why there is no library, in words."""


@functools.cache
def library(source: Path, flags: tuple[str, ...] = (), mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    """The functions in `source`, compiled unless an earlier run did. Raises CannotCompile.

    flags   for the compiler, behind our own
    mode    RTLD_GLOBAL where other libraries call these functions by name
    """
    try:
        with _ONE_AT_A_TIME:
            return ctypes.CDLL(str(built(source, flags)), mode=mode)
    except OSError as error:
        raise CannotCompile(f"{source.name}: {error}") from error


def built(source: Path, flags: tuple[str, ...] = ()) -> Path:
    """The library's file, as it was written by the compiler and by nobody since. Raises CannotCompile and OSError."""
    name = f"{source.stem}-{fingerprint(source, *flags)}"
    folder = code_home() / "kernels" / name
    if (fault := sealed.fault_in(folder)) is not None:
        if folder.exists():
            say_once(f"compiled anew, since {fault}")
        sealed.make(folder, lambda made: _compile(source, compiler(), flags, made / f"{name}.so"))
        if (fault := sealed.fault_in(folder)) is not None:
            raise CannotCompile(f"{source.name}: {fault}")
    return folder / f"{name}.so"


def code_home() -> Path:
    """The folder for what is compiled, by the compiler or by torch. Raises CannotCompile when there can be none."""
    try:
        return cache_home() / "code"
    except MedusaError as error:
        raise CannotCompile(error.message) from error


def compiler(names: Sequence[str] = COMPILERS) -> list[str]:
    """CXX, which may be a command of several words, or the first of these on the path. Raises CannotCompile."""
    named = os.environ.get("CXX", "").strip()
    for command in [[named], _words(named)] if named else [[name] for name in names]:
        if command and (found := shutil.which(command[0])):
            return [found, *command[1:]]
    raise CannotCompile(f"no C++ compiler: looked for {named or ', '.join(names)}")


def _words(command: str) -> list[str]:
    """As a shell splits it."""
    try:
        return shlex.split(command)
    except ValueError as error:
        raise CannotCompile(f"no C++ compiler: CXX is {command}: {error}") from error


def _compile(source: Path, command: Sequence[str], flags: tuple[str, ...], built: Path) -> None:
    """Write the library."""
    try:
        subprocess.run(
            [*command, *FLAGS, str(source), *flags, "-o", str(built)],
            check=True, capture_output=True, text=True, errors="replace", timeout=PATIENCE_S,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        first = (error.stderr.strip().splitlines() or ["it says nothing"])[0]
        raise CannotCompile(f"{shlex.join(command)} can't compile {source.name}: {first}") from error
    except subprocess.TimeoutExpired as error:
        raise CannotCompile(f"{shlex.join(command)} took more than {PATIENCE_S:.0f} s for {source.name}") from error


def fingerprint(source: Path, *more: str) -> str:
    """A short hash of all that a compiled file depends on. Raises CannotCompile without a compiler.

    -march=native makes the processor a part of it, and homes may be shared.
    """
    files = [source, *sorted(file for file in source.parent.iterdir() if file.suffix in (".cpp", ".h"))]
    texts = [file.read_text(encoding="utf-8") for file in files]
    command = compiler()
    # of `ccache g++` the second word is what is updated
    programs = [Path(found) for word in command if (found := shutil.which(word))]
    updated = [str(program.stat().st_mtime_ns) for program in programs]
    parts = (*texts, *command, *updated, *FLAGS, *more, _processor())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """The instructions this processor has."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    told = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()} {told}"

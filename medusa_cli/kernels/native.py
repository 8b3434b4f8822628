"""Compile a C++ file for this machine, once, and load it. Who has no compiler goes without."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from medusa_cli.home import cache_home

FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared", "-std=c++17")
COMPILERS = ("c++", "g++", "clang++")
PATIENCE_S = 120.0


class CannotCompile(Exception):
    """Why there is no library, in words."""


@functools.cache
def library(source: Path, flags: tuple[str, ...] = (), mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    """The functions in `source`, compiled unless an earlier run did. Raises CannotCompile.

    flags   for the compiler, behind our own
    mode    RTLD_GLOBAL where other libraries call these functions by name
    """
    compiler = _compiler()
    try:
        built = cache_home() / "kernels" / f"{source.stem}-{fingerprint(source, *flags)}.so"
        if not built.is_file():
            _compile(source, compiler, flags, built)
        return ctypes.CDLL(str(built), mode=mode)
    except OSError as error:
        raise CannotCompile(f"{source.name}: {error}") from error


def _compiler() -> str:
    """CXX, or the first C++ compiler on the path."""
    named = os.environ.get("CXX")
    for name in (named,) if named else COMPILERS:
        if found := shutil.which(name):
            return found
    raise CannotCompile(f"no C++ compiler: looked for {named or ', '.join(COMPILERS)}")


def _compile(source: Path, compiler: str, flags: tuple[str, ...], built: Path) -> None:
    """Write in a folder of its own and move the library out when it is whole: others may be compiling the same."""
    built.parent.mkdir(parents=True, exist_ok=True)
    # a process id would not do as a name: containers that share a home share those too
    with TemporaryDirectory(dir=built.parent, prefix=f"{built.stem}.") as folder:
        partial = Path(folder) / built.name
        command = [compiler, *FLAGS, str(source), *flags, "-o", str(partial)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=PATIENCE_S)
        except subprocess.CalledProcessError as error:
            first = (error.stderr.strip().splitlines() or ["it says nothing"])[0]
            raise CannotCompile(f"{compiler} can't compile {source.name}: {first}") from error
        except subprocess.TimeoutExpired as error:
            raise CannotCompile(f"{compiler} took more than {PATIENCE_S:.0f} s for {source.name}") from error
        partial.replace(built)


def fingerprint(source: Path, *more: str) -> str:
    """A short hash of all that a compiled file depends on.

    -march=native makes the processor a part of it, and homes may be shared.
    """
    files = [source, *sorted(file for file in source.parent.iterdir() if file.suffix in (".cpp", ".h"))]
    texts = [file.read_text(encoding="utf-8") for file in files]
    compiler = Path(_compiler())
    parts = (*texts, str(compiler), str(compiler.stat().st_mtime_ns), *FLAGS, *more, _processor())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """The instructions this processor has."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    told = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()} {told}"

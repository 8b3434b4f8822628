"""Compile a C++ file for this machine, once, and load it. Who has no compiler goes without."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

from medusa_cli.home import cache_home

FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared", "-std=c++17")
COMPILERS = ("c++", "g++", "clang++")
PATIENCE_S = 120.0


class CannotCompile(Exception):
    """Why there is no library, in words."""


@functools.cache
def library(source: Path) -> ctypes.CDLL:
    """The functions in `source`, compiled unless an earlier run did. Raises CannotCompile."""
    compiler = _compiler()
    built = cache_home() / "kernels" / f"{source.stem}-{_key(source, compiler)}.so"
    try:
        if not built.is_file():
            _compile(source, compiler, built)
        return ctypes.CDLL(str(built))
    except OSError as error:
        raise CannotCompile(f"{built}: {error}") from error


def _compiler() -> str:
    """CXX, or the first C++ compiler on the path."""
    named = os.environ.get("CXX")
    for name in (named,) if named else COMPILERS:
        if found := shutil.which(name):
            return found
    raise CannotCompile(f"no C++ compiler: looked for {named or ', '.join(COMPILERS)}")


def _compile(source: Path, compiler: str, built: Path) -> None:
    """Write beside `built` and give it the name at the end: a kill leaves nothing that looks complete."""
    built.parent.mkdir(parents=True, exist_ok=True)
    partial = built.with_name(f"{built.name}.{os.getpid()}")
    try:
        command = [compiler, *FLAGS, str(source), "-o", str(partial)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
        partial.replace(built)
    except subprocess.CalledProcessError as error:
        first = (error.stderr.strip().splitlines() or ["it says nothing"])[0]
        raise CannotCompile(f"{compiler} can't compile {source.name}: {first}") from error
    except subprocess.TimeoutExpired as error:
        raise CannotCompile(f"{compiler} took more than {PATIENCE_S:.0f} s for {source.name}") from error
    finally:
        partial.unlink(missing_ok=True)


def _key(source: Path, compiler: str) -> str:
    """What a compiled file depends on; -march=native makes the processor part of it, and homes may be shared."""
    parts = (source.read_text(encoding="utf-8"), compiler, str(Path(compiler).stat().st_mtime_ns), *FLAGS, _processor())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """The instructions this processor has."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    told = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()} {told}"

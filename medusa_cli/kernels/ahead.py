"""Compile on another core what a model comes to need, while its files are read."""

import threading
from contextlib import suppress

from medusa_cli.kernels import attend, blocks
from medusa_cli.kernels.native import CannotCompile


def compile_ahead() -> None:
    """Begin to compile whatever no earlier run did; who needs it before it is done waits for it.

    The process doesn't wait at its end: what is half compiled then is swept by the next run that compiles.
    """
    threading.Thread(target=_compile, name="medusa-compile", daemon=True).start()


def _compile() -> None:
    for functions in (blocks.functions, attend.function):
        with suppress(CannotCompile):  # who asks later is told
            functions()

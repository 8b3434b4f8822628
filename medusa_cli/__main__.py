"""Entry point of `medusa` and of `python -m medusa_cli`, whatever else of that name is on the PATH."""

import atexit
import os
import signal
import sys
import threading


def run() -> int:
    """Run the command line of this process, and end it where nobody looks on.

    Ctrl-C at any moment, also while modules are imported, is no traceback.
    """
    code = _run()
    if not _is_watched():
        _end(code)
    return code


def _run() -> int:
    listens = signal.getsignal(signal.SIGINT)
    _leave_interrupts_to_the_system()
    from medusa_cli.cli.app import main

    signal.signal(signal.SIGINT, listens)
    try:
        return main()
    except KeyboardInterrupt:  # before main hears it, or after
        return 130
    finally:
        _leave_interrupts_to_the_system()


def _end(code: int) -> None:
    """End the process as Python would, without taking all that is loaded apart first: that takes a second of work."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # who read it has gone, which was told; or it is closed
            code = code or 1
    os._exit(code)


def _is_watched() -> bool:
    """Whether a profiler, a debugger or a prompt wants to go on when the program is through."""
    monitoring = getattr(sys, "monitoring", None)  # of Python 3.12 and later
    tools = [monitoring.get_tool(number) for number in range(6)] if monitoring else []
    return bool(any(tools) or sys.getprofile() or sys.gettrace() or sys.flags.inspect)


def _leave_interrupts_to_the_system() -> None:
    """End at once; an interrupt that is to be ignored stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(run())

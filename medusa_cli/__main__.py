"""Entry point of `medusa` and of `python -m medusa_cli`, whatever else of that name is on the PATH."""

import signal
import sys


def run() -> int:
    """Run the command line of this process; Ctrl-C at any moment, also while modules are imported, is no traceback."""
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


def _leave_interrupts_to_the_system() -> None:
    """End at once; an interrupt that is to be ignored stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(run())

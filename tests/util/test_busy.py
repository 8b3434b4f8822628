"""CPU contention is told from the kernel's own counts, and threads are told to wait briefly before torch is there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_cli.util import busy
from medusa_cli.util.busy import Contention, Counters, Meter, between, how_threads_wait, spin_briefly

ROOT = Path(__file__).parents[2]


def test_time_in_line_is_added_up_over_threads() -> None:
    before = Counters(10.0, {"1": 1.0, "2": 5.0}, 100.0, 1000.0)
    after = Counters(12.0, {"1": 1.5, "2": 5.1, "3": 0.4}, 110.0, 1400.0)
    found = between(before, after)
    assert found.waiting == pytest.approx(0.5), "half a second of one, a tenth of another, and all of a new one's"
    assert found.stolen == pytest.approx(10 / 400)


@pytest.mark.parametrize(
    ("found", "is_busy"),
    [
        (Contention(0.02, 0.0, 9.0, 2), False),
        (Contention(0.5, 0.0, 0.1, 2), True),
        (Contention(0.0, 0.2, 0.1, 2), True),
        (Contention(None, None, 4.0, 2), True),
        (Contention(None, None, 2.0, 2), False),
        (Contention(None, None, None, 2), False),
    ],
)
def test_a_machine_is_busy_when_our_threads_stood_in_line_or_nobody_counts_and_the_load_is_high(
    found: Contention, is_busy: bool
) -> None:
    assert found.busy == is_busy
    assert found.document()["busy"] == is_busy
    assert found.in_words().startswith("busy: " if is_busy else "quiet: ")


def test_what_was_waited_for_is_said_before_the_load_and_the_load_says_of_what_it_is() -> None:
    assert Contention(0.02, 0.0, 4.0, 2).in_words() == (
        "quiet: our threads waited 2 % of the time for one of the 2 cores; "
        "4.0 processes ran or waited, as a mean of the last minute"
    )
    assert Contention(None, None, 4.0, 1).in_words() == (
        "busy: 4.0 processes ran or waited for the core, as a mean of the last minute"
    )
    assert Contention(None, None, None, 2).in_words() == "quiet: nobody counts"


def test_where_nothing_is_counted_nothing_is_made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(busy, "_THREADS", tmp_path / "no")
    monkeypatch.setattr(busy, "_STAT", tmp_path / "no")
    monkeypatch.delattr(os, "getloadavg")
    found = Meter().read()
    assert (found.waiting, found.stolen, found.load_average) == (None, None, None)
    assert not found.busy


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel doesn't count time in line")
def test_a_process_that_shares_one_core_with_another_stands_in_line() -> None:
    program = (
        "import os, time\n"
        "from medusa_cli.util.busy import Meter\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "child = os.fork()\n"
        "meter, end = Meter(), time.monotonic() + 0.5\n"
        "while time.monotonic() < end: pass\n"
        "if child: os.waitpid(child, 0); print(meter.read().busy)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout.strip() == "True"


@pytest.mark.parametrize("own", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "5"}])
def test_threads_are_told_to_wait_briefly_unless_the_user_says_how(
    own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    environment = dict(own)
    spin_briefly(environment, lambda: busy.cores() + 1)
    assert environment == (own or {"GOMP_SPINCOUNT": busy.SPINS})
    assert how_threads_wait(environment) == ", ".join(f"{name}={value}" for name, value in environment.items())


def test_once_torch_is_there_nothing_is_set_that_would_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    environment: dict[str, str] = {}
    spin_briefly(environment, lambda: busy.cores() + 1)
    assert environment == {}


def test_at_rest_threads_wait_as_openmp_has_them_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for running in (1, busy.cores(), None):
        environment: dict[str, str] = {}
        spin_briefly(environment, lambda running=running: running)
        assert environment == {}


@pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP")
def test_the_program_s_openmp_reads_what_it_is_told_and_so_do_processes_it_starts() -> None:
    """OpenMP itself prints its settings when it is loaded, with torch."""
    program = (
        "import multiprocessing, sys\n"
        "from medusa_cli.cli.app import main\n"
        "from medusa_cli.util import busy\n"
        "busy._running = lambda: 99\n"
        "if __name__ == '__main__':\n"
        "    main(['--version'])\n"
        "    import torch\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    beside = context.Process(target=exec, args=('import torch',))\n"
        "    beside.start(); beside.join()\n"
    )
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**kept, "OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr.count(f"GOMP_SPINCOUNT = '{busy.SPINS}'") == 2, run.stderr

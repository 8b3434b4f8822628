"""Training runs that are stopped: killed, interrupted, out of disk, out of workers. Nothing written is lost."""

import errno
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.copies import Copy
from tests.cli.harness import ENOUGH, Done, in_two_lines, run_here, train_args

Start = Callable[..., subprocess.Popen[str]]


def args(model: Path, folder: Path, *more: object) -> list[object]:
    return [*train_args(model, folder), "--num-samples", 16, "--epochs", 6, "--save-steps", 4, *more]


def wait_for(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Until something happened in the run folder, or the program has ended without it."""
    end = time.monotonic() + ENOUGH
    while not happened():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def lines(file: Path) -> int:
    """Whole lines of a file that may not be there yet."""
    return file.read_bytes().count(b"\n") if file.exists() else 0


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes that write for this one: children of the server it has started."""
    (server,) = [child for child in children_of(process.pid) if b"forkserver" in command_of(child)]
    return children_of(server)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def gone(pid: int) -> bool:
    """Whether a process has ended; one that only waits to be counted has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(pids: list[int]) -> None:
    end = time.monotonic() + ENOUGH
    while not all(map(gone, pids)):
        assert time.monotonic() < end, "a worker outlives its run"
        time.sleep(0.02)


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "prompts": lambda run: lines(run / "written/prompts.jsonl") >= 3,
    "answers": lambda run: lines(run / "written/answers/samples.jsonl") >= 3,
    "training": lambda run: len(list((run / "checkpoints").glob("step-*.pt"))) == 2,
    "measuring": lambda run: (run / "heads.safetensors").exists(),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_at_any_moment_goes_on_without_losing_what_was_written(
    moment: str, tiny: Path, tmp_path: Path, forked: Callable[..., Copy], unbroken: Path
) -> None:
    run = tmp_path / "run"
    copy = forked(*args(tiny, run))
    copy.wait_for(lambda: MOMENTS[moment](run))
    copy.kill()
    assert copy.process.exitcode == -signal.SIGKILL
    prompts = (run / "written/prompts.jsonl").read_text().splitlines(keepends=True)
    whole = [line for line in prompts if line.endswith("\n")]
    samples = run / "written/answers/samples.jsonl"
    answered = samples.read_text().splitlines() if samples.exists() else []

    done = run_here(*args(tiny, run), "--resume-from-checkpoint", "--json")
    assert done.code == 0, done.err
    assert done.document["data"]["samples"] == 16
    assert (run / "written/prompts.jsonl").read_text().startswith("".join(whole))
    rows = [json.loads(line) for line in (run / "written/prompts.jsonl").open()]
    assert sorted(row["id"] for row in rows) == list(range(16))
    # a line may be cut that was still being written
    assert samples.read_text().splitlines()[: len(answered) - 1] == answered[:-1] or not answered
    assert len({json.loads(line)["key"] for line in samples.open()}) == 16
    if moment in ("training", "measuring"):
        for name in ("heads.safetensors", "heads.json"):
            assert (run / name).read_bytes() == (unbroken / name).read_bytes()
        steps = [json.loads(line)["step"] for line in (run / "train.jsonl").open() if '"kind": "train"' in line]
        assert steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_says_how_to_go_on_and_leaves_no_worker(
    number: int, code: int, tiny: Path, tmp_path: Path, started: Start
) -> None:
    run = tmp_path / "run"
    process = started(*args(tiny, run, "data.workers=2"))
    wait_for(lambda: MOMENTS["answers"](run), process)
    workers = workers_of(process)
    assert len(workers) == 2
    # as a terminal does: to the whole group
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=ENOUGH)
    assert process.returncode == code, err
    assert out == ""
    assert "the same command with --resume-from-checkpoint goes on" in err
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err
    wait_until_gone(workers)


def test_an_interrupt_while_training_says_how_to_go_on_too(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_cli.pipeline import run as pipeline_run

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline_run, "train", interrupted)
    done = run_here(*args(tiny, tmp_path / "run"))
    assert done.code == 130
    assert "with --resume-from-checkpoint goes on\ninterrupted\n" in done.err


def test_workers_end_with_a_run_that_was_killed(tiny: Path, tmp_path: Path, started: Start) -> None:
    process = started(*args(tiny, tmp_path / "run", "data.workers=2"))
    wait_for(lambda: MOMENTS["answers"](tmp_path / "run"), process)
    workers = workers_of(process)
    assert len(workers) == 2
    process.kill()
    wait_until_gone(workers)


def test_a_worker_that_dies_ends_the_run_with_an_error_and_nothing_is_lost(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def kill_one() -> None:
        while not MOMENTS["answers"](run):
            time.sleep(0.005)
        multiprocessing.active_children()[0].kill()

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    done = run_here(*args(tiny, run, "data.workers=2"))
    assert done.code == 1
    assert in_two_lines(done.err), done.err
    assert "a writing process ended with code -9\n hint: run the same command again" in done.err
    assert multiprocessing.active_children() == []
    answered = (run / "written/answers/samples.jsonl").read_text()
    done = run_here(*args(tiny, run), "--max-steps", 2)
    assert done.code == 0, done.err
    assert (run / "written/answers/samples.jsonl").read_text().startswith(answered)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], None]]:
    """Makes the disk full after so many writes of a kind: bytes of a sample, or a file that takes its name."""

    def fill(call: str, after: int) -> None:
        real, calls = getattr(os, call), iter(range(10**9))

        def limited(*args: object, **kwargs: object) -> object:
            # pytest and the streams of this process write as well
            if call == "write" and args[0] in (1, 2):
                return real(*args, **kwargs)
            if next(calls) >= after:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        monkeypatch.setattr(os, call, limited)

    yield fill
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("call", "after"),
    [("write", 0), ("write", 9), ("replace", 0), ("replace", 3), ("replace", 5), ("replace", 16), ("replace", 19)],
)
def test_a_full_disk_is_one_error_and_one_hint_and_the_run_goes_on_later(
    call: str, after: int, tiny: Path, tmp_path: Path, full_disk: Callable[[str, int], None], monkeypatch
) -> None:
    run = tmp_path / "run"
    full_disk(call, after)
    done = run_here(*args(tiny, run))
    assert done.code == 1, done.err
    assert in_two_lines(done.err), done.err
    assert "No space left on device" in done.err
    monkeypatch.undo()
    assert run_here(*args(tiny, run), "--resume-from-checkpoint").code == 0


@pytest.mark.parametrize("limit", [900, 12_000, 30_000])
def test_a_disk_that_really_takes_no_more_is_told_the_same_way(
    limit: int, tiny: Path, tmp_path: Path, forked: Callable[..., Copy]
) -> None:
    """The system lets no file grow past so many bytes: prompts, then hidden states, then checkpoints hit it."""
    run = tmp_path / "run"
    short = "data.max_answer_tokens=20"
    full = forked(
        *args(tiny, run, short), before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    ).ended()
    assert full.code == 1, full.err
    assert in_two_lines(full.err), full.err
    assert "File too large" in full.err
    done = run_here(*args(tiny, run, short), "--resume-from-checkpoint")
    assert done.code == 0, done.err


def test_a_second_crew_writes_the_answers_of_the_first(tiny: Path, tmp_path: Path) -> None:
    """Greedy answers don't depend on who writes them."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"What is {n}?"}) + "\n" for n in range(12)))

    def answers(workers: int) -> dict[str, list[int]]:
        import numpy as np

        folder = tmp_path / f"crew-{workers}"
        done: Done = run_here(
            *args(tiny, folder, f"data.workers={workers}", "--dataset", file, "--num-samples", 12, "--max-steps", 1)
        )
        assert done.code == 0, done.err
        store = folder / "written" / "answers"
        index = [json.loads(line) for line in (store / "samples.jsonl").open()]
        ids = np.fromfile(store / "ids.i32", np.int32).tolist()
        found = {}
        for row in index:
            found[row["key"]], ids = ids[: row["length"]], ids[row["length"] :]
        return found

    assert answers(2) == answers(1)

"""Ctrl-C and SIGTERM in every stage of a run: what is finished stays, the next run goes on, no traceback."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from medusa_cli.cli.stops import Stops
from tests.cli.harness import Done, run_here, train_args
from tests.run_folders import differences

ENOUGH = 300.0
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def args(model: Path, folder: Path) -> list[object]:
    return [
        *train_args(model, folder), "data.rows=1", "data.max_answer_tokens=12", "--epochs", 3, "--save-steps", 100,
        "--tree-size", 5, "--runner", "eager", "-q", "--resume-from-checkpoint",
    ]  # fmt: skip


def moments() -> dict[str, tuple[Any, str]]:
    """For each stage a function that it calls more than twice, or once."""
    from medusa_cli.data import distill
    from medusa_cli.produce import heads
    from medusa_cli.train.checkpoint import TrainLog
    from medusa_cli.train.store import HiddenStore

    return {
        "prompts": (distill, "append_row"),
        "answers": (HiddenStore, "append"),
        "training": (TrainLog, "append"),
        "measuring": (heads, "fit"),
        "card": (heads, "write_card"),
    }


def signal_at(moment: str, number: int) -> None:
    """In the copy: the signal comes at the second call of the moment's function, or the only one."""
    owner, name = moments()[moment]
    real = getattr(owner, name)
    left = iter([False, True] if name.startswith("append") else [True])

    def signalling(*args: Any, **kwargs: Any) -> Any:
        if next(left, False):
            os.kill(os.getpid(), number)
        return real(*args, **kwargs)

    setattr(owner, name, signalling)


class Signalled:
    """The program in a copy of this process, and what it said: on stderr itself while it lived, and at its end."""

    def __init__(self, place: Path, before: Callable[[], object], *given: object) -> None:
        self.stderr = place / "stderr"

        def run() -> None:
            os.dup2(os.open(self.stderr, os.O_WRONLY | os.O_CREAT), 2)
            # a shell's background job ignores interrupts, and so would this copy
            signal.signal(signal.SIGINT, signal.default_int_handler)
            before()
            done = run_here(*given)
            (place / "done.json").write_text(json.dumps([done.code, done.out, done.err]))

        self._done = place / "done.json"
        self.process = multiprocessing.get_context("fork").Process(target=run)
        self.process.start()

    def wait_for(self, happened: Callable[[], bool]) -> None:
        end = time.monotonic() + ENOUGH
        while not happened():
            assert self.process.is_alive(), "it ended before"
            assert time.monotonic() < end, "it never happened"
            time.sleep(0.001)

    def send(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def ended(self) -> Done:
        self.process.join(ENOUGH)
        assert self.process.exitcode == 0, self.process.exitcode
        return Done(*json.loads(self._done.read_text()))


@pytest.fixture
def signalled(tmp_path: Path) -> Iterator[Callable[..., Signalled]]:
    """Starts copies; none outlives the test."""
    copies: list[Signalled] = []

    def begin(before: Callable[[], object], *given: object) -> Signalled:
        copies.append(Signalled(tmp_path, before, *given))
        return copies[-1]

    yield begin
    for copy in copies:
        copy.process.kill()
        copy.process.join()


@pytest.fixture(scope="module")
def unbroken(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    done = run_here(*args(tiny, folder))
    assert done.code == 0, done.err
    return folder


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("moment", ["prompts", "answers", "training", "measuring", "card"])
def test_a_signal_says_how_to_go_on_and_the_next_run_ends_as_if_there_had_been_none(
    moment: str, number: int, tiny: Path, tmp_path: Path, signalled: Callable[..., Signalled], unbroken: Path
) -> None:
    run = tmp_path / "run"
    copy = signalled(lambda: signal_at(moment, number), *args(tiny, run))
    done = copy.ended()
    assert done.code == CODES[number], done.err
    assert done.out == ""
    assert done.err.endswith(
        f"warning: stopped; all that is finished is in {run}: the same command with --resume-from-checkpoint goes on\n"
        "interrupted\n"
    )
    assert "Traceback" not in done.err + copy.stderr.read_text()
    if moment == "training":
        told = [json.loads(line) for line in (run / "train.jsonl").open()]
        # saved where it was, though --save-steps is far away
        assert told[-1]["kind"] == "save"
        assert told[-1]["step"] < told[-1]["total_steps"]
        assert (run / f"checkpoints/step-{told[-1]['step']:08d}.pt").exists()
        assert "stopping after this step" in copy.stderr.read_text()
    again = run_here(*args(tiny, run))
    assert again.code == 0, again.err
    wrong = [one for one in differences(unbroken, run, exact=True) if not one.startswith(("files", "train.jsonl"))]
    assert wrong == []


@pytest.mark.parametrize("number", CODES)
def test_a_second_signal_ends_the_run_at_once_and_what_was_saved_before_is_whole(
    number: int, tiny: Path, tmp_path: Path, signalled: Callable[..., Signalled]
) -> None:
    run, begun = tmp_path / "run", tmp_path / "begun"

    def never_finish_a_step() -> None:
        from medusa_cli.train import loop

        def stuck(*_: Any) -> None:
            begun.touch()
            time.sleep(ENOUGH)

        loop.learn_batch = stuck  # type: ignore[assignment]

    copy = signalled(never_finish_a_step, *args(tiny, run))
    copy.wait_for(begun.exists)
    copy.send(number)
    copy.wait_for(lambda: "once more ends at once" in copy.stderr.read_text())
    copy.send(number)
    copy.process.join(ENOUGH)
    assert copy.process.exitcode == -number
    assert "Traceback" not in copy.stderr.read_text()
    assert run_here(*args(tiny, run)).code == 0


def test_signals_are_as_before_once_the_run_has_ended() -> None:
    before = [signal.getsignal(number) for number in CODES]
    with Stops():
        assert [signal.getsignal(number) for number in CODES] != before
    assert [signal.getsignal(number) for number in CODES] == before


def test_a_background_job_that_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stops() as stops:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stops.asked()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_that_was_lost_in_a_finalizer_is_heard_at_the_next_news() -> None:
    with Stops() as stops:
        stops.signal = signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            stops.check()
        with pytest.raises(KeyboardInterrupt), stops.between_steps():
            pass

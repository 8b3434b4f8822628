"""Ctrl-C and SIGTERM in every stage of a run: what is finished stays, the next run goes on, no traceback."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medusa_cli.cli.signals import Stops
from tests.cli.copies import Copy
from tests.cli.harness import ENOUGH, run_here, train_args
from tests.run_folders import differences

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def args(model: Path, folder: Path) -> list[object]:
    return [
        *train_args(model, folder), "data.rows=1", "data.max_answer_tokens=12", "--epochs", 3, "--save-steps", 100,
        "--tree-size", 5, "--runner", "eager", "-q", "--resume-from-checkpoint",
    ]  # fmt: skip


def moments() -> dict[str, tuple[Any, str]]:
    """For each stage a function that it calls more than twice, or once."""
    from medusa_cli.data import distill
    from medusa_cli.pipeline import run as pipeline_run
    from medusa_cli.train.checkpoint import TrainLog
    from medusa_cli.train.store import HiddenStore

    return {
        "prompts": (distill, "append_row"),
        "answers": (HiddenStore, "append"),
        "training": (TrainLog, "append"),
        "measuring": (pipeline_run, "fit"),
        "card": (pipeline_run, "write_card"),
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


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("moment", ["prompts", "answers", "training", "measuring", "card"])
def test_a_signal_says_how_to_go_on_and_the_next_run_ends_as_if_there_had_been_none(
    moment: str, number: int, tiny: Path, tmp_path: Path, forked: Callable[..., Copy], unbroken: Path
) -> None:
    run = tmp_path / "run"
    copy = forked(*args(tiny, run), before=lambda: signal_at(moment, number))
    done = copy.ended()
    assert done.code == CODES[number], done.err
    assert done.out == ""
    assert done.err.endswith(
        f"warning: stopped; all that is finished is in {run}: the same command with --resume-from-checkpoint goes on\n"
        "interrupted\n"
    )
    assert "Traceback" not in done.err + copy.said
    if moment == "training":
        told = [json.loads(line) for line in (run / "train.jsonl").open()]
        # saved where it was, though --save-steps is far away
        assert told[-1]["step"] < told[-1]["total_steps"]
        assert (run / f"checkpoints/step-{told[-1]['step']:08d}.pt").exists()
        assert "stopping after this step" in copy.said
    again = run_here(*args(tiny, run))
    assert again.code == 0, again.err
    wrong = [one for one in differences(unbroken, run, exact=True) if not one.startswith("files")]
    assert wrong == []


@pytest.mark.parametrize("number", CODES)
def test_a_second_signal_ends_the_run_at_once_and_what_was_saved_before_is_whole(
    number: int, tiny: Path, tmp_path: Path, forked: Callable[..., Copy]
) -> None:
    run, begun = tmp_path / "run", tmp_path / "begun"

    def never_finish_a_step() -> None:
        from medusa_cli.train import loop

        def stuck(*_: Any) -> None:
            begun.touch()
            time.sleep(ENOUGH)

        loop.learn_batch = stuck  # type: ignore[assignment]

    copy = forked(*args(tiny, run), before=never_finish_a_step)
    copy.wait_for(begun.exists)
    copy.send(number)
    copy.wait_for(lambda: "once more ends at once" in copy.said)
    copy.send(number)
    copy.process.join(ENOUGH)
    assert copy.process.exitcode == -number
    assert "Traceback" not in copy.said
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

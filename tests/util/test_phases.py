"""Where the time of a start went: all of it, each second once."""

import pytest

from medusa_cli.util.phases import Phases


def test_every_second_since_the_process_began_belongs_to_one_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([2.0, 3.0, 7.0, 7.5])
    monkeypatch.setattr("time.process_time", lambda: next(now))
    phases = Phases("python")
    phases("weights")
    phases("layers")
    phases("weights")
    assert phases.seconds() == {"python": 2.0, "weights": 1.5, "layers": 4.0}

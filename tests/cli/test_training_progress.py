"""What a training run shows of its figures."""

from types import SimpleNamespace
from typing import Any

import pytest

from medusa_cli.cli.training_progress import Watch


@pytest.mark.parametrize(("loss", "shown"), [(2.5, "held-out loss 2.500,"), (None, "held-out loss n/a")])
def test_a_loss_over_no_word_is_shown_as_none(loss: float | None, shown: str) -> None:
    said: list[str] = []
    console: Any = SimpleNamespace(info=said.append)
    event: Any = SimpleNamespace(kind="eval", step=3, loss=loss, top1_K=[0.0], conditional_K=[0.0])
    Watch(console, None, SimpleNamespace()).on_event(event)  # type: ignore[arg-type]
    assert shown in said[0]

"""Many long prompts take the memory that was counted before the first of them was read."""

from pathlib import Path

import pytest

from tests.cli.harness import make_model
from tests.prompt_memory import Reading, grown


@pytest.mark.parametrize("attention", ["auto", "eager"])
def test_64_long_prompts_take_what_was_counted(attention: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", hidden_size=128, layers=2, vocab=2_000, positions=4096)
    each = grown(str(model), Reading(new=2, runner="packed", attention=attention))
    assert each.peak_ratio == pytest.approx(1, abs=0.15), each
    assert each.ratio == pytest.approx(1, abs=0.3), "a heap has holes"
    assert each.estimated < 300 * 2**20, "read at once they would take gigabytes"

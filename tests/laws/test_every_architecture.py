"""Law 1 for whatever the library loads as a causal language model: its own greedy text, or a refusal by name.

The list is the library's, so that a new release brings its new architectures here. One that can't be made small by
its fields' names wants a line in tests/differential/odd.py. The long run over every setting is `make exactness`.
"""

import warnings

import pytest
import torch

from tests.differential.compare import Case, Effort, examine
from tests.differential.page import DOCUMENT, documented
from tests.differential.shrink import model_types
from tests.differential.variants import BASE

SHORT = Effort(lengths=(13, 26), num_new=14, runs=(("random", "wide", 2),))
NOT_TO_BE_HAD = {"gemma3n": "timm"}  # what the library itself lacks here to make the model
BY_THE_CHECK = {"gpt_neo"}  # its windows are in its code alone: the check of logits finds them, not the config
WRITTEN_WITH = documented(DOCUMENT.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("model_type", model_types())
def test_every_architecture_gives_the_library_s_text_or_is_refused_by_name(model_type: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        finding = examine(Case(model_type, BASE, "auto", "eager"), SHORT)
    if model_type in NOT_TO_BE_HAD:
        assert NOT_TO_BE_HAD[model_type] in finding.reason
        return
    if model_type in BY_THE_CHECK:
        assert finding.outcome == "self-check"
        return
    assert finding.outcome in ("equal", "tie", "refused"), f"{finding.outcome}: {finding.reason}"
    if finding.outcome == "refused":
        assert model_type not in WRITTEN_WITH, f"docs/exactness.md says it can be written with: {finding.reason}"
        assert finding.reason.startswith(model_type)
    else:
        assert finding.compared == 2 * SHORT.num_new


def test_the_document_names_architectures_that_the_library_has() -> None:
    assert set(model_types()) >= WRITTEN_WITH

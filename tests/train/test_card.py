"""The model card says what a stranger needs to know."""

import json
import os

import pytest
import yaml

from medusa_cli.config.recipe import Recipe
from medusa_cli.errors import TrainingError
from medusa_cli.train.card import FittedTree, Provenance, render_card, write_card
from medusa_cli.train.measure import Accuracy

ACCURACY = Accuracy(
    num_heads=2,
    num_ranks=3,
    plain=[[0.5, 0.125, 0.0], [0.25, 0.0625, 0.0]],
    conditional=[[0.5, 0.125, 0.0], [0.375, 0.03125, 0.0]],
    coverage=[0.96, 0.95],
    positions=12345,
    source="held-out greedy answers",
)
TREE = FittedTree([[0], [0, 0], [1]], None, 1.75)


def provenance(**changes) -> Provenance:
    values = {
        "base": "org/tiny",
        "revision": "f00d",
        "fingerprint": "abc123",
        "licence": "apache-2.0",
        "command": "medusa train-heads --model org/tiny",
        "recipe": Recipe().model_dump(),
        "data": {"samples": 2000, "supervised tokens": 432_000},
        "answers": {"by": "a server", "model": "org/big", "temperature": 0.0, "lengths": {"mean": 80.25}},
        "versions": {"torch": "2.13.0"},
    }
    return Provenance(**{**values, **changes})


def test_the_card_names_base_revision_command_recipe_counts_accuracy_tree_and_licence():
    card = render_card(provenance(), ACCURACY, TREE)
    for wanted in (
        "org/tiny",
        "f00d",
        "abc123",
        "medusa train-heads --model org/tiny",
        "num_heads: 4",
        "432,000",
        "| model | org/big |",
        "| temperature | 0.00 |",
        "| lengths: mean | 80.25 |",
        "| 1 | 0.500 | 0.625 | 0.500 | 0.625 | 0.960 |",
        "| 2 | 0.250 | 0.312 | 0.375 | 0.406 | 0.950 |",
        "12,345 places",
        "held-out greedy answers",
        "3 nodes without the root (4 with it), 2 deep; 1.75 tokens a step",
        "`0 0-0 1`",
        "apache-2.0",
        "2.13.0",
    ):
        assert wanted in card


def test_the_header_is_metadata_the_hub_can_read():
    _, header, _ = render_card(provenance(), ACCURACY, TREE).split("---\n", 2)
    assert yaml.safe_load(header)["base_model"] == "org/tiny"
    assert yaml.safe_load(header)["license"] == "apache-2.0"


def test_what_is_not_known_is_said_to_be_unknown():
    card = render_card(provenance(revision=None, licence=None), ACCURACY, TREE)
    assert "none (a local folder or file)" in card
    assert "states no licence" in card
    assert "license:" not in card


def test_an_empty_tree_is_said_to_be_plain_decoding():
    assert "plain decoding" in render_card(provenance(), ACCURACY, FittedTree([], None, 1.0))


def test_the_folder_gets_the_card_and_the_same_facts_as_data(tmp_path):
    write_card(tmp_path, provenance(), ACCURACY, TREE)
    assert (tmp_path / "README.md").read_text() == render_card(provenance(), ACCURACY, TREE)
    facts = json.loads((tmp_path / "provenance.json").read_text())
    assert facts["base"] == "org/tiny"
    assert facts["recipe"]["heads"]["num_heads"] == 4


def test_a_card_that_can_t_be_written_is_an_error_with_a_hint(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(TrainingError, match="No space left"):
        write_card(tmp_path, provenance(), ACCURACY, TREE)
    assert list(tmp_path.iterdir()) == []


def test_a_tree_of_its_own_for_every_step_is_named() -> None:
    text = render_card(provenance(), ACCURACY, FittedTree([[0]], "dynamic:6:0.05", 1.9))
    assert "`dynamic:6:0.05`" in text
    assert "1.90 tokens a step expected" in text


def test_an_adapter_is_told_with_how_far_it_moved_the_model() -> None:
    moved = {
        "parameters": 1234567, "places": 890, "perplexity_before": 1.5, "perplexity_after": 1.75, "agreement": 0.97,
        "top1_before": [0.5], "top1_after": [0.6], "tokens_before": 1.9, "tokens_after": 2.3,
    }  # fmt: skip
    card = render_card(provenance(adapter=moved), ACCURACY, TREE)
    for wanted in ("| perplexity after | 1.750 |", "| same best token | 97.0% |", "| tokens a step after | 2.30 |"):
        assert wanted in card
    assert "1,234,567" in card
    assert "## Adapter" not in render_card(provenance(), ACCURACY, TREE)

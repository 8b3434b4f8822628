"""Learning from kept states against reading anew: the same losses, and figures that say what was measured."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from medusa_cli.config.recipe import Recipe
from medusa_cli.data.tokens import Tokens
from medusa_cli.train.corpus import Corpus, Examples
from medusa_cli.train.store import Sample
from tests.benchmarks import training_speed
from tests.benchmarks.target_read_anew import ARMS, Batches, Reread, Steps, Trial, arms_of, race
from tests.tiny_folders import save_tiny, tiny_tokenizer
from tests.tiny_models import VOCAB, final_hidden, target_of, tiny_model

LENGTHS = (9, 24, 14, 9, 17, 30, 12, 20)
STEPS = 8
RECIPE = Recipe.model_validate(
    {
        "heads": {"num_heads": 3, "num_layers": 2, "draft_vocab": 40},
        "train": {"loss_chunk": 16, "learning_rate": 1e-2},
        "data": {"held_out": 0.2},
    }
)


def texts_of(lengths: tuple[int, ...]) -> dict[str, Tokens]:
    """Texts over a few words that count up, each after a prompt of three tokens."""
    return {
        str(number): Tokens([(3 * number + place) % 50 for place in range(length)], [i >= 3 for i in range(length)])
        for number, length in enumerate(lengths)
    }


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    torch.set_num_threads(1)
    model = tiny_model("llama")
    return Corpus.from_samples(
        [
            Sample(key, text.ids, final_hidden(model, text.ids), text.supervised)
            for key, text in texts_of(LENGTHS).items()
        ]
    )


@pytest.fixture(scope="module")
def trial(corpus: Corpus) -> Trial:
    target = target_of(tiny_model("llama"), tokenizer=tiny_tokenizer())
    arms = arms_of(RECIPE, target, target_of(tiny_model("llama"), "sdpa").model, corpus, range(6))
    held_out = Examples.of(corpus, [6, 7], arms["stored"].state.heads.draft_ids, 3)
    return race(RECIPE, arms, held_out, texts=2, steps=STEPS)


def test_states_read_anew_are_those_that_are_kept_whatever_is_asked_for(corpus: Corpus) -> None:
    reread = Reread(tiny_model("llama"), corpus)
    places = np.random.default_rng(0).permutation(len(corpus.ids_T))[:40]
    assert np.unique(corpus.sample_of(places)).size > 4, "texts of several lengths side by side"
    np.testing.assert_allclose(reread[places], corpus.hidden_TH[places], atol=4e-3)


def test_what_is_learnt_from_kept_states_loses_what_the_plain_way_loses(trial: Trial) -> None:
    losses = {name: np.array(steps.losses) for name, steps in trial.steps.items()}
    assert set(losses) == set(ARMS)
    # states are kept in 16 bits; three epochs of a high rate move the loss a thousand times as far
    np.testing.assert_allclose(losses["rerun"], losses["stored"], atol=4e-3)
    np.testing.assert_allclose(losses["plain"], losses["stored-all"], atol=4e-3)
    assert losses["stored"][0] - losses["stored"][-1] > 0.5
    assert losses["stored-all"][0] - losses["stored-all"][-1] > 0.5
    # other words to choose from, another loss
    assert np.abs(losses["stored"] - losses["stored-all"]).min() > 0.02
    assert float(trial.held_out["stored"].loss) == pytest.approx(float(trial.held_out["plain"].loss), rel=0.2)


def test_each_batch_is_whole_texts_of_about_one_length_and_an_epoch_is_every_place_once(corpus: Corpus) -> None:
    examples = Examples.of(corpus, range(8), torch.arange(VOCAB), 3)
    batches = Batches.of(examples, 2, seed=0)
    assert sorted(np.concatenate(batches.rows)) == list(range(len(examples)))
    lengths = [
        sorted(LENGTHS[sample] for sample in np.unique(corpus.sample_of(examples.places_N[rows])))
        for rows in batches.rows
    ]
    assert sorted(lengths) == [[9, 9], [12, 14], [17, 20], [24, 30]]
    assert lengths != sorted(lengths), "in no order of length"
    np.testing.assert_array_equal(batches.at(5), batches.rows[1])


def test_whole_epochs_count_the_pass_that_kept_the_states(trial: Trial) -> None:
    """stored 100 tokens a second, plain 20, 400 tokens an epoch, 6 seconds for the states."""
    steps = {name: Steps([100, 100], [1.0, 1.0], [0.5, 0.5], [2.0, 1.0, 1.0]) for name in ARMS}
    steps["plain"] = Steps([100, 100], [5.0, 5.0], [2.0, 2.0], [2.0, 1.5, 1.0])
    document = training_speed.document_of(Trial(steps, trial.held_out), 6.0, 400)
    one, four = document["epochs"]["1"], document["epochs"]["4"]
    assert (one["stored"], one["plain"], one["plain_to_stored"]) == (10.0, 20.0, 2.0)
    assert (four["stored"], four["plain"]) == (22.0, 80.0)
    assert four["plain_to_stored_with_free_states"] == 5.0
    plain = document["arms"]["plain"]
    assert (plain["times_stored"], plain["times_stored_in_processor_time"]) == (5.0, 4.0)
    assert document["largest_loss_difference"] == {"rerun to stored": 0.0, "plain to stored-all": 0.5}
    table = "\n".join(training_speed.table_of(document))
    assert all(f"\n{name} " in table for name in ARMS)
    assert "epochs 1: stored 10 s, 6 s of it for states, plain 20 s: 2.00x, 5.00x where" in table


def test_the_command_compares_on_the_target_s_own_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny(tmp_path / "model", max_position_embeddings=256)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{n} w{n + 3} w9"}) + "\n" for n in range(10, 22)))
    sizes = ("--max-new-tokens", "12", "--texts", "4", "--steps", "2", "--num-layers", "1")
    monkeypatch.setattr("sys.argv", ["rerun", "--model", str(model), "--prompts", str(prompts), *sizes])
    training_speed.main()
    told = capsys.readouterr()
    document: Mapping[str, object] = json.loads(told.out)
    assert (document["texts"], document["steps"], document["heads"]["num_layers"]) == (12, 2, 1)
    assert max(document["largest_loss_difference"].values()) < 4e-3
    assert "stored-all" in told.err

"""An adapter over a model: what it may lie over, that it leaves the model's numbers alone, and its files."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.config.recipe import LoraSettings, TargetSettings
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.errors import FormatError, HeadsMismatch, RecipeError, TrainingError
from medusa_cli.kernels.blocks import BlockLinear, functions
from medusa_cli.model.adapter import (
    LearningAdapter,
    StoredAdapter,
    adaptable,
    adapter_fingerprint,
    count_parameters,
    joined,
    stored_adapter,
)
from medusa_cli.model.loading.load import fingerprint_of, make_target
from tests.tiny_folders import tiny_model
from tests.tiny_models import NUM_NEW, greedy_of, prompt_of, quantised_model

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def settings(**changes: Any) -> LoraSettings:
    return LoraSettings(**{"rank": 4, "alpha": 8, "dropout": 0.0, **changes})


def taught(adapter: LearningAdapter) -> LearningAdapter:
    """As if it had learnt: every number is another."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in adapter.parameters.values():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return adapter


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture
def saved(tmp_path: Path) -> StoredAdapter:
    """An adapter that changes the tiny llama's predictions."""
    model = tiny_model()
    fingerprint = taught(LearningAdapter(model, settings(), 0)).save(tmp_path / "adapter")
    return StoredAdapter(tmp_path / "adapter", fingerprint, fingerprint_of(tiny_model()), "tiny")


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "falcon"])
def test_an_adapter_begins_by_changing_nothing_and_is_removed_without_a_trace(model_type: str) -> None:
    model = tiny_model(model_type)
    before, numbers = logits(model), {name: held.clone() for name, held in model.state_dict().items()}
    adapter = LearningAdapter(model, settings(dropout=0.5), 0)
    assert torch.equal(logits(model), before)
    taught(adapter)
    assert not torch.allclose(logits(model), before)
    with adapter.off():
        assert torch.equal(logits(model), before)
    adapter.remove()
    assert torch.equal(logits(model), before)
    after = model.state_dict()
    assert numbers.keys() == after.keys()
    assert all(torch.equal(held, after[name]) for name, held in numbers.items())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_only_the_adapter_learns_and_only_its_dropout_is_on() -> None:
    model = tiny_model(attention_dropout=0.5)
    adapter = LearningAdapter(model, settings(dropout=0.5), 0)
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(learning) == len(adapter.parameters) == 2 * 2 * 7
    assert all("lora_" in name for name in learning)
    with adapter.off():
        pass
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == learning
    taught(adapter)
    assert torch.equal(logits(model), logits(model))
    with adapter.learn():
        assert not torch.equal(logits(model), logits(model))
        assert not model.model.layers[0].self_attn.training
    assert torch.equal(logits(model), logits(model))


def test_the_same_seed_begins_with_the_same_numbers_whatever_was_drawn_before() -> None:
    torch.manual_seed(1)
    one = LearningAdapter(tiny_model(), settings(), 7)
    drawn = torch.rand(3)
    two = LearningAdapter(tiny_model(), settings(), 7)
    other = LearningAdapter(tiny_model(), settings(), 8)
    assert all(torch.equal(value, two.parameters[name]) for name, value in one.parameters.items())
    assert not all(torch.equal(value, other.parameters[name]) for name, value in one.parameters.items())
    assert drawn.shape == (3,)


def test_layers_computed_twice_give_the_same_gradients() -> None:
    found = []
    for twice in (False, True):
        model = tiny_model()
        adapter = taught(LearningAdapter(model, settings(gradient_checkpointing=twice), 0))
        model(IDS, use_cache=False).logits.square().mean().backward()
        found.append({name: parameter.grad for name, parameter in adapter.parameters.items()})
        adapter.remove()
        assert "forward" not in vars(model.model.layers[0]), "the layers are the library's own again"
    assert all(torch.allclose(grad, found[1][name], atol=1e-7) for name, grad in found[0].items())


def test_layers_computed_twice_are_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    calls: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    LearningAdapter(model, settings(gradient_checkpointing=True), 0)
    loss = model(IDS, use_cache=False).logits.square().mean()
    assert len(calls) == 1
    loss.backward()
    assert len(calls) == 2


def test_all_linear_layers_but_the_output_are_adapted_unless_some_are_named() -> None:
    model = tiny_model()
    every = adaptable(model, None)
    assert len(every) == 2 * 7
    assert "lm_head" not in every
    assert sorted(adaptable(model, ["q_proj", "layers.1.mlp.up_proj"])) == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.1.self_attn.q_proj",
    ]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["q_prj"], "this model has no q_prj: did you mean q_proj?"),
        (["lm_head"], "lm_head is the output matrix, which the heads read as it is"),
        (["input_layernorm"], "input_layernorm is no plain linear layer"),
        (["proj"], "this model has no proj"),
        (["q_proj", "xyz", "w2"], "this model has no xyz; this model has no w2"),
    ],
)
def test_names_that_fit_no_layer_are_told(names: list[str], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        adaptable(tiny_model(), names)
    assert words in caught.value.message
    assert "q_proj" in caught.value.hint


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_parameters_are_counted_without_making_them(model_type: str) -> None:
    model = tiny_model(model_type)
    counted = count_parameters(adaptable(model, None), rank=4)
    assert counted == LearningAdapter(model, settings(), 0).num_parameters


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_peft_loads_the_files_and_predicts_what_was_learnt(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type)
    adapter = taught(LearningAdapter(model, settings(), 0))
    adapter.save(tmp_path)
    theirs = PeftModel.from_pretrained(tiny_model(model_type), tmp_path)
    assert torch.allclose(logits(theirs), logits(model), atol=1e-6)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_equal_adapters_make_equal_files(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        taught(LearningAdapter(tiny_model(), settings(), 0)).save(tmp_path / folder)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_merged_adapter_is_peft_s_own_merge(saved: StoredAdapter) -> None:
    target = make_target(tiny_model(), None, TargetSettings(model="tiny", dtype="float32", runner="eager"), saved)
    merged = PeftModel.from_pretrained(tiny_model(), saved.folder).merge_and_unload()
    assert torch.equal(logits(target.model), logits(merged))
    assert target.fingerprint == joined(saved.learnt_on, saved.fingerprint)
    assert target.identity.adapter == saved.folder


def test_an_adapter_of_another_model_is_refused(saved: StoredAdapter) -> None:
    other = tiny_model()
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.add_(1)
    with pytest.raises(HeadsMismatch, match="was trained on weights with the fingerprint") as caught:
        make_target(other, None, TargetSettings(model="other", dtype="float32"), saved)
    assert "belong to tiny" in caught.value.hint


def as_stored(saved: StoredAdapter) -> StoredAdapter:
    return stored_adapter(
        saved.folder,
        fingerprint=saved.fingerprint,
        target_fingerprint=joined(saved.learnt_on, saved.fingerprint),
        owner="tiny",
    )


def test_the_adapter_of_some_heads_is_found(saved: StoredAdapter) -> None:
    assert as_stored(saved) == saved


def drop(saved: StoredAdapter) -> None:
    (saved.folder / "adapter_model.safetensors").unlink()


def scale(saved: StoredAdapter) -> None:
    file = saved.folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": 9}))


def damage(saved: StoredAdapter) -> None:
    file = saved.folder / "adapter_model.safetensors"
    held = bytearray(file.read_bytes())
    held[-1] ^= 1
    file.write_bytes(held)


def spoil(saved: StoredAdapter) -> None:
    (saved.folder / "adapter_config.json").write_text("{")


def list_it(saved: StoredAdapter) -> None:
    (saved.folder / "adapter_config.json").write_text("[]")


def nest(saved: StoredAdapter) -> None:
    (saved.folder / "adapter_config.json").write_text("[" * 100_000)


def mix(saved: StoredAdapter) -> None:
    (saved.folder / "adapter_config.json").write_text('{"target_modules": [1, "q_proj", null]}')


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop, "lacks"),
        (scale, "another adapter"),
        (damage, "another adapter"),
        (spoil, "can't be"),
        (list_it, "adapter_config.json: "),
        (nest, "can't be"),
        (mix, "adapter_config.json: "),
    ],
)
def test_an_adapter_that_is_missing_or_another_is_refused(
    saved: StoredAdapter, change: Callable[[StoredAdapter], None], words: str
) -> None:
    change(saved)
    with pytest.raises(FormatError, match=words) as caught:
        as_stored(saved)
    assert caught.value.hint


def test_a_config_that_names_another_place_of_the_model_is_the_same_adapter(saved: StoredAdapter) -> None:
    file = saved.folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "elsewhere"}))
    assert adapter_fingerprint(saved.folder) == saved.fingerprint


def test_numbers_that_are_not_finite_are_not_merged(tmp_path: Path) -> None:
    adapter = LearningAdapter(tiny_model(), settings(), 0)
    with torch.no_grad():
        next(iter(adapter.parameters.values())).fill_(torch.inf)
    stored = StoredAdapter(tmp_path, adapter.save(tmp_path), fingerprint_of(tiny_model()), "tiny")
    with pytest.raises(FormatError, match="not finite"):
        make_target(tiny_model(), None, TargetSettings(model="tiny", dtype="float32"), stored)


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    (tmp_path / "adapter").write_text("in the way")
    with pytest.raises(TrainingError, match="can't write the adapter"):
        LearningAdapter(tiny_model(), settings(), 0).save(tmp_path / "adapter")


def test_a_quantised_layer_can_not_be_adapted() -> None:
    model = copy.deepcopy(tiny_model())
    for layer in model.model.layers:  # as bitsandbytes holds them
        layer.self_attn.q_proj.weight = torch.nn.Parameter(torch.zeros(512, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(RecipeError, match="q_proj is no plain linear layer"):
        adaptable(model, ["q_proj"])


def test_merged_weights_lie_on_no_grid_and_auto_lays_each_layer_out_as_it_can(tmp_path: Path) -> None:
    functions()  # a compiler that is missing, or out of patience, is told here and not as another runner
    adapter = taught(LearningAdapter(copy.deepcopy(quantised_model()), settings(), 0))
    stored = StoredAdapter(tmp_path, adapter.save(tmp_path), fingerprint_of(quantised_model()), "tiny")
    merged = PeftModel.from_pretrained(copy.deepcopy(quantised_model()), tmp_path).merge_and_unload()
    wanted = greedy_of(merged, prompt_of(9), NUM_NEW)
    assert wanted != greedy_of(quantised_model(), prompt_of(9), NUM_NEW)
    for runner in ("auto", "blocks", "packed", "eager"):
        asked = TargetSettings(model="tiny", dtype="float32", device="cpu", runner=runner)
        target = make_target(copy.deepcopy(quantised_model()), None, asked, stored)
        assert target.identity.runner == ("blocks" if runner == "auto" else runner)
        (found,) = collect(Parts(target, NoDrafter(), Greedy()), [prompt_of(9)], Limits(NUM_NEW))
        assert found.token_ids == wanted, runner
        if runner == "auto":  # the output matrix is as it was stored, the layers that were adapted are not
            assert isinstance(target.model.lm_head, BlockLinear)
            assert not isinstance(target.model.model.layers[0].self_attn.q_proj, BlockLinear)

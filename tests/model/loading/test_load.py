"""From a name to a target: what can go wrong is one line and one hint, and what is loaded is the whole model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, BertForMaskedLM

from medusa_cli.cli.app import main
from medusa_cli.config.loading import load_recipe
from medusa_cli.config.recipe import RecipeError, TargetSettings
from medusa_cli.errors import TargetError
from medusa_cli.model import attention as grouped
from medusa_cli.model.forward_memory import ForwardMemory
from medusa_cli.model.loading import load as load_room
from medusa_cli.model.loading.load import (
    choose_device,
    choose_dtype,
    fingerprint_of,
    load_target,
    load_unchecked,
    make_target,
)
from medusa_cli.model.runners.stock import StockForward
from medusa_cli.model.target import Target
from tests.differential import shrink
from tests.tiny_folders import save_gguf, save_tiny, tiny_config, tiny_model, tiny_tokenizer

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model")


def loaded(name: object, **settings: Any) -> Target:
    return load_target(TargetSettings(model=str(name), device="cpu", **settings))


def assert_refused(name: object, *what: str, **settings: Any) -> TargetError:
    """The error of loading; each of `what` is in its message, and message and hint are one line each."""
    with pytest.raises(TargetError) as caught:
        loaded(name, **settings)
    error = caught.value
    assert all(part in error.message for part in what), error.message
    assert "\n" not in error.message + error.hint
    assert error.hint
    return error


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# --- what works ---


def test_a_local_folder_loads_offline(folder: Path) -> None:
    target = loaded(folder)
    assert target.name == str(folder)
    assert target.stop_ids == {2}
    assert len(target.tokenizer) == 97


def test_a_gguf_file_loads(tmp_path: Path) -> None:
    target = loaded(save_gguf(tmp_path / "tiny.gguf"))
    assert target.vocab_size == 97
    assert target.num_layers == 1


@pytest.mark.parametrize("attention", ["auto", "eager", "sdpa", "grouped"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "gemma3_text"])
def test_every_attention_on_offer_loads_and_passes_its_check(tmp_path: Path, model_type: str, attention: str) -> None:
    assert loaded(save_tiny(tmp_path, model_type), attention=attention, runner="eager").num_layers == 2


def test_auto_falls_back_to_what_an_older_architecture_has(tmp_path: Path) -> None:
    assert loaded(save_tiny(tmp_path, "falcon")).identity.attention != grouped.NAME


def test_packed_weights_give_the_logits_of_the_stock_layers(folder: Path) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        packed = loaded(folder, runner="packed", dtype="float32").model(ids).logits
        eager = loaded(folder, runner="eager", dtype="float32").model(ids).logits
    torch.testing.assert_close(packed, eager, atol=1e-5, rtol=1e-4)


def test_a_target_is_checked_when_loaded_and_not_when_asked_for_unchecked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(load_room, "checked", lambda target: seen.append(target.name))
    settings = TargetSettings(model=str(folder), device="cpu")
    load_unchecked(settings)
    assert seen == []
    load_target(settings)
    assert seen == [str(folder)]


def test_a_model_whose_check_fails_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StockForward, "positions", lambda self, tree, place: place.columns_BN)
    monkeypatch.setenv("MEDUSA_HOME", str(folder / "home"))
    assert_refused(folder, str(folder), "can't verify a tree", "differ")


# --- the hub ---


@pytest.mark.parametrize("name", ["owner/name", "llama-2-7b"])
def test_a_hub_id_without_a_network_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = assert_refused(name, name, "never downloaded", "hub can't be reached")
    assert "HF_HUB_OFFLINE" in error.hint


def test_a_name_that_can_be_no_hub_id_is_told(tmp_path: Path) -> None:
    assert_refused("two words/model", "there is no folder two words/model, and no such model on the hub")


# --- the folder's files ---


def test_missing_weights_are_refused_by_name_and_not_made_up(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop(UP))
    assert_refused(folder, f"lacks 1 of its weights: {UP}")


def test_a_config_with_more_layers_than_weights_is_refused(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=3)
    assert_refused(folder, "lacks 9 of its weights: model.layers.2.", "…")


def test_weights_of_other_names_are_refused_with_one_of_them(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({f"x.{name}": tensors.pop(name) for name in list(tensors)}))
    assert_refused(folder, "x.lm_head.weight is there and belongs nowhere")


def test_weights_of_another_shape_are_refused_with_both_shapes(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({UP: torch.zeros(3, 5)}))
    assert_refused(folder, UP, "[3, 5]", "[48, 32]")


@pytest.mark.parametrize("kept", [0, 5, 2000])
def test_truncated_weights_are_refused(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert "again" in assert_refused(folder, f"can't load the weights of {folder}").hint


def test_a_missing_shard_is_refused_by_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00002-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": {UP: "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(folder, "model-00001-of-00002.safetensors")


def test_a_truncated_gguf_file_is_refused(tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:-5000])
    assert "complete" in assert_refused(file, f"can't load the config of {file}").hint


def test_a_folder_without_a_tokenizer_is_refused(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer.json" in assert_refused(folder, f"can't load the tokenizer of {folder}").hint


@pytest.mark.parametrize("text", ['{"version": "1.0", "tru', '{"version": "1.0", "model": {"type": "Nonesuch"}}'])
def test_a_damaged_tokenizer_is_refused(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    assert_refused(folder, f"can't load the tokenizer of {folder}")


@pytest.mark.parametrize("changes", [{"hidden_size": "wide"}, {"num_attention_heads": 3, "head_dim": None}])
def test_a_config_that_contradicts_itself_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    edit_config(folder, **changes)
    assert_refused(folder, f"of {folder}")


def test_weights_that_are_not_finite_are_refused(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors[UP].fill_(float("nan")))
    assert_refused(folder, "its logits are not finite")


def test_an_architecture_the_library_does_not_know_is_named(folder: Path) -> None:
    edit_config(folder, model_type="frobnicate")
    assert "upgrade" in assert_refused(folder, "does not know: frobnicate").hint


def test_code_that_comes_with_a_model_is_not_run(folder: Path) -> None:
    edit_config(folder, model_type="frobnicate", auto_map={"AutoConfig": "theirs.Config"})
    (folder / "theirs.py").write_text("raise SystemExit('this ran')")
    assert_refused(folder, "needs program code of its own")


def test_weights_that_need_a_package_name_it(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    assert_refused(folder, "optimum")


# --- what a tree can't verify ---


UNFIT = {
    "bloom": ({"vocab_size": 97, "hidden_size": 16, "n_layer": 2, "n_head": 4}, "takes no position ids"),
    "mpt": ({"vocab_size": 97, "d_model": 16, "n_layers": 2, "n_heads": 4}, "takes no position ids"),
    "falcon": (
        {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
        "takes no position ids",
    ),
    "mamba": ({"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 2}, "linear_attention layers"),
    "recurrent_gemma": ({"num_hidden_layers": 3}, "linear_attention layers"),
    "jamba": ({"num_hidden_layers": 8, "use_mamba_kernels": False}, "linear_attention layers"),
    "lfm2": ({"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}, "conv layers"),
    "qwen3_next": ({"num_hidden_layers": 4}, "linear_attention layers"),
    "t5": ({}, "is an encoder-decoder"),
    "bart": ({}, "is an encoder-decoder"),
    "vit": ({}, "is not a causal language model"),
}


@pytest.mark.parametrize("model_type", UNFIT)
def test_an_unfit_architecture_is_refused_by_name_before_its_weights_are_read(tmp_path: Path, model_type: str) -> None:
    settings, reason = UNFIT[model_type]
    AutoConfig.for_model(model_type, **settings).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    assert_refused(tmp_path, f"({model_type})", reason)


def test_an_encoder_is_refused_by_name(tmp_path: Path) -> None:
    BertForMaskedLM(tiny_config("bert")).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert_refused(tmp_path, "(bert)", "is an encoder")


def test_a_decoder_of_the_same_family_is_no_encoder(tmp_path: Path) -> None:
    assert loaded(save_tiny(tmp_path, "bert", is_decoder=True), runner="eager").num_layers == 2


# --- settings ---


def test_flash_attention_is_not_on_offer() -> None:
    with pytest.raises(RecipeError, match="target.attention is one of auto, eager, sdpa, grouped, not"):
        load_recipe(None, ["target.attention=flash_attention_2"])


def test_an_attention_the_architecture_lacks_is_refused(tmp_path: Path) -> None:
    error = assert_refused(
        save_tiny(tmp_path, "gpt_oss", num_local_experts=4), "(gpt_oss) has no sdpa attention", attention="sdpa"
    )
    assert error.hint == "use --attention eager"


@pytest.mark.parametrize(("device", "part"), [("cuda:7", "0 CUDA devices"), ("mps", "mps is not there")])
def test_a_device_that_is_not_there_is_refused(device: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(TargetError, match=part):
        choose_device(device)


def test_packing_what_can_not_be_packed_is_refused(folder: Path) -> None:
    assert_refused(folder, "the packed runner needs float32 on a CPU", runner="packed", dtype="bfloat16")


@pytest.mark.parametrize(("amx", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_takes_bfloat16_where_the_cpu_multiplies_in_it(
    amx: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert choose_dtype("auto", torch.device("cpu")) == dtype


# --- fingerprints ---


def test_the_fingerprint_does_not_depend_on_the_dtype() -> None:
    assert fingerprint_of(tiny_model()) == fingerprint_of(tiny_model().to(torch.bfloat16))


def test_weights_stored_in_bfloat16_agree_in_every_dtype() -> None:
    stored = tiny_model().to(torch.bfloat16)
    with torch.no_grad():
        stored.lm_head.weight[0, :16] = 1e-6  # a denormal in float16
    expected = fingerprint_of(stored)
    assert fingerprint_of(stored.to(torch.float16)) == expected


@pytest.mark.parametrize("name", [name for name, _ in tiny_model().named_parameters()])
def test_a_copy_with_one_tensor_changed_has_another_fingerprint(name: str) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.get_parameter(name).mul_(1.02)
    assert fingerprint_of(model) != fingerprint_of(tiny_model())


def test_the_fingerprint_is_that_of_the_weights_before_packing() -> None:
    prints = {
        make_target(tiny_model(), None, TargetSettings(model="tiny", device="cpu", runner=runner)).fingerprint
        for runner in ("eager", "packed")
    }
    assert len(prints) == 1


# --- the command line ---


def test_a_fault_is_two_lines_and_exit_code_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_weights(folder, lambda tensors: tensors.pop(UP))
    assert main(["doctor", str(folder)]) == 1
    *_, message, hint = capsys.readouterr().err.splitlines()
    assert message.startswith(f"error: {folder} lacks 1 of its weights")
    assert hint.startswith(" hint: ")


def test_layers_that_an_architecture_can_t_do_with_give_way_where_auto_chose_them(tmp_path: Path) -> None:
    # it reads the weights of its router itself, which a packed layer doesn't hold
    model = AutoModelForCausalLM.from_config(shrink.tiny_config("hunyuan_v1_moe"))
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = load_target(TargetSettings(model=str(tmp_path), device="cpu"))
    assert (target.identity.runner, target.identity.attention) == ("eager", "eager")
    with pytest.raises(TargetError, match="can't verify a tree"):
        load_target(TargetSettings(model=str(tmp_path), device="cpu", runner="packed"))


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma3n_text"])
def test_what_a_forward_takes_is_counted_where_layers_differ(model_type: str) -> None:
    config = shrink.tiny_config(model_type)
    assert ForwardMemory.of(config, 4, "eager").bytes(2, 5, 9) > 0

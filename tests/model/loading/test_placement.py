"""Where weights go and how they are held: spread over several GPUs, or in 4 or 8 bits."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.config.loading import load_recipe
from medusa_cli.config.recipe import TargetSettings
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.errors import MissingExtra, RecipeError, TargetError
from medusa_cli.model.loading import load as load_room
from medusa_cli.model.loading.load import load_target
from medusa_cli.model.loading.placement import placing_of
from medusa_cli.model.loading.sources import Source
from medusa_cli.model.target import Target
from medusa_cli.model.weights import step_bytes, stored
from medusa_cli.pipeline.planning.run_memory import QUANTISED, model_of
from medusa_cli.util.optional import extra_hint
from tests.fakes import OracleDrafter, wide
from tests.tiny_folders import save_gguf, save_tiny

ROOT = Path(__file__).parents[3]
WIDER = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "initializer_range": 0.3}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


# --- several GPUs ---


def test_layers_on_two_gpus_meet_only_tensors_of_their_own() -> None:
    # in a process of its own: the devices it makes up stay
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/model/on_two_gpus.py"], capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == 0, run.stdout
    assert "5 passed" in run.stdout


def test_a_model_spread_over_one_device_decodes_as_ever(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    one, spread_out = (load(folder, device_map=device_map) for device_map in ("one", "auto"))
    assert text_of(spread_out) == text_of(one)
    assert spread_out.fingerprint == one.fingerprint


@pytest.mark.parametrize(
    ("device_map", "words"),
    [
        (
            {"model.embed_tokens": "cpu", "model": "cpu", "lm_head": "disk"},
            "some of its layers would lie on the CPU and",
        ),
        ({"": "disk"}, "some of its layers would lie on the disk"),
    ],
)
def test_a_model_that_finds_no_room_on_the_gpus_is_refused(
    device_map: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny(tmp_path / "model", tie_word_embeddings=False)
    placing = {"device_map": device_map, "offload_folder": str(tmp_path / "offload")}
    monkeypatch.setattr(load_room, "placing_of", lambda *_: placing)
    with pytest.raises(TargetError) as caught:
        load(folder, device_map="auto")
    assert words in caught.value.message
    assert "target.quantize=4bit" in caught.value.hint


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["target.device_map=auto", "target.device=cpu"], "target spreads the layers by device_map auto, and names"),
        (["target.device_map=auto", "target.runner=packed"], "target asks for device_map auto, and for the packed"),
        (["target.quantize=4bit", "target.runner=blocks"], "target asks for quantize 4bit, and for the blocks runner"),
        (["target.quantize=8bit", "target.runner=graphs"], "target asks for quantize 8bit, and for the graphs runner"),
        (["target.quantize=3bit"], "target.quantize is one of none, 4bit, 8bit, not '3bit': did you mean"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe(None, settings)


# --- 4 and 8 bits ---


def load(name: Path, **settings: Any) -> Target:
    return load_target(TargetSettings(model=str(name), dtype="float32", **settings))


def text_of(target: Target, drafter: Any = None) -> list[int]:
    prompt = [5, 7, 11]
    return collect(Parts(target, drafter or NoDrafter(), Greedy()), [prompt], Limits(24))[0].token_ids


@pytest.mark.parametrize(("quantize", "package"), [("4bit", "bitsandbytes"), ("8bit", "torchao")])
def test_without_the_package_the_extra_is_named(
    quantize: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra) as caught:
        load(save_tiny(tmp_path / "model"), quantize=quantize)
    assert package in caught.value.message
    assert caught.value.hint == extra_hint("quantize")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise OSError('libtorch.so: undefined symbol')", "undefined symbol"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("", "Int8WeightOnlyConfig"),
    ],
)
def test_a_package_that_is_there_and_can_not_be_used_is_told_in_words(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torchao"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "quantization.py").write_text(code)
    held = [name for name in sys.modules if name.partition(".")[0] == "torchao"]
    for name in {"torchao", "torchao.quantization", *held}:
        monkeypatch.setitem(sys.modules, name, None)  # so that what is imported now goes with the test
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TargetError) as caught:
        placing_of(TargetSettings(quantize="8bit"), Source("m", "m"), torch.float32, torch.device("cpu"))
    assert "torchao is installed and can't be used" in caught.value.message
    assert words in caught.value.message
    assert "--force-reinstall torchao" in caught.value.hint


@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
def test_a_gguf_file_is_not_quantised_again(tmp_path: Path, quantize: str) -> None:
    with pytest.raises(TargetError, match="can't be quantised again"):
        load(save_gguf(tmp_path / "tiny.gguf"), quantize=quantize)


def need_torchao(quantize: str) -> None:
    if quantize == "8bit":
        pytest.importorskip("torchao", reason="make test-8-bits has it")


@pytest.mark.parametrize(("quantize", "dtype"), [("4bit", torch.uint8), ("8bit", torch.int8)])
def test_a_tree_on_few_bits_writes_what_the_library_writes_on_them(
    tmp_path: Path, quantize: str, dtype: torch.dtype
) -> None:
    need_torchao(quantize)
    target = load(save_tiny(tmp_path / "model", **WIDER), quantize=quantize)
    assert target.identity.runner == "eager"
    held = {part.dtype for parameter in target.model.model.layers.parameters() for part in stored(parameter)}
    assert dtype in held
    plain = text_of(target)
    assert len(set(plain)) > 5
    prompt = torch.tensor([[5, 7, 11]])
    library = target.model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert plain == library[0, 3:].tolist()
    assert text_of(target, OracleDrafter([[5, 7, 11, *plain]], wide)) == plain


@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
def test_few_bits_take_less_memory_and_are_counted(tmp_path: Path, quantize: str) -> None:
    need_torchao(quantize)
    folder = save_tiny(tmp_path / "model", **WIDER)
    full, few = (step_bytes(load(folder, quantize=how)) for how in ("none", quantize))
    model = model_of(AutoConfig.from_pretrained(folder))
    planned = model.bytes(4, each=QUANTISED[quantize]) - model.bytes(4, each=None)
    assert few - full == pytest.approx(planned, rel=0.1)


@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
def test_few_bits_are_other_weights_and_the_same_ones_each_time(tmp_path: Path, quantize: str) -> None:
    need_torchao(quantize)
    folder = save_tiny(tmp_path / "model", **WIDER)
    full, held, again = (load(folder, quantize=how).fingerprint for how in ("none", quantize, quantize))
    assert held == again != full
    # adapters that were merged change linear layers alone
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.1)
    model.save_pretrained(folder)
    assert load(folder, quantize=quantize).fingerprint != held

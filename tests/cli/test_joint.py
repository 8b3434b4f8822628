"""`medusa train-heads` with a section lora: the whole path, and the adapted model decoded with its heads."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_cli import assemble
from medusa_cli.config.recipe import Recipe
from medusa_cli.errors import TrainingError
from medusa_cli.pipeline import joint_stage as joint_module
from tests.cli.harness import LORA, Done, Medusa, train_args


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_heads_go_on_where_they_were_alone_and_that_is_told(joint: tuple[Path, Done]) -> None:
    folder, done = joint
    alone = [line for line in lines(folder / "train.jsonl") if line["kind"] == "eval"][-1]
    begun = lines(folder / "joint" / "train.jsonl")[0]
    assert (begun["kind"], begun["step"]) == ("eval", 0)
    # the same places; states are stored in 16 bits
    assert begun["loss"] == pytest.approx(alone["loss"], rel=2e-3)
    assert (begun["divergence"], begun["agreement"]) == (0, 1)
    assert "heads go on from their own training (weight, bias, root_weight); new: 28 tensors of the adapter" in done.err


def test_the_folder_holds_heads_and_adapter_and_the_model_s_files_are_as_they_were(
    joint: tuple[Path, Done], tiny: Path, model_before: bytes
) -> None:
    folder, _ = joint
    assert (tiny / "model.safetensors").read_bytes() == model_before
    assert {file.name for file in (folder / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    config = json.loads((folder / "heads.json").read_text())["config"]
    assert config["target_fingerprint"].endswith(f"+{config['adapter']}")
    assert lines(folder / "joint" / "train.jsonl")[-1]["step"] == 12


def test_how_far_the_model_moved_is_told_and_kept(joint: tuple[Path, Done]) -> None:
    folder, done = joint
    moved = done.document["adapter"]
    assert moved["perplexity_before"] > 1
    assert moved["perplexity_after"] != moved["perplexity_before"]
    assert 0 < moved["agreement"] < 1
    assert len(moved["top1_before"]) == len(moved["top1_after"]) == 3
    assert moved == json.loads((folder / "provenance.json").read_text())["adapter"]
    card = (folder / "README.md").read_text()
    assert "## Adapter" in card
    assert f"| same best token | {moved['agreement']:.1%} |" in card


@pytest.mark.parametrize("runner", ["eager", "packed", "auto"])
def test_the_text_is_what_transformers_writes_with_the_adapter_merged(
    joint: tuple[Path, Done], medusa: Medusa, tiny: Path, runner: str
) -> None:
    folder, _ = joint
    merged = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, attn_implementation="eager"), folder / "adapter"
    ).merge_and_unload()
    ids = AutoTokenizer.from_pretrained(tiny).apply_chat_template(
        [{"role": "user", "content": "What is it?"}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    wanted = merged.generate(**ids, do_sample=False, max_new_tokens=40)[0, ids["input_ids"].shape[1] :].tolist()
    asked = ("generate", "What is it?", "-m", tiny, "--dtype", "float32", "-n", 40, "--json", "--heads", folder)
    for more in (("--drafter", "medusa", "--speculate", "on"), ("--drafter", "mixed", "--speculate", "on"), ()):
        done = medusa(*asked, "--runner", runner, "--attention", "eager", *more)
        assert done.code == 0, done.err
        assert done.document["token_ids"] == wanted
    plain = medusa("generate", "What is it?", "-m", tiny, "--dtype", "float32", "-n", 40, "--json").document
    assert plain["token_ids"] != wanted, "the adapter changes the text, or nothing is tested"
    assert "the heads come with an adapter" in done.err


def test_a_text_with_the_adapter_passes_its_check(joint: tuple[Path, Done], medusa: Medusa, tiny: Path) -> None:
    folder, _ = joint
    asked = ("generate", "What is it?", "-m", tiny, "--dtype", "float32", "-n", 20, "--heads", folder, "--check")
    assert medusa(*asked, "--speculate", "on").code == 0


def test_the_bench_runs_every_arm_with_the_adapter(
    joint: tuple[Path, Done], medusa: Medusa, tiny: Path, tmp_path: Path
) -> None:
    folder, _ = joint
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a", "category": "c", "turns": ["What is it?"]}\n')
    done = medusa(
        "bench", "-m", tiny, "--dtype", "float32", "--heads", folder, "--compare", "greedy,hf-greedy@float32",
        "--prompts", file, "--max-new-tokens", 16, "--repeats", 1, "--num-warmups", 0, "--require-identical", "--json",
        "--drafter", "medusa", "--allow-random-prompts",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert all(found["same"] == found["of"] == 1 for found in done.document["identical"].values())


def test_the_doctor_checks_the_model_with_the_adapter(joint: tuple[Path, Done], medusa: Medusa, tiny: Path) -> None:
    folder, _ = joint
    done = medusa("doctor", tiny, "--heads", folder, "--json")
    assert done.code == 0, done.err
    assert done.document["adapter"] == str(folder / "adapter")
    assert "+" in done.document["fingerprint"]


def test_the_tree_is_inspected_with_the_cost_of_the_adapted_model(
    joint: tuple[Path, Done], medusa: Medusa, tiny: Path
) -> None:
    folder, _ = joint
    done = medusa("inspect-tree", "-m", tiny, "--heads", folder, "--measure", "--json")
    assert done.code == 0, done.err


def without_adapter(folder: Path) -> None:
    shutil.rmtree(folder / "adapter")


def of_other_numbers(folder: Path) -> None:
    file = folder / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": 99}))


@pytest.mark.parametrize(
    ("change", "words"), [(without_adapter, "lacks adapter_model"), (of_other_numbers, "is another adapter")]
)
@pytest.mark.parametrize("command", [("generate", "What is it?"), ("doctor",)])
def test_heads_without_their_adapter_are_refused_before_a_model_is_loaded(
    joint: tuple[Path, Done],
    medusa: Medusa,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    change: Callable[[Path], None],
    words: str,
) -> None:
    folder = shutil.copytree(joint[0], tmp_path / "copy")
    change(folder)
    monkeypatch.setattr(assemble, "load_target", None)
    refused = medusa(*command, "-m", tiny, "--heads", folder)
    assert refused.code == 1
    assert words in refused.err
    assert refused.err.count(" hint: copy the whole folder") == 1


def test_heads_of_another_model_s_adapter_are_refused(joint: tuple[Path, Done], medusa: Medusa, tmp_path: Path) -> None:
    from tests.cli.harness import make_model

    other = make_model(tmp_path / "other", seed=5)
    refused = medusa("generate", "What is it?", "-m", other, "--heads", joint[0])
    assert refused.code == 1
    assert "was trained on weights with the fingerprint" in refused.err


@pytest.mark.parametrize("rank", [0, 1])
def test_several_processes_are_refused_before_anything_is_written(
    train: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    for name, value in {"WORLD_SIZE": 2, "RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    refused = train(*LORA)
    assert refused.code == 1
    words = "error: lora: heads and adapter learn in one process, and 2 were launched\n hint: let the heads learn alone"
    # the first process speaks for all
    assert refused.err.startswith(words) if rank == 0 else refused.err == ""
    assert not (tmp_path / "run").exists()


def test_a_step_that_does_not_fit_says_what_to_lower(
    train: Callable[..., Done], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(joint_module, "train_joint", full)
    refused = train("--dataset", data, *LORA)
    assert refused.code == 1
    assert "does not hold a step of 4 texts\n hint: lower lora.batch_size" in refused.err


def test_data_that_others_wrote_is_learnt_whole(train: Callable[..., Done], data: Path, tmp_path: Path) -> None:
    done = train("--dataset", data, "--json", *LORA, "lora.max_steps=2")
    assert done.code == 0, done.err
    assert done.document["adapter"]["places"] > 0
    # what the model said before and says after are kept apart
    config = json.loads((tmp_path / "run" / "heads.json").read_text())["config"]
    before, after = (
        json.loads((tmp_path / "run" / place / "store.json").read_text())["fingerprint"]
        for place in ("written/held-out", f"joint/held-out/{config['adapter']}")
    )
    assert after == config["target_fingerprint"] == f"{before}+{config['adapter']}"


def test_modules_that_are_not_there_are_told_before_a_model_is_loaded(
    train: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "load_target", None)
    refused = train("lora.target_modules=[q_prj]")
    assert refused.code == 1
    assert "lora.target_modules: this model has no q_prj: did you mean q_proj?" in refused.err


@pytest.mark.parametrize("content", ["[]", "null", "[" * 100_000, "{"])
def test_settings_of_the_stage_that_were_spoilt_are_told(tiny: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "joint" / "checkpoints").mkdir(parents=True)
    (tmp_path / "joint" / "checkpoints" / "step-00000001.pt").write_bytes(b"a state")
    (tmp_path / "joint" / "settings.json").write_text(content)
    recipe = Recipe.model_validate({"target": {"model": str(tiny)}, "lora": {}})
    with pytest.raises(TrainingError, match=r"settings\.json can't be read"):
        joint_module.check_joint(recipe, tmp_path)


def test_a_plan_tells_of_the_adapter(medusa: Medusa, tiny: Path, tmp_path: Path) -> None:
    plan = medusa(*train_args(tiny, tmp_path / "new", "--plan", *LORA))
    assert "over 14 layers, at most 12 steps with the heads" in plan.out
    assert "with the adapter " in plan.out
    document = medusa(*train_args(tiny, tmp_path / "new", "--plan", "--json", *LORA)).document
    # each layer's inputs and outputs, times the rank
    layer = 2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48)
    assert document["joint"]["parameters"] == 4 * 2 * layer
    assert document["memory"]["joint"] > document["memory"]["weights"]
    assert document["seconds"]["adapter"] > 0

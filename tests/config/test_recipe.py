"""A recipe's settings: every fault is named at once, in words a user can act on, and YAML's surprises are none."""

from pathlib import Path

import pytest

from medusa_cli.config.loading import load_recipe, resolved
from medusa_cli.config.recipe import Recipe
from medusa_cli.errors import RecipeError

RUNNERS = "auto, eager, packed, blocks, compiled, graphs"
MEANT = ": did you mean packed?"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "recipe.yaml"


def told(file: Path, content: str) -> str:
    """The message that refuses this content."""
    file.write_text(content)
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value.message


def test_every_fault_is_named_at_once(file: Path) -> None:
    content = """
        target: {dtype: fp32, modle: a}
        heads: {num_heads: 0}
        data: {num_samples: many, rows: 2.5}
        train: {epcohs: 3, learning_rate: 0}
        optimiser: adam
    """
    assert told(file, content) == f"{file}: " + "; ".join(
        [
            "target.dtype is one of auto, float32, bfloat16, float16, int8, not 'fp32': did you mean float32?",
            "target.modle is no setting: did you mean target.model?",
            "heads.num_heads must be at least 1, not 0",
            "data.num_samples must be a whole number, not 'many'",
            "data.rows must be a whole number, not 2.5",
            "train.learning_rate must be more than 0, not 0",
            "train.epcohs is no setting: did you mean train.epochs?",
            "optimiser is no setting",
        ]
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        # the right name in the wrong place
        ("epochs: 3", "epochs is no setting: did you mean train.epochs?"),
        ("model: a", "model is no setting: did you mean target.model?"),
        ("train: {num_samples: 3}", "train.num_samples is no setting: did you mean data.num_samples?"),
        ("target: {seed: 3}", "target.seed is no setting: did you mean seed?"),
        ("lerning_rate: 3", "lerning_rate is no setting: did you mean train.learning_rate?"),
        ("Train: {epochs: 3}", "Train is no setting: did you mean train?"),
        ("data: {num-samples: 3}", "data.num-samples is no setting: did you mean data.num_samples?"),
        # ranges
        ("heads: {num_heads: 17}", "heads.num_heads must be at most 16, not 17"),
        ("seed: -1", "seed must be at least 0, not -1"),
        ("train: {warmup_ratio: 1}", "train.warmup_ratio must be less than 1, not 1"),
        ("train: {epochs: .nan}", "train.epochs must be a finite number, not nan"),
        ("train: {learning_rate: 1e300}", "train.learning_rate is larger than what can be computed with, not '1e300'"),
        ("data: {max_disk_gb: 1e308}", "data.max_disk_gb is larger than what can be computed with, not '1e308'"),
        ("lora: {keep_weight: 1e30}", "lora.keep_weight is larger than what can be computed with, not '1e30'"),
        ("lora: {alpha: 9999999999999999999}",
         "lora.alpha is larger than what can be computed with, not 9999999999999999999"),
        ("data: {openings: []}", "data.openings must hold at least 1, not 0"),
        # types
        ("train: 3", "train is a section, with its settings indented below it, not 3"),
        ("train: [epochs]", "train is a section, with its settings indented below it, not ['epochs']"),
        ("heads: {num_heads: yes}", "heads.num_heads must be a whole number, not true"),
        ("train: {learning_rate: no}", "train.learning_rate must be a number, not false"),
        ("heads: {own_output: maybe}", "heads.own_output must be true or false, not 'maybe'"),
        ("target: {revision: 12345}", "target.revision must be text, not 12345: put it in quotes"),
        ("target: {model: yes}", "target.model must be text, not true: put it in quotes"),
        ("train: {epochs: {a: 1}}", "train.epochs must be a number, not {'a': 1}"),
        ("data: {openings: Write}", "data.openings must be a list, not 'Write'"),
        ("data: {openings: [a, 3]}", "data.openings.1 must be text, not 3: put it in quotes"),
        ("1: 2", "1 is no setting"),
        # choices and patterns
        ("target: {runner: pack}", f"target.runner is one of {RUNNERS}, not 'pack'" + MEANT),
        ("target: {device: gpu}", "target.device is auto, cpu, cuda, cuda:N or mps, not 'gpu'"),
        ("train: {report_to: tensorboard}", "train.report_to is one of none, wandb, not 'tensorboard'"),
    ],
)  # fmt: skip
def test_a_fault_says_what_is_wanted(content: str, words: str, file: Path) -> None:
    assert told(file, content) == f"{file}: {words}"


def test_a_setting_given_twice_is_a_fault_that_yaml_would_not_tell(file: Path) -> None:
    message = told(file, "train:\n  epochs: 3\n  epochs: 4\nseed: 1\nseed: 2\n")
    assert message == f"{file}: epochs is given twice (line 3); seed is given twice (line 5)"


def test_a_section_whose_lines_are_all_commented_out_holds_its_defaults(file: Path) -> None:
    file.write_text("train:\n  # epochs: 3\nseed: 4\n")
    assert load_recipe(file) == Recipe(seed=4)


@pytest.mark.parametrize(("written", "meant"), [("1e-4", 1e-4), ("2E3", 2000.0), ("'0.5'", 0.5), ("3", 3.0)])
def test_numbers_are_read_however_yaml_takes_them(written: str, meant: float, file: Path) -> None:
    file.write_text(f"train: {{learning_rate: {written}}}")
    assert load_recipe(file).train.learning_rate == meant


def test_a_whole_number_may_have_an_exponent(file: Path) -> None:
    file.write_text("data: {num_samples: 2e3}")
    assert load_recipe(file).data.num_samples == 2000


def test_text_that_looks_like_a_number_stays_text(file: Path) -> None:
    file.write_text("target: {revision: '12e4567'}\noutput_dir: '1e5'")
    recipe = load_recipe(file)
    assert (recipe.target.revision, recipe.output_dir) == ("12e4567", "1e5")


def test_a_resolved_recipe_is_a_recipe_that_says_the_same(file: Path) -> None:
    recipe = load_recipe(None, ["train.epochs=3", "target.revision='123'", "train.learning_rate=1e-5"])
    text = resolved(recipe)
    assert "num_layers: 1" in text  # defaults are written out
    assert "Summarize" not in text  # but not the package's hundred lines of steering
    file.write_text(text)
    assert load_recipe(file) == recipe


def test_openings_of_one_s_own_are_written_out(file: Path) -> None:
    recipe = load_recipe(None, ["data.openings=['Write a poem about {topic}']"])
    file.write_text(resolved(recipe))
    assert "Write a poem about {topic}" in file.read_text()
    assert load_recipe(file) == recipe


def test_a_section_that_may_be_left_out_is_on_when_a_setting_of_it_is_given(file: Path) -> None:
    assert Recipe().lora is None
    given = load_recipe(None, ["lora.rank=8", "lora.learning_rate=1e-4", "lora.target_modules=[q_proj, v_proj]"]).lora
    assert given is not None
    assert (given.rank, given.learning_rate, given.target_modules) == (8, 1e-4, ("q_proj", "v_proj"))
    assert load_recipe(None, surroundings={"MEDUSA_LORA_RANK": "8"}).lora is not None
    file.write_text("lora: {}")
    assert load_recipe(file).lora is not None
    file.write_text(resolved(Recipe()))
    assert load_recipe(file) == Recipe()
    assert load_recipe(file, ["lora.rank=8"]).lora is not None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("lora: {rnak: 8}", "lora.rnak is no setting: did you mean lora.rank?"),
        ("lora: {rank: 0}", "lora.rank must be at least 1, not 0"),
        ("lora: {dropout: 1}", "lora.dropout must be less than 1, not 1"),
        ("lora: {target_modules: q_proj}", "lora.target_modules must be a list, not 'q_proj'"),
        ("lora: {target_modules: []}", "lora.target_modules must hold at least 1, not 0"),
        ("lora: {keep_weight: 0}", "lora.keep_weight must be more than 0, not 0"),
        ("lora: 3", "lora is a section, with its settings indented below it, not 3"),
        (
            "lora: {}\ntarget: {quantize: 4bit}",
            "lora is merged into full weights, and target.quantize is 4bit: leave one out",
        ),
        (
            "lora: {}\ntarget: {device_map: auto}",
            "lora learns on one device, and target.device_map asks for several: leave one out",
        ),
        (
            "lora: {}\ntarget: {dtype: float16}",
            "lora can't learn in target.dtype float16, whose gradients vanish: use bfloat16 or float32",
        ),
    ],
)
def test_what_an_adapter_can_not_be_is_a_fault(content: str, words: str, file: Path) -> None:
    assert told(file, content) == f"{file}: {words}"


def test_a_fault_that_was_given_on_top_is_not_the_file_s(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("train: {epochs: 1}")
    with pytest.raises(RecipeError) as on_top:
        load_recipe(file, ["target.quantize=9bit"], {"data.rows": 0}, {"MEDUSA_TRAIN_EPOCHS": "0"})
    assert "mine.yaml" not in on_top.value.message
    file.write_text("train: {epochs: 0}")
    with pytest.raises(RecipeError, match=r"mine\.yaml: "):
        load_recipe(file, ["target.quantize=9bit"], {}, {})


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("MEDUSA_TRAIN_EPOCH", "MEDUSA_TRAIN_EPOCHS"),
        ("MEDUSA_EPOCHS", "did you mean MEDUSA_LORA_EPOCHS or MEDUSA_TRAIN_EPOCHS?"),
        ("MEDUSA_OUTPUTDIR", "did you mean MEDUSA_OUTPUT_DIR?"),
        ("MEDUSA_LORA_ZZZ", "MEDUSA_LORA_"),
    ],
)
def test_a_setting_misspelt_in_the_environment_is_no_setting(key: str, meant: str) -> None:
    with pytest.raises(RecipeError, match=f"{key} in the environment is no setting") as caught:
        load_recipe(None, surroundings={key: "7"})
    assert meant in caught.value.hint


def test_variables_of_ours_that_are_no_settings_and_those_of_others_are_left_alone() -> None:
    names = ("HOME", "TRACEBACK", "TRACE", "REPLAY", "CHECK", "TEST_GEMMA", "SERVER_URL")
    assert load_recipe(None, surroundings={f"MEDUSA_{name}": "1" for name in names}) == Recipe()

"""What a user can get wrong: one error line, one hint, the right exit code, never a traceback."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.harness import Done, Medusa, make_model, run_here, train_args

COMMANDS = (("generate", "Hi"), ("bench",), ("train-heads",))


def assert_told(done: Done, code: int, *parts: str) -> None:
    """Exactly one error and one hint, nothing on stdout, and each of these words."""
    assert done.code == code, done.err
    assert done.out == ""
    lines = [line for line in done.err.splitlines() if not line.startswith("warning: ")]
    assert [line[:7] for line in lines[-2:]] == ["error: ", " hint: "], done.err
    assert done.err.count("error: ") == done.err.count(" hint: ") == 1
    assert "Traceback" not in done.err
    for part in parts:
        assert part in done.err, done.err


@pytest.fixture
def ask(medusa: Medusa, tiny: Path) -> Callable[..., Done]:
    """A generate of the tiny model."""
    return lambda *args, **more: medusa("generate", "-m", tiny, "--dtype", "float32", "-n", 4, "-q", *args, **more)


@pytest.fixture
def broken(heads: Path, tmp_path: Path) -> Path:
    """A copy of the heads, to be spoilt."""
    return Path(shutil.copytree(heads, tmp_path / "broken", ignore=shutil.ignore_patterns("written", "checkpoints")))


# --- models ---


@pytest.mark.parametrize("command", COMMANDS)
def test_an_alias_nearly_right_is_corrected(command: tuple[str, ...], heads: Path, tmp_path: Path) -> None:
    more = ("-o", tmp_path / "run") if command[0] == "train-heads" else ("--heads", heads)
    assert_told(
        run_here(*command, "-m", "smollm2-13m", *more), 1, "unknown model 'smollm2-13m'", "did you mean smollm2-135m?"
    )


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["someone/some-model", "/no/such/folder", "./no.gguf"])
def test_a_model_that_is_not_there_is_named(command: tuple[str, ...], name: str, heads: Path, tmp_path: Path) -> None:
    more = ("-o", tmp_path / "run") if command[0] == "train-heads" else ("--heads", heads)
    assert_told(run_here(*command, "-m", name, *more), 1, name)


def test_a_model_folder_without_weights_or_config_is_told_apart(
    ask: Callable[..., Done], tiny: Path, tmp_path: Path
) -> None:
    assert_told(ask("Hi", "-m", tmp_path), 1, "holds no config.json")
    shutil.copy(tiny / "config.json", tmp_path)
    assert_told(ask("Hi", "-m", tmp_path), 1, "holds a config.json but no weights")


def test_a_device_that_is_not_there_is_refused(ask: Callable[..., Done]) -> None:
    assert_told(ask("Hi", "--device", "cuda:99"), 1, "device cuda:99 is not there", "--device cpu")
    assert_told(ask("Hi", "--device", "gpu"), 1, "target.device")


# --- heads and trees ---


@pytest.mark.parametrize("command", [("generate", "Hi"), ("bench",), ("inspect-tree",)])
@pytest.mark.parametrize("name", ["no/such/heads", "someone/some-heads"])
def test_heads_that_are_not_there_are_named_before_the_model_is_loaded(command: tuple[str, ...], name: str) -> None:
    assert_told(
        run_here(*command, "-m", "/no/such/model", "--heads", name), 1, f"no heads at {'' if 'some' in name else '/'}"
    )


def test_heads_of_another_model_say_whose_they_are(heads: Path, tiny: Path, tmp_path: Path) -> None:
    for change in ({"seed": 1}, {"hidden_size": 16}):
        other = make_model(tmp_path / str(change), **change)
        done = run_here("generate", "Hi", "-m", other, "--dtype", "float32", "--heads", heads, "-q")
        assert_told(done, 1, "the heads need ", f"these heads belong to {tiny}")


SPOILT: dict[str, Callable[[Path], Any]] = {
    "heads.safetensors is truncated": lambda folder: (folder / "heads.safetensors").write_bytes(
        (folder / "heads.safetensors").read_bytes()[:-100]
    ),
    "heads.safetensors is damaged": lambda folder: (folder / "heads.safetensors").write_bytes(
        (folder / "heads.safetensors").read_bytes()[:-4] + b"abcd"
    ),
    "heads.safetensors is missing": lambda folder: (folder / "heads.safetensors").unlink(),
    "heads.json is missing": lambda folder: (folder / "heads.json").unlink(),
    "heads.json is damaged": lambda folder: (folder / "heads.json").write_text("{"),
    "tree.json is missing": lambda folder: (folder / "tree.json").unlink(),
    "tree.json: this is neither JSON nor a Python list": lambda folder: (folder / "tree.json").write_text("{"),
    'tree.json holds no "paths"': lambda folder: (folder / "tree.json").write_text("{}"),
}


@pytest.mark.parametrize("fault", SPOILT)
def test_a_spoilt_folder_of_heads_is_told_by_the_file_at_fault(
    fault: str, ask: Callable[..., Done], broken: Path
) -> None:
    SPOILT[fault](broken)
    assert_told(ask("Hi", "--heads", broken), 1, fault)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"plain": 3}', '{"plain": [[2.0]]}'])
def test_a_spoilt_accuracy_file_is_told(content: str | None, medusa: Medusa, broken: Path) -> None:
    file = broken / "accuracy.json"
    file.unlink() if content is None else file.write_text(content)
    assert_told(medusa("inspect-tree", "--heads", broken, "--tree-size", 3), 1, "accuracy.json")


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ("chain:4", "path [0, 0, 0, 0] needs head 4; 3 present"),
        ("[[999]]", "999"),
        ("[[0],[0]]", "[0]"),
        ("[[0,0]]", "[0, 0]"),
        ("no-such-file", "'no-such-file' is neither a tree nor a file"),
        ("chain:99999", "has more than 1024 nodes"),
    ],
)
@pytest.mark.parametrize("command", [("generate", "Hi"), ("bench",), ("inspect-tree",)])
def test_a_tree_that_is_none_or_asks_too_much_is_refused(
    command: tuple[str, ...], tree: str, words: str, tiny: Path, heads: Path
) -> None:
    quick = () if command[0] == "inspect-tree" else ("-q", "--dtype", "float32")
    assert_told(run_here(*command, "-m", tiny, "--heads", heads, "--tree", tree, *quick), 1, words)


# --- prompts ---


@pytest.mark.parametrize("command", ["generate", "bench"])
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.jsonl", None, "missing.jsonl"),
        ("empty.jsonl", b"", "holds no prompt"),
        ("bad.jsonl", b'{"prompt": "a"}\n{"prom', "JSON"),
        ("list.jsonl", b"[1, 2]\n", "list.jsonl"),
        ("latin.jsonl", b'{"prompt": "caf\xe9"}\n', "latin.jsonl"),
    ],
)
def test_prompts_that_can_not_be_read_are_told_by_file(
    command: str, name: str, content: bytes | None, words: str, tiny: Path, heads: Path, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    flag = "--prompt-file" if command == "generate" else "--prompts"
    assert_told(run_here(command, "-m", tiny, "--heads", heads, flag, tmp_path / name, "-q"), 1, words)


def test_a_prompt_that_says_nothing_or_fills_the_context_is_refused(ask: Callable[..., Done]) -> None:
    assert_told(ask(""), 1, "the prompt is empty")
    assert_told(ask("-", stdin=" \n"), 1, "the prompt is empty")
    assert_told(ask("", "--no-chat"), 1, "the prompt is empty, and the tokenizer names no first token")
    assert_told(ask("-", stdin=b"\xff\xfe"), 1, "stdin is not UTF-8")
    assert_told(ask("long " * 300), 1, "the model's context holds 256", "shorten the prompt")


def test_an_empty_prompt_is_told_before_a_model_is_looked_for(medusa: Medusa, tmp_path: Path) -> None:
    assert_told(medusa("generate", " ", "-m", "/no/such/model"), 1, "the prompt is empty", "hint: write what is asked")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": " "}\n')
    asked = medusa("generate", "--prompt-file", tmp_path / "prompts.jsonl", "-m", "/no/such/model")
    assert_told(asked, 1, "row 2, field messages[0]: an empty user message")


def test_a_long_prompt_is_refused_by_bench_before_any_forward(tiny: Path, heads: Path, tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"prompt": "long " * 300}) + "\n")
    assert_told(
        run_here("bench", "-m", tiny, "--heads", heads, "--prompts", file, "-q", "--dtype", "float32"),
        1,
        "prompt 1 has 1511 tokens; the model's context holds 256",
    )


# --- flags ---


@pytest.mark.parametrize(
    ("code", "flags"),
    [
        (2, ()),
        (2, ("Hi", "--prompt-file", "x.txt")),
        (2, ("Hi", "--top-p", 0)),
        (2, ("Hi", "--top-p", 1.5)),
        (2, ("Hi", "--top-p", "nan")),
        (2, ("Hi", "--temperature", -1)),
        (2, ("Hi", "--max-new-tokens", 0)),
        (2, ("Hi", "--check", "--temperature", 1)),
        (2, ("Hi", "--stop", "")),
        (2, ("Hi", "--dtype", "int3")),
        (2, ("Hi", "--drafter", "oracle")),
        (2, ("Hi", "--tree-size", 5000)),
        (2, ("Hi", "--output-json", "/no/such/folder/x.json")),
        (2, ("Hi", "-c", "/no/such/recipe.yaml")),
        (1, ("Hi", "--acceptance", "greedy", "--temperature", 1)),
        (1, ("Hi", "--acceptance", "lossless")),
        (1, ("Hi", "--drafter", "none", "--tree", "2x1")),
        (1, ("Hi", "--drafter", "medusa")),
        (1, ("Hi", "--tree", "2x1")),
    ],
)
def test_flags_that_make_no_sense_are_refused(code: int, flags: tuple[object, ...], medusa: Medusa) -> None:
    assert_told(medusa("generate", "-m", "some-folder", *flags), code)


def test_two_flags_that_name_the_tree_are_one_too_many(ask: Callable[..., Done], heads: Path) -> None:
    assert_told(
        ask("Hi", "--heads", heads, "--tree", "2x1", "--tree-size", 3), 1, "--tree and --tree-size both say which tree"
    )


# --- recipes ---


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.epoch=3", "train.epoch is no setting: did you mean train.epochs?"),
        ("train.epochs=many", "train.epochs must be a number, not 'many'"),
        ("train.epochs=0", "train.epochs must be more than 0, not 0"),
        ("data.held_out=2", "data.held_out must be less than 0.5, not 2"),
        ("trian.epochs=3", "trian is no setting: did you mean train?"),
        ("epochs", "override 'epochs' is not of the form name=value"),
        ("train.epochs=[", "override 'train.epochs=[': the value is not YAML"),
    ],
)
def test_a_setting_that_is_none_is_told_with_the_nearest_one(
    setting: str, words: str, medusa: Medusa, tmp_path: Path
) -> None:
    assert_told(medusa("train-heads", setting, "-o", tmp_path / "run"), 1, words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", ["a: [", "- 1\n", "", "train:\n  epoch: 3\n", "train: 3\n"])
def test_a_recipe_that_is_none_is_told_by_name(content: str, medusa: Medusa, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(content)
    assert_told(medusa("train-heads", "-c", recipe, "-o", tmp_path / "run"), 1, "recipe.yaml")


# --- data and folders of a training run ---


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.jsonl", None, "no such file"),
        ("empty.jsonl", "", "0 usable rows"),
        ("broken.jsonl", "{", "0 usable rows; 1 rows read, 1 left out: 1 broken JSON (first: line 1)"),
        ("odd.jsonl", '{"colour": "blue"}\n', "0 usable rows"),
        ("data.csv", "a,b\n", "can't tell its format from '.csv'"),
        ("silent.jsonl", '{"prompt": "a"}\n{"prompt": "  "}\n', "one text can't both train and measure"),
    ],
)
def test_data_that_can_not_be_used_is_told(
    name: str, content: str | None, words: str, medusa: Medusa, tiny: Path, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    done = medusa(*train_args(tiny, tmp_path / "run", "--dataset", tmp_path / name, "-q"))
    assert_told(done, 1, words)


def test_a_hub_data_set_without_a_network_is_told(medusa: Medusa, tiny: Path, tmp_path: Path) -> None:
    done = medusa(*train_args(tiny, tmp_path / "run", "--dataset", "someone/some-data", "-q"))
    assert_told(done, 1, "can't load data set 'someone/some-data'")


def test_prompts_that_are_all_too_long_are_told(medusa: Medusa, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"prompt": "long " * 100}) + "\n")
    assert_told(
        medusa(*train_args(tiny, tmp_path / "run", "--dataset", file, "-q")), 1, "none of 1 prompts can be answered"
    )


def test_an_output_folder_that_can_not_be_written_is_told_before_the_model_is_loaded(
    medusa: Medusa, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    done = medusa("train-heads", "-m", "/no/such/model", "-o", tmp_path / "file" / "run")
    assert_told(done, 1, f"can't write to {tmp_path / 'file' / 'run'}", "another --output-dir")


def test_a_run_folder_of_another_model_is_refused(medusa: Medusa, tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert medusa(*train_args(tiny, run, "--max-steps", 1, "-q")).code == 0
    other = make_model(tmp_path / "other", seed=5)
    for file in (run / "checkpoints").iterdir():
        file.unlink()
    assert_told(medusa(*train_args(other, run, "-q")), 1, "was started with a model of the fingerprint")


def test_a_spoilt_run_folder_is_told_by_the_file_at_fault(medusa: Medusa, tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert medusa(*train_args(tiny, run, "--max-steps", 1, "-q")).code == 0
    again = train_args(tiny, run, "--max-steps", 1, "-q", "--resume-from-checkpoint")
    prompts = run / "written/prompts.jsonl"
    prompts.write_text("nothing\n" + prompts.read_text())
    assert_told(medusa(*again), 1, f"{prompts} is damaged")
    (run / "run.json").write_text("{")
    assert_told(medusa(*again), 1, "run.json can't be read")

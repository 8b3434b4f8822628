"""`medusa export` and `medusa import`, from heads that were trained to heads that decode."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.harness import Medusa, in_two_lines, train_args
from tests.formats.foreign.helpers import laid_out, published

F32 = ("--dtype", "float32", "--runner", "eager")
SHORT = ("data.max_prompt_tokens=12", "data.max_answer_tokens=40", "data.rows=4", "tree.max_size=7")
TOOLS = ["fasterdecoding", "trtllm", "tgi", "vllm", "medusa2"]


@pytest.fixture(scope="module")
def portable(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that see the hidden state alone, as other tools show it."""
    from tests.cli.harness import run_here

    folder = tmp_path_factory.mktemp("portable") / "run"
    done = run_here(*train_args(tiny, folder, "--max-steps", 5, "--tree-size", 4, "-q", "heads.sees_root=false"))
    assert done.code == 0, done.err
    return folder


@pytest.fixture(scope="module")
def exported(tiny: Path, portable: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same heads for every tool."""
    from tests.cli.harness import run_here

    folders = {}
    for tool in TOOLS:
        folders[tool] = tmp_path_factory.mktemp("exported") / tool
        done = run_here("export", "--to", tool, "--heads", portable, "-m", tiny, *F32, "-o", folders[tool], "--json")
        assert done.code == 0, done.err
        assert done.document["verified"]["positions"] > 50
        assert done.document["verified"]["largest_difference"] <= 1e-4 * done.document["verified"]["largest_logit"]
    return folders


@pytest.mark.parametrize("tool", TOOLS)
def test_an_export_says_how_it_is_served_and_brings_its_tokenizer(tool: str, exported: dict[str, Path]) -> None:
    folder = exported[tool]
    assert "```\n" in (folder / "README.md").read_text()
    assert (folder / "tokenizer.json").is_file()
    assert not list(folder.parent.glob(".*")), "nothing is left beside it"


@pytest.mark.parametrize("tool", TOOLS)
def test_a_second_export_is_equal_byte_by_byte(
    tool: str, tiny: Path, portable: Path, exported: dict[str, Path], medusa: Medusa, tmp_path: Path
) -> None:
    folder = tmp_path / "again"
    assert medusa("export", "--to", tool, "--heads", portable, "-m", tiny, *F32, "-o", folder, "-q").code == 0
    for file in sorted(exported[tool].iterdir()):
        assert (folder / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("tool", TOOLS)
def test_an_export_decodes_as_heads_do_and_the_text_is_the_greedy_one(
    tool: str, tiny: Path, exported: dict[str, Path], medusa: Medusa
) -> None:
    wanted = medusa("generate", "What is it?", "-m", tiny, *F32, "-n", 30, "--drafter", "none", "--json").document
    found = medusa(
        "generate", "What is it?", "-m", tiny, *F32, "-n", 30, "--heads", exported[tool], "--tree", "chain:3",
        "--drafter", "medusa", "--speculate", "on", "--json",
    )  # fmt: skip
    assert found.code == 0, found.err
    assert found.document["token_ids"] == wanted["token_ids"]
    assert found.document["drafter"] == "medusa"


def test_heads_of_another_tool_draft_without_being_imported(
    tiny: Path, exported: dict[str, Path], medusa: Medusa
) -> None:
    done = medusa(
        "generate", "Hi", "-m", tiny, *F32, "-n", 12, "--heads", exported["vllm"], "--speculate", "on", "--json"
    )
    assert done.code == 0, done.err
    assert (done.document["drafter"], done.document["tree_size"]) == ("medusa", 3)
    assert "medusa import fits a tree" in done.err


def test_a_merged_folder_is_a_model_of_its_own(exported: dict[str, Path], tiny: Path, medusa: Medusa) -> None:
    whole, before = (
        medusa("generate", "Hi", "-m", each, *F32, "-n", 12, "--json") for each in (exported["medusa2"], tiny)
    )
    assert whole.code == 0, whole.err
    assert whole.document["token_ids"] == before.document["token_ids"]


def test_the_tree_is_written_as_tensorrt_llm_takes_it(exported: dict[str, Path], portable: Path) -> None:
    choices = json.loads((exported["trtllm"] / "medusa_choices.json").read_text())
    assert choices == json.loads((portable / "tree.json").read_text())["paths"]
    assert json.dumps(choices, separators=(",", ":")) in (exported["trtllm"] / "README.md").read_text()


@pytest.mark.parametrize("tool", ["fasterdecoding", "vllm", "medusa2"])
def test_an_import_measures_the_heads_and_fits_a_tree(
    tool: str, tiny: Path, portable: Path, exported: dict[str, Path], medusa: Medusa, tmp_path: Path
) -> None:
    folder = tmp_path / "imported"
    done = medusa("import", exported[tool], *SHORT, "-m", tiny, *F32, "-o", folder, "--num-samples", 6, "--json")
    assert done.code == 0, done.err
    document = done.document
    assert (document["format"], document["num_heads"], document["own_output"]) == (tool, 3, False)
    assert len(document["accuracy"]["plain"]) == 3
    assert document["positions"] > 0
    files = {file.name for file in folder.iterdir()}
    assert files == {"heads.json", "heads.safetensors", "tree.json", "accuracy.json", "README.md", "provenance.json"}
    before, now = (load_file(each / "heads.safetensors") for each in (portable, folder))
    assert all(torch.equal(before[name].float(), now[name].float()) for name in ("weight", "bias"))
    assert medusa("inspect-tree", "--heads", folder, "-m", tiny).code == 0
    assert medusa("generate", "Hi", "--heads", folder, "-m", tiny, *F32, "-n", 5, "-q").code == 0


def test_an_import_takes_the_model_that_the_heads_name(
    exported: dict[str, Path], medusa: Medusa, tmp_path: Path
) -> None:
    done = medusa("import", exported["tgi"], *SHORT, *F32, "-o", tmp_path / "in", "--num-samples", 4, "--json")
    assert done.code == 0, done.err
    assert done.document["model"].endswith("tiny")
    assert done.document["format"] == "fasterdecoding"


def test_heads_that_guess_nothing_right_are_told(tiny: Path, medusa: Medusa, tmp_path: Path) -> None:
    folder = laid_out(tmp_path / "x", published(2, 1, 32, 304))
    done = medusa("import", folder, *SHORT, "-m", tiny, *F32, "-o", tmp_path / "y", "--num-samples", 4)
    assert done.code == 0, done.err
    assert "these may be heads of another model" in done.err


# --- bad input ---


def refused(medusa: Medusa, *args: object) -> str:
    """What was said; nothing must be left where the folder was to be."""
    done = medusa(*args)
    assert done.code == 1, done.err
    assert in_two_lines(done.err)
    place = Path(str(args[list(args).index("-o") + 1]))
    assert not list(place.parent.glob(f".{place.name}*"))
    return done.err


def test_heads_that_see_the_root_are_refused_with_the_recipe(
    tiny: Path, heads: Path, medusa: Medusa, tmp_path: Path
) -> None:
    said = refused(medusa, "export", "--to", "vllm", "--heads", heads, "-m", tiny, *F32, "-o", tmp_path / "out")
    assert "see the root" in said
    assert "smollm2-135m-portable" in said
    assert not (tmp_path / "out").exists()


def test_a_folder_of_someone_elses_is_never_replaced(
    tiny: Path, portable: Path, medusa: Medusa, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for force in ((), ("--force",)):
        args = ("export", "--to", "vllm", "--heads", portable, "-m", tiny, *F32, "-o", tmp_path / "mine", *force)
        assert "no export of medusa's" in refused(medusa, *args)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_an_earlier_export_is_replaced_when_asked(tiny: Path, portable: Path, medusa: Medusa, tmp_path: Path) -> None:
    args = ("export", "--to", "tgi", "--heads", portable, "-m", tiny, *F32, "-o", tmp_path / "out", "-q")
    assert medusa(*args).code == 0
    assert "--force" in refused(medusa, *args)
    assert medusa(*args, "--force").code == 0


def test_a_difference_ends_in_exit_3_and_leaves_nothing(
    tiny: Path, portable: Path, medusa: Medusa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_cli.formats.foreign import writing

    right = writing._save
    monkeypatch.setattr(writing, "_save", lambda named, file: right(_turned(named), file))
    args = ("export", "--to", "vllm", "--heads", portable, "-m", tiny, *F32, "-o", tmp_path / "out")
    done = medusa(*args)
    assert done.code == 3
    assert "would draft otherwise" in done.err
    assert not list(tmp_path.iterdir())
    assert medusa(*args, "--no-verify").code == 0


def _turned(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The heads in the opposite order."""
    other = {"0": "2", "1": "1", "2": "0"}
    return {
        name if not name.startswith("blocks.") else f"blocks.{other[name[7]]}{name[8:]}": value
        for name, value in named.items()
    }


def test_an_interrupted_write_leaves_what_was_there(
    tiny: Path, portable: Path, medusa: Medusa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("export", "--to", "vllm", "--heads", portable, "-m", tiny, *F32, "-o", tmp_path / "out", "-q")
    assert medusa(*args).code == 0
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("medusa_cli.pipeline.exporting.compare", interrupted)
    assert medusa(*args, "--force").code == 130
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_a_folder_of_two_formats_is_refused_and_one_can_be_named(
    tiny: Path, exported: dict[str, Path], medusa: Medusa, tmp_path: Path
) -> None:
    folder = tmp_path / "two"
    shutil.copytree(exported["vllm"], folder)
    shutil.copy(exported["fasterdecoding"] / "medusa_lm_head.pt", folder)
    args = ("import", folder, *SHORT, "-m", tiny, *F32, "-o", tmp_path / "out", "--num-samples", 4)
    assert "2 formats" in refused(medusa, *args)
    assert medusa(*args, "--format", "vllm", "-q").code == 0


def test_heads_of_another_size_leave_no_folder(tiny: Path, medusa: Medusa, tmp_path: Path) -> None:
    folder = laid_out(tmp_path / "x", published(2, 1, 48, None))
    assert "hidden size of 48" in refused(medusa, "import", folder, "-m", tiny, *F32, "-o", tmp_path / "deep" / "out")
    assert not (tmp_path / "deep").exists()


def test_an_import_into_a_folder_that_holds_something_is_refused(
    tiny: Path, exported: dict[str, Path], medusa: Medusa, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "note").touch()
    said = refused(medusa, "import", exported["tgi"], "-m", tiny, *F32, "-o", tmp_path / "out")
    assert "holds something" in said
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["note"]


def test_medusa2_wants_weights_it_can_copy(tiny: Path, portable: Path, medusa: Medusa, tmp_path: Path) -> None:
    other = tmp_path / "bin"
    shutil.copytree(tiny, other)
    torch.save(load_file(other / "model.safetensors"), other / "pytorch_model.bin")
    (other / "model.safetensors").unlink()
    said = refused(medusa, "export", "--to", "medusa2", "--heads", portable, "-m", other, *F32, "-o", tmp_path / "out")
    assert "as .safetensors" in said


def test_heads_of_a_damaged_file_are_told_where_they_are_asked_for(
    tiny: Path, exported: dict[str, Path], medusa: Medusa, tmp_path: Path
) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(exported["vllm"], folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:500])
    done = medusa("generate", "Hi", "-m", tiny, *F32, "--heads", folder, "-n", 3)
    assert done.code == 1
    assert "can't be read" in done.err


def test_weights_of_nan_are_refused(tiny: Path, exported: dict[str, Path], medusa: Medusa, tmp_path: Path) -> None:
    folder = tmp_path / "nan"
    shutil.copytree(exported["vllm"], folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["blocks.1.layers.0.weight"][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    assert "not finite" in refused(medusa, "import", folder, "-m", tiny, *F32, "-o", tmp_path / "out")

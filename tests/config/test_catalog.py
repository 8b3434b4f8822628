"""The recipes that ship: found in a clone and in an installed package, each loads and says what it is."""

import re
import shlex
import zipfile
from pathlib import Path

import pytest
import yaml

from medusa_cli.config.catalog import FIELDS, find_recipe, read_header, recipes
from medusa_cli.config.loading import load_recipe
from medusa_cli.errors import RecipeError
from medusa_cli.model.loading.sources import known_names

ROOT = Path(__file__).parents[2]
NAMES = sorted(file.stem for file in (ROOT / "recipes").glob("*.yaml"))


def installed(folder: Path) -> Path:
    """A package as a wheel lays it out, with one recipe."""
    (folder / "medusa_cli" / "recipes").mkdir(parents=True)
    (folder / "medusa_cli" / "recipes" / "small.yaml").write_text("seed: 1\n")
    return folder / "medusa_cli"


def test_a_clone_finds_the_recipes_beside_the_package() -> None:
    assert list(recipes()) == NAMES


def test_an_installed_package_finds_those_it_carries(tmp_path: Path) -> None:
    package = installed(tmp_path)
    assert list(recipes(package)) == ["small"]
    assert find_recipe("small", package).read_text() == "seed: 1\n"


def test_the_wheel_carries_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = pytest.importorskip("hatchling.build")
    monkeypatch.chdir(ROOT)
    wheel = zipfile.ZipFile(tmp_path / builder.build_wheel(str(tmp_path)))
    inside = {Path(name).stem for name in wheel.namelist() if re.fullmatch(r"medusa_cli/recipes/[^/]+\.yaml", name)}
    assert sorted(inside) == NAMES


def test_a_file_comes_before_a_recipe_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe("demo") == ROOT / "recipes" / "demo.yaml"
    Path("demo").write_text("seed: 1")
    assert find_recipe("demo") == Path("demo")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("dmo", "did you mean demo? "), ("recipes/Demo.yaml", "did you mean demo? "), ("x", "see "), ("", "see ")],
)
def test_a_name_that_is_none_is_told_with_the_nearest(name: str, hint: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as caught:
        find_recipe(name)
    assert caught.value.hint.startswith(hint)


def test_a_header_is_what_stands_before_the_settings() -> None:
    text = (
        "# Small heads,\n# soon made.\n# Hardware: a CPU.\n# Cost:     a minute\n#   or two.\nseed: 1\n# Result: no\n"
    )
    header = read_header(text)
    assert (header.what, header.hardware, header.cost) == ("Small heads, soon made.", "a CPU.", "a minute or two.")
    assert (header.command, header.result) == (None, None)


@pytest.mark.parametrize("name", NAMES)
def test_each_recipe_loads_and_says_what_it_is(name: str) -> None:
    file = recipes()[name]
    recipe, header = load_recipe(file, surroundings={}), read_header(file.read_text())
    assert header.what
    said = {field: getattr(header, field) for field in FIELDS}
    assert all(said.values()), said
    command = shlex.split(said["command"])
    assert command[:3] == ["medusa", "train-heads", "-c"]
    assert find_recipe(command[3]).samefile(file)
    assert recipe.output_dir == command[command.index("-o") + 1]
    aliases = known_names()
    assert recipe.target.model in {*aliases["hub"], *aliases["embedded"]}, "the model has a name of ours"


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_nothing_twice(name: str) -> None:
    settings = yaml.safe_load(recipes()[name].read_text())
    assert set(settings) <= {"target", "heads", "data", "train", "tree", "lora", "seed", "output_dir"}

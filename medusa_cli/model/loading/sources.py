"""Where a model's files are: alias, folder, GGUF file, hub id, or a package that carries one. Loads no weights."""

import difflib
import importlib.util
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from medusa_cli.errors import TargetError
from medusa_cli.model.loading.gguf_header import refuse_unread
from medusa_cli.util import sealed
from medusa_cli.util.paths import cache_home, expanded, say_once
from medusa_cli.util.plain_json import parse_json

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
LONGEST_NAME = 1024  # of a path, where systems allow least
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")  # of a model that is split over several files
_COPY_AGAIN = "copy the file from the model again"


@dataclass(frozen=True)
class Source:
    """What `from_pretrained` needs: a folder or hub id, and the GGUF file inside it if there is one."""

    name: str
    location: str
    gguf_file: str | None = None
    convert_to: Path | None = None  # an embedded GGUF is converted once into this folder

    @property
    def is_converted(self) -> bool:
        """Whether it is what was made of an embedded GGUF file."""
        return self.convert_to is not None and str(self.convert_to) == self.location

    @property
    def gguf(self) -> Path | None:
        """The GGUF file the weights come from, if they do."""
        return Path(self.location) / self.gguf_file if self.gguf_file else None


@cache
def known_names() -> Mapping[str, Any]:
    """The contents of aliases.yaml."""
    return yaml.safe_load((Path(__file__).parents[1] / "aliases.yaml").read_text(encoding="utf-8"))


def find_source(name: str) -> Source:
    """Resolve a name; TargetError says where it was looked for when nothing fits."""
    if not name.strip():
        raise TargetError("no model is named: the name is empty", "give an alias, a folder, a .gguf file or a hub id")
    if len(name) > LONGEST_NAME:
        raise TargetError(
            f"unknown model '{name[:60]}…': a name of {len(name)} characters", "check what --model is given"
        )
    if (source := _on_disk(name)) is not None:
        return source
    names = known_names()
    if name in names["embedded"]:
        return _embedded(name, names["embedded"][name])
    if name in names["hub"]:
        return Source(name, names["hub"][name])
    if name.endswith(".gguf") or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise TargetError(
            f"no such model folder or file: {name}", "name an existing folder, a .gguf file, a hub id or an alias"
        )
    if "/" in name:
        return Source(name, name)
    aliases = sorted([*names["embedded"], *names["hub"]])
    near = difflib.get_close_matches(name.lower(), aliases, n=1)
    hint = (
        f"did you mean {near[0]}?" if near else f"aliases: {', '.join(aliases)}; or owner/name on the hub, or a folder"
    )
    raise TargetError(f"unknown model '{name}': no alias, no folder and no file of that name", hint)


def _on_disk(name: str) -> Source | None:
    """The folder or file of this name; None when there is none, or when it is no model and an alias has its name."""
    path, names = expanded(name), known_names()
    if not path.is_dir() and not path.is_file():
        return None
    try:
        return _folder(name, path) if path.is_dir() else _gguf(name, path)
    except TargetError as error:
        if name not in names["embedded"] and name not in names["hub"]:
            raise
        say_once(f"{name} is the alias here: {error.message}", logging.INFO)
        return None


def licence_of(name: str) -> str | None:
    """The licence of an embedded model; None for others, whose cards say it."""
    return known_names()["embedded"].get(name, {}).get("licence")


def _folder(name: str, path: Path) -> Source:
    if not (path / "config.json").is_file():
        _refuse_parts(path)
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1 or (ggufs and all(_PART.search(file.name) for file in ggufs)):
            return _gguf(name, ggufs[0])
        several = f", and {len(ggufs)} .gguf files: name one of them" if ggufs else ""
        raise TargetError(
            f"{path} holds no config.json{several}", "name a folder written by save_pretrained, or a .gguf file"
        )
    config = _read_object(path / "config.json")
    if config.get("model_type") == "medusa" or ("medusa_num_heads" in config and not _is_merged(path, config)):
        raise _is_heads(path)
    if (path / "generation_config.json").is_file():
        _read_object(path / "generation_config.json")  # the library goes on without it, and without its stop ids
    if "model_type" not in config:
        raise TargetError(
            f"{path / 'config.json'} names no model_type", "copy the model's own config.json into the folder"
        )
    if not any(any(path.glob(pattern)) for pattern in WEIGHTS):
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return _gguf(name, ggufs[0])
        raise TargetError(f"{path} holds a config.json but no weights", "copy the model's .safetensors files into it")
    return Source(name, str(path))


def _is_merged(path: Path, config: Mapping[str, Any]) -> bool:
    """Whether heads lie beside a whole model, as Medusa-2 has it: it is loaded without them."""
    return "model_type" in config and not any(path.glob("medusa_lm_head.*"))


def _refuse_parts(path: Path) -> None:
    """Refuse folders that hold what goes with a model."""
    if (path / "heads.json").is_file() or any(path.glob("medusa_lm_head.*")):
        raise _is_heads(path)
    if (path / "adapter_config.json").is_file():
        raise TargetError(
            f"{path} holds an adapter, not a model",
            "merge it into its model (peft: merge_and_unload) and name that folder",
        )


def _is_heads(path: Path) -> TargetError:
    return TargetError(
        f"{path} is a folder of heads, not a model", f"use --heads {path}, and --model for the model they belong to"
    )


def _read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file of the model, or TargetError."""
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise TargetError(f"{file} is not JSON: {error.msg} in line {error.lineno}", _COPY_AGAIN) from error
    except (OSError, ValueError) as error:  # among them text that is no UTF-8
        raise TargetError(f"can't read {file}: {error}", _COPY_AGAIN) from error
    if not isinstance(content, dict):
        raise TargetError(f"{file} holds no JSON object", _COPY_AGAIN)
    return content


def _gguf(name: str, path: Path) -> Source:
    try:
        with path.open("rb") as file:
            beginning = file.read(4)
    except OSError as error:
        raise TargetError(f"can't read {path}: {error.strerror}", "name a file that you may read") from error
    if beginning != b"GGUF":
        raise TargetError(f"{path} is no GGUF file", "name a folder, a .gguf file, a hub id or an alias")
    refuse_unread(path)
    return Source(name, str(path.parent), path.name)


def _embedded(name: str, entry: Mapping[str, str]) -> Source:
    spec = importlib.util.find_spec(entry["package"])
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise TargetError(f"the package that carries {name} is not installed", entry["install"])
    home = cache_home() / "models" / f"{name}-{entry['sha256'][:12]}"
    if fault_in(home) is not None and sha256_of(Path(folders[0]) / entry["file"]) != entry["sha256"]:
        raise TargetError(
            f"{entry['file']} of {name} is not the file it should be (checksum differs)", entry["install"]
        )
    return Source(name, folders[0], entry["file"], home)


def fault_in(home: Path) -> str | None:
    """What keeps a converted model from being used, in words; None when it is as it was written."""
    return sealed.fault_in(home, trust_times=True)


def sha256_of(path: Path) -> str:
    """The file's checksum, or TargetError when it can't be read."""
    try:
        return sealed.sha256_of(path)
    except OSError as error:
        raise TargetError(f"can't read {path}: {error.strerror}", "install the model's package again") from error

"""Weight files of other tools, safetensors or pickles: names and shapes first, numbers when they are asked for.

A pickle is read with torch's `weights_only`, which makes tensors and plain containers and calls nothing else.
"""

import pickle
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from medusa_cli.errors import FormatError
from medusa_cli.formats.native import WEIGHTS as OWN

PICKLES = (".pt", ".bin", ".pth")
KINDS = (".safetensors", *PICKLES)
COPY_AGAIN = "copy the file again from where the heads come from"
# where the same heads lie in several kinds of files, the one that can run nothing counts
_MOST_FILES = 1_000


@dataclass(frozen=True)
class WeightFile:
    """One file's tensors by name: shapes, and the numbers of a pickle, which are mapped and not yet read."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    mapped: Mapping[str, Tensor] | None

    def tensor(self, name: str) -> Tensor:
        """The numbers. Raises FormatError when the file ends before them."""
        if self.mapped is not None:
            return self.mapped[name]
        try:
            with safe_open(self.path, "pt") as file:
                found: Tensor = file.get_tensor(name)
                return found
        # torch has fewer dtypes than the format names
        except (SafetensorError, OSError, ValueError, RuntimeError, KeyError, AttributeError, TypeError) as error:
            raise FormatError(f"{self.path}: {name} can't be read: {_short(error)}", COPY_AGAIN) from error


def weight_files(folder: Path) -> list[Path]:
    """Files right in the folder that may hold heads of other tools, in a fixed order."""
    try:
        found = sorted(file for file in folder.iterdir() if file.suffix in KINDS and file.is_file())
    except OSError as error:
        raise FormatError(f"{folder} can't be read: {error.strerror}", "check the path and its permissions") from error
    return [file for file in found if file.name != OWN][:_MOST_FILES]


def open_weights(file: Path) -> WeightFile:
    """Names and shapes in a file. Raises FormatError when it is damaged, or a pickle that wants more than tensors."""
    return _safetensors(file) if file.suffix == ".safetensors" else _pickle(file)


def _safetensors(file: Path) -> WeightFile:
    try:
        with safe_open(file, "pt") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise FormatError(f"{file} can't be read: {_short(error)}", COPY_AGAIN) from error
    return WeightFile(file, shapes, None)


def _pickle(file: Path) -> WeightFile:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of pickles that other programs wrote: what counts is whether they can be read
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        if "Unsupported operand" in str(error) or "GLOBAL" not in str(error):
            raise FormatError(f"{file} is damaged: it is no file of torch's", COPY_AGAIN) from error
        raise FormatError(
            f"{file} is a pickle that asks for more than tensors, which could run any code: it is not read",
            "take these heads as .safetensors; if there are none, don't trust this copy",
        ) from error
    # what a damaged pickle makes torch raise has no common kind
    except Exception as error:
        raise FormatError(f"{file} can't be read: {_short(error)}", COPY_AGAIN) from error
    return WeightFile(file, *_tensors_in(file, content))


def _tensors_in(file: Path, content: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, Tensor]]:
    """Shapes and tensors of a state dict, or FormatError."""
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise FormatError(f"{file} holds no tensors by name", "save the heads' state_dict() alone")
    for name, value in content.items():
        plain = value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized
        if not plain or value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise FormatError(f"{file}: {name} is no plain tensor", "save the heads' state_dict() alone")
    return {name: tuple(value.shape) for name, value in content.items()}, dict(content)


def _short(error: BaseException) -> str:
    """An error of a library in a line."""
    return " ".join(str(error).split())[:200] or type(error).__name__

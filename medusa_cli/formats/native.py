"""The folder this program writes heads to: heads.safetensors (the numbers) and heads.json (what they are).

heads.safetensors holds, with the shape letters of heads/medusa.py:
  weight         [L, K, H, H]   block l of head k is x + SiLU(weight[l, k] @ x + bias[l, k])
  bias           [L, K, H]
  root_weight    [K, H, H]      only for heads that see the root: root_weight[k] @ rms_norm(target rows[root]) is added
                                to what block 0 puts through SiLU
  draft_ids      [W] int32      target ids of the draft vocabulary
  output_weight  [K, W, H]      only with an own output; otherwise logits are block output @ target rows[draft_ids].T
  output_bias    [K, W]         only with an own output that has a bias
Block heads hold draft_ids and the matrices that heads/block.py tells of.
heads.json holds {"format", "version", "weights", "bytes", "sha256", "config"}. Version 2 brought config.traits, which
tells the target's tokenizer, template, rope and rows; heads of version 1 are read, and vouch for weights alone.

The two files are replaced as one: the new numbers are written beside the old ones, heads.json then names their
checksum (the moment the new heads count), and only then do they take the old ones' name. A reader that finds numbers
of another checksum looks beside them.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa_cli.errors import FormatError, HeadsMismatch
from medusa_cli.formats.places import DESCRIPTION
from medusa_cli.heads.base import Heads
from medusa_cli.heads.config import UNKNOWN, HeadsConfig, HeadsTarget, check_belongs
from medusa_cli.heads.kinds import heads_class
from medusa_cli.util.files import sync, write_atomically
from medusa_cli.util.plain_json import parse_json
from medusa_cli.util.sealed import sha256_of

FORMAT = "medusa-heads"
VERSION = 2
READS = (1, 2)
FIRST_KIND = "medusa"  # of stored heads that don't say what they are
WEIGHTS = "heads.safetensors"
_PENDING = "heads.safetensors.new"
_COPY_AGAIN = "copy the folder again, or train the heads again"


class NativeFormat:
    """This program's own folder layout."""

    name = "native"

    def detect(self, folder: Path) -> bool:
        """True when `folder` holds a heads.json."""
        return (folder / DESCRIPTION).is_file()

    def read_config(self, folder: Path) -> HeadsConfig:
        """What the heads are and belong to, without their numbers. Raises FormatError as `read` does."""
        return _config_of(folder, _read_description(folder))

    def read(self, folder: Path) -> Heads:
        """The heads as stored, in the stored dtype, not bound to a target.

        Raises FormatError when a file is missing, truncated, corrupt, changed, or of an unknown version.
        """
        description = _read_description(folder)
        tensors = _read_tensors(folder, description)
        return _assemble(folder, description, tensors)

    def write(self, heads: Heads, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write atomically: a kill leaves the old heads or the new ones. `dtype` None keeps that of the heads.

        Raises FormatError when the folder can't be written; what it held before is then untouched.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _settle(folder)
            _write(heads, folder, dtype)
        except (OSError, SafetensorError) as error:
            raise FormatError(
                f"can't write heads to {folder}: {error}", "free some space, or choose another --output-dir"
            ) from error


def ready(heads: Heads, target: HeadsTarget) -> Heads:
    """Heads as they were stored, bound to `target`, on its device and in its dtype, ready to guess.

    Raises HeadsMismatch when they were trained for another model.
    """
    check_belongs(heads.config, target)
    highest = int(heads.draft_ids.max())
    if highest >= target.real_vocab:
        raise HeadsMismatch(
            f"the heads would draft id {highest}, which {target.name}'s tokenizer doesn't know",
            "train the heads again: a padding row of the output matrix is no token",
        )
    heads = heads.to(device=target.device, dtype=target.dtype)
    heads.bind(target.output_weight, target.output_bias if heads.config.output_bias else None)
    return heads.requires_grad_(False).eval()


def write_heads(heads: Heads, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write the heads to `folder` atomically, in `dtype` (None: as they are). Raises FormatError."""
    NativeFormat().write(heads, folder, dtype)


def _settle(folder: Path) -> None:
    """Finish or drop what an interrupted write left, so that the next one can't spoil numbers that count."""
    pending, described = folder / _PENDING, folder / DESCRIPTION
    if not pending.is_file():
        return
    try:
        vouched = described.is_file() and _read_description(folder).get("sha256") == sha256_of(pending)
    except FormatError:  # a description that can't be read vouches for nothing
        vouched = False
    if vouched:
        os.replace(pending, folder / WEIGHTS)
    else:
        pending.unlink()


def _write(heads: Heads, folder: Path, dtype: torch.dtype | None) -> None:
    """The three moves of the module docstring, in order."""
    tensors = {
        name: value.detach().cpu().to(torch.int32 if name == "draft_ids" else dtype or value.dtype).contiguous()
        for name, value in heads.state_dict().items()
    }
    pending = folder / _PENDING
    # One entry only: their order in the file is random, and equal heads should make equal files.
    save_file(tensors, pending, metadata={"format": f"{FORMAT} {VERSION}"})
    # safetensors makes the file for its owner alone; heads are for whoever may read the folder.
    pending.chmod(0o666 & ~_umask())
    sync(pending)
    description = {
        "format": FORMAT,
        "version": VERSION,
        "weights": WEIGHTS,
        "bytes": pending.stat().st_size,
        "sha256": sha256_of(pending),
        "config": heads.config.model_dump(exclude_none=True),
    }
    write_atomically(folder / DESCRIPTION, json.dumps(description, indent=2) + "\n")
    os.replace(pending, folder / WEIGHTS)
    sync(folder)


def _read_description(folder: Path) -> dict[str, Any]:
    """heads.json as a dictionary of a version this program reads, or FormatError."""
    if not folder.is_dir():
        raise FormatError(f"no heads at {folder.absolute()}: no such folder", "train some, or check the --heads path")
    file = folder / DESCRIPTION
    if not file.is_file():
        raise FormatError(f"no heads in {folder.absolute()}: {DESCRIPTION} is missing", "check the --heads path")
    try:
        description = parse_json(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise FormatError(f"{file} is damaged: {error}", _COPY_AGAIN) from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise FormatError(f"{file} doesn't describe heads of this program", "check the --heads path")
    if description.get("version") not in READS:
        known = " and ".join(map(str, READS))
        raise FormatError(
            f"{file} is of version {description.get('version')}; this program reads version {known}",
            "update this program, or train the heads again",
        )
    return description


def _config_of(folder: Path, description: dict[str, Any]) -> HeadsConfig:
    """The config in a description, or FormatError."""
    try:
        config = description.get("config")
        kind = config.get("type", FIRST_KIND) if isinstance(config, dict) else FIRST_KIND
        found = heads_class(str(kind)).describes.model_validate(config)
        if found.target_fingerprint == UNKNOWN:
            raise FormatError(f"{folder / DESCRIPTION}: config.target_fingerprint is empty", _COPY_AGAIN)
        return found
    except ValidationError as error:
        fault = error.errors()[0]
        name = ".".join(str(part) for part in fault["loc"]) or "config"
        raise FormatError(f"{folder / DESCRIPTION}: {name}: {fault['msg']}", _COPY_AGAIN) from error


def _read_tensors(folder: Path, description: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors heads.json speaks of, from the file whose checksum is right, or FormatError."""
    file, pending = folder / WEIGHTS, folder / _PENDING
    wanted = description.get("sha256")
    if pending.is_file() and sha256_of(pending) == wanted:
        file = pending
    elif not file.is_file():
        raise FormatError(f"{file} is missing", "copy the whole folder, or train the heads again")
    elif (size := file.stat().st_size) != description.get("bytes"):
        raise FormatError(
            f"{file} is truncated or changed: it has {size} of {description.get('bytes')} bytes",
            _COPY_AGAIN,
        )
    elif sha256_of(file) != wanted:
        raise FormatError(
            f"{file} is damaged: its checksum is not the one in {DESCRIPTION}",
            _COPY_AGAIN,
        )
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise FormatError(f"{file} can't be read: {error}", _COPY_AGAIN) from error


def _assemble(folder: Path, description: dict[str, Any], tensors: dict[str, Tensor]) -> Heads:
    """Heads of the stored config filled with the stored tensors, or FormatError when the two don't agree."""
    config = _config_of(folder, description)
    # Shapes alone: a damaged config may ask for more numbers than any machine holds.
    with torch.device("meta"):
        heads = heads_class(config.type)(config, torch.zeros(config.draft_vocab, dtype=torch.long))
    expected = {name: tuple(value.shape) for name, value in heads.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    if expected != found:
        names = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise FormatError(f"{folder / WEIGHTS} doesn't match {DESCRIPTION} in {', '.join(names)}", _COPY_AGAIN)
    if not all(value.is_floating_point() for name, value in tensors.items() if name != "draft_ids"):
        raise FormatError(f"{folder / WEIGHTS} holds weights that are whole numbers", _COPY_AGAIN)
    draft_ids_W = tensors["draft_ids"].long()
    if int(draft_ids_W.min()) < 0 or int(draft_ids_W.max()) >= config.vocab_size:
        raise FormatError(f"{folder / WEIGHTS} holds draft ids outside 0 to {config.vocab_size - 1}", _COPY_AGAIN)
    if len(draft_ids_W.unique()) != len(draft_ids_W):
        raise FormatError(f"{folder / WEIGHTS} holds a draft id twice", _COPY_AGAIN)
    heads = heads_class(config.type)(config, draft_ids_W).to(_dtype_of(tensors))
    heads.load_state_dict({**tensors, "draft_ids": draft_ids_W})
    return heads


def _dtype_of(tensors: dict[str, Tensor]) -> torch.dtype:
    """The dtype that the weights are stored in."""
    return next(value.dtype for name, value in sorted(tensors.items(), reverse=True) if name != "draft_ids")


def _umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask

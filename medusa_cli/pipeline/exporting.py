"""Heads of ours become a folder that another tool reads: converted, written, read back as that tool would, compared.

Shape letters: T positions, K heads, H hidden, V rows of the target's output matrix, W draft vocabulary.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor

from medusa_cli.config.recipe import TargetSettings
from medusa_cli.data.conversations import Message
from medusa_cli.decode.chat import ids_of
from medusa_cli.errors import FormatError, MedusaError
from medusa_cli.formats.foreign.independent import FAILURES, READERS
from medusa_cli.formats.foreign.merging import merge_beside
from medusa_cli.formats.foreign.portable import Portable, portable
from medusa_cli.formats.foreign.serving import MARK, command_for, how_to_serve
from medusa_cli.formats.foreign.writing import NO_ROOM, write
from medusa_cli.heads.base import Heads
from medusa_cli.model.loading.gguf_conversion import converted
from medusa_cli.model.loading.sources import find_source
from medusa_cli.model.target import Target
from medusa_cli.trees.files import read_tree
from medusa_cli.util.files import new_folder

# read for hidden states: words of several kinds
PROBES = (
    "Name three planets and say one thing about each.",
    "Write a function in Python that adds two numbers, and explain it.",
    "Übersetze ins Deutsche: the sea is wide and the night is cold.",
    "What is 17 times 23? Think step by step.",
)
NEARNESS = 1e-4  # of the largest logit: what sums in another order leave in 32 bits
CHOICES = "medusa_choices.json"


class Differs(MedusaError):
    """The written folder, read as the other tool reads it, gives other logits."""


@dataclass(frozen=True)
class Verified:
    """How near the two were: over so many positions, the largest difference and the largest logit."""

    positions: int
    largest_difference: float
    largest_logit: float


@dataclass(frozen=True)
class Exported:
    """What was written: bytes by file name, sentences on what became of the heads, and how it is served."""

    folder: Path
    files: Mapping[str, int]
    notes: tuple[str, ...]
    command: str
    verified: Verified | None


@dataclass(frozen=True)
class Wish:
    """What is to be written where.

    verify   read it back as the tool does, and compare
    force    replace an earlier export; write what the tool's reader ties
    """

    tool: str
    folder: Path
    verify: bool = True
    force: bool = False


def export(heads: Heads, source: Path, target: Target, settings: TargetSettings, wish: Wish) -> Exported:
    """Write heads, which lie in the folder `source`, for another tool.

    Raises FormatError for what the tool can't hold and for a folder that is not to be replaced, and Differs; nothing is
    left then.
    """
    tool, folder = wish.tool, wish.folder
    check_place(folder, wish.force)
    base = base_of(settings, tool)
    named = _naming(portable(heads, target, tool, force=wish.force), base)
    config = named.heads.config
    try:
        with new_folder(folder, replaced=True) as made:
            write(tool, named.heads, made)
            if tool == "medusa2":
                merge_beside(config, Path(base), made)
            else:
                target.tokenizer.save_pretrained(made)
            choices = _write_choices(source, made, config.num_heads) if tool == "trtllm" else None
            verified = compare(heads, target, tool, made) if wish.verify else None
            (made / "README.md").write_text(how_to_serve(tool, config, choices, named.notes), encoding="utf-8")
            files = {file.name: file.stat().st_size for file in sorted(made.iterdir())}
    except OSError as error:
        raise FormatError(f"can't write {folder}: {error.strerror or error}", NO_ROOM) from error
    return Exported(folder, files, named.notes, command_for(tool, str(folder), config, choices), verified)


def check_place(folder: Path, force: bool) -> None:
    """Raise FormatError for a place that holds something; with `force` an earlier export may be replaced."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir():
        raise FormatError(f"{folder} is a file", "name a new folder with -o")
    card = folder / "README.md"
    if not (card.is_file() and card.read_bytes().startswith(MARK.encode())):
        raise FormatError(f"{folder} is there, and no export of medusa's", "name a new or an empty folder with -o")
    if not force:
        raise FormatError(
            f"{folder} holds an earlier export", "name another folder with -o, or replace it with --force"
        )


def base_of(settings: TargetSettings, tool: str) -> str:
    """What the tool loads the model by: a hub id, or a folder; always a folder for medusa2, whose files are copied.

    Raises FormatError for a model that is in no such place, TargetError as `find_source`.
    """
    source = converted(find_source(settings.model))
    if source.gguf_file is not None:
        raise FormatError(
            f"{settings.model} is a GGUF file, and {tool} reads heads beside a folder of safetensors",
            "name the model's folder or hub id with --model",
        )
    if Path(source.location).is_dir():
        return str(Path(source.location).absolute())
    if tool != "medusa2":
        return source.location
    try:
        return snapshot_download(source.location, revision=settings.revision)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FormatError(
            f"the files of {source.location} are not all on this machine ({type(error).__name__})",
            "download the model first, or name a folder with --model",
        ) from error


def _naming(made: Portable, base: str) -> Portable:
    """The same, with the model named as the other tool finds it."""
    heads = copy.copy(made.heads)
    heads.config = heads.config.model_copy(update={"target_name": base})
    return Portable(heads, made.notes)


def _write_choices(source: Path, made: Path, num_heads: int) -> str:
    """The tree that was fitted for these heads, as TensorRT-LLM's `--medusa_choices`; a chain where there is none."""
    paths = [list(path) for path in read_tree(source).paths()] if (source / "tree.json").is_file() else []
    text = json.dumps(paths or [[0] * depth for depth in range(1, num_heads + 1)], separators=(",", ":"))
    (made / CHOICES).write_text(text + "\n")
    return text


def compare(heads: Heads, target: Target, tool: str, folder: Path) -> Verified:
    """Draft logits of the folder, read as the tool reads it, beside ours on real states. Raises Differs."""
    hidden_TH = states_of(target).float()
    with torch.inference_mode():
        ours_TKW = _in_32_bits(heads, target)(hidden_TH)
        try:
            theirs_TKV = READERS[tool](folder, hidden_TH, target.output_weight.float().cpu())
        except FAILURES as error:
            raise Differs(f"{tool} would not read what was written: {error}", _REPORT) from error
    theirs_TKW = theirs_TKV[..., heads.draft_ids.cpu()] if theirs_TKV.shape[:2] == ours_TKW.shape[:2] else None
    if theirs_TKW is None:
        raise Differs(f"{tool} would read {theirs_TKV.shape[1]} heads, and there are {ours_TKW.shape[1]}", _REPORT)
    gap, largest = (float(each.abs().max()) for each in (theirs_TKW - ours_TKW, ours_TKW))
    if not gap <= NEARNESS * max(largest, 1.0):
        first = int((theirs_TKW - ours_TKW).abs().amax((0, 2)).argmax())
        tied = heads.config.num_layers > 1 and tool in ("fasterdecoding", "medusa2")
        why = ": its reader ties the layers of a head" if tied else ""
        raise Differs(
            f"{tool} would draft otherwise than these heads do: logits of head {first} are {gap:.3g} apart{why}",
            "--no-verify writes them all the same" if tied else _REPORT,
        )
    return Verified(len(hidden_TH), gap, largest)


_REPORT = "please report this with `medusa --version`; nothing was written"


def states_of(target: Target) -> Tensor:
    """Final hidden states [T, H] of the target at the words of some prompts, on the CPU."""
    texts = [ids_of(target, [Message("user", text)]) for text in PROBES]
    hidden_BTH = target.hidden(texts)
    return torch.cat([hidden_TH[: len(ids)] for ids, hidden_TH in zip(texts, hidden_BTH, strict=True)]).cpu()


def _in_32_bits(heads: Heads, target: Target) -> Heads:
    """A copy of the heads that computes on the CPU in 32 bits; the same numbers."""
    apart = type(heads)(heads.config, heads.draft_ids.cpu())
    apart.load_state_dict({name: value.cpu() for name, value in heads.state_dict().items()})
    return apart.bind(target.output_weight.float().cpu(), None).eval()

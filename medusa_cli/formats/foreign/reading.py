"""Heads of other tools become ours: heads, layers, sizes and biases are counted from tensors.

Shape letters: K heads, L layers of a head, H hidden, V rows of the target's output matrix, W draft vocabulary.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from medusa_cli.errors import FormatError
from medusa_cli.formats.foreign.hints import Hints, read_hints
from medusa_cli.formats.foreign.layouts import Layout, Parts, layouts_of, parts_of
from medusa_cli.formats.foreign.weight_files import COPY_AGAIN, WeightFile, open_weights, weight_files
from medusa_cli.heads.config import UNKNOWN, MedusaConfig
from medusa_cli.heads.medusa import MedusaHeads

logger = logging.getLogger(__name__)
_READ = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Found:
    """Heads of another tool in a folder, their numbers not yet read.

    files    the files that hold them, each name in one of them
    """

    folder: Path
    layout: Layout
    files: Mapping[str, WeightFile]
    parts: Parts
    hints: Hints

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name."""
        return {name: file.shapes[name] for name, file in self.files.items()}

    def tensor(self, name: str) -> Tensor:
        """A tensor's numbers. Raises FormatError where they are none that heads can have."""
        found = self.files[name].tensor(name)
        if found.dtype not in _READ:
            kind = str(found.dtype).removeprefix("torch.")
            raise FormatError(
                f"{self.files[name].path}: {name} is stored as {kind}, and heads are floats of 16 bits or more",
                "convert the weights to float16 or bfloat16 first",
            )
        # many times as quick as isfinite, and a number that is none goes through it
        if not all(bool(end.isfinite()) for end in torch.aminmax(found)):
            raise FormatError(f"{self.files[name].path}: {name} holds numbers that are not finite", COPY_AGAIN)
        return found


def layout_names(folder: Path) -> list[str]:
    """Names of the layouts that weight files in this folder are of, each once; a file that can't be read has none."""
    found: dict[str, None] = {}
    for file in weight_files(folder) if folder.is_dir() else ():
        try:
            found.update(dict.fromkeys(layout.name for layout in layouts_of(open_weights(file).shapes)))
        except FormatError:
            continue  # told by who reads it: find_heads_of
    return list(found)


def holds_weights(folder: Path) -> bool:
    """Whether there are files that may be another tool's."""
    return folder.is_dir() and bool(weight_files(folder))


def find_foreign(folder: Path, name: str | None = None) -> Found:
    """Heads of another tool in `folder`, of the layout of this name where it is given.

    Raises FormatError when there are none, when files are damaged or of two layouts, and for tensors that don't fit.
    """
    opened = [open_weights(file) for file in weight_files(folder)]
    layouts = {layout.name: layout for file in opened for layout in layouts_of(file.shapes)}
    if name is not None:
        layouts = {each: layout for each, layout in layouts.items() if each == name}
    if not layouts:
        what = f"heads of the format {name}" if name else "Medusa heads that this program can read"
        raise FormatError(f"{folder.absolute()} holds no {what}", "check the path; docs/formats.md names the formats")
    if len(layouts) > 1:
        raise FormatError(
            f"{folder.absolute()} holds heads of {len(layouts)} formats: {' and '.join(sorted(layouts))}",
            "name one with medusa import --format, or keep the files of one",
        )
    (layout,) = layouts.values()
    mine = _files_of(layout, opened)
    files = {tensor: file for file in mine for tensor in file.shapes}
    shapes = {tensor: file.shapes[tensor] for tensor, file in files.items()}
    parts = parts_of(layout, shapes, ", ".join(file.path.name for file in mine))
    _check_shapes(parts, shapes, mine[0].path)
    hints = read_hints(folder, layout.name)
    return Found(folder, layout, files, parts, hints)


def _files_of(layout: Layout, opened: Sequence[WeightFile]) -> list[WeightFile]:
    """The files that count: all shards of one kind. Of the same heads in several kinds, safetensors runs no code."""
    holding = [file for file in opened if any(layout.stripped(name) is not None for name in file.shapes)]
    kinds = [file.path.suffix for file in holding if layout.fits(file.shapes)]
    kind = min(kinds, key=lambda suffix: suffix != ".safetensors")
    files = [file for file in holding if file.path.suffix == kind]
    if not layout.beside_model:
        files = [file for file in files if layout.fits(file.shapes) or len(holding) == 1]
    names = list(chain.from_iterable(file.shapes for file in files))
    if doubled := next((name for name in names if names.count(name) > 1 and layout.stripped(name) is not None), None):
        raise FormatError(
            f"{' and '.join(file.path.name for file in files)} both hold {doubled}", "keep the one that counts"
        )
    return files


def _check_shapes(parts: Parts, shapes: Mapping[str, tuple[int, ...]], file: Path) -> None:
    """Raise FormatError for sizes that don't belong together."""
    hidden = shapes[parts.weights[0, 0]][-1:] or (0,)
    outputs = [*parts.outputs.values(), *([parts.shared] if parts.shared else [])]
    rows = shapes[outputs[0]][:1] if outputs else ()
    wanted = {
        **{name: hidden * 2 for name in parts.weights.values()},
        **{name: hidden for name in parts.biases.values()},
        **{name: rows + hidden for name in outputs},
        **({parts.token_map: rows} if parts.token_map else {}),
    }
    for name, shape in wanted.items():
        if shapes[name] != shape or 0 in shape:
            said = " x ".join(map(str, shapes[name])) or "one number"
            raise FormatError(
                f"{file}: {name} is {said}, and the other tensors want {' x '.join(map(str, shape))}", COPY_AGAIN
            )


def config_of(found: Found) -> MedusaConfig:
    """What the heads are. Their target is not known yet, nor, where they share its output, its vocabulary."""
    parts, shapes = found.parts, found.shapes
    (hidden,) = shapes[parts.weights[0, 0]][-1:]
    output = parts.shared or parts.outputs.get(0)
    rows = shapes[output][0] if output else 1
    found.hints.tell_lies(found.folder, num_heads=parts.num_heads, num_layers=parts.num_layers, hidden_size=int(hidden))
    if parts.biases and found.hints.has_bias is False:
        logger.warning(
            "%s doesn't say medusa_fc_bias: vLLM would leave the biases out that are there; here they count",
            found.folder / "config.json",
        )
    try:
        return MedusaConfig(
            num_heads=parts.num_heads,
            num_layers=parts.num_layers,
            hidden_size=hidden,
            vocab_size=max(rows, _highest(found) + 1),
            draft_vocab=rows,
            own_output=output is not None,
            output_bias=False,
            target_name=found.hints.base or "a model that is not named",
            target_fingerprint=UNKNOWN,
        )
    except ValidationError as error:
        fault = error.errors()[0]
        raise FormatError(
            f"{found.folder}: {fault['loc'][0] if fault['loc'] else 'sizes'}: {fault['msg']}", COPY_AGAIN
        ) from error


def _highest(found: Found) -> int:
    """The highest id that a token_map names; -1 without one."""
    return int(_token_map(found).max()) if found.parts.token_map else -1


def _token_map(found: Found) -> Tensor:
    """The ids that the rows of the output stand for. Raises FormatError for what are no ids."""
    name = str(found.parts.token_map)
    ids_W = found.files[name].tensor(name)
    whole = not ids_W.is_floating_point() and not ids_W.is_complex() and ids_W.dtype != torch.bool
    if not whole or int(ids_W.min()) < 0 or int(ids_W.max()) >= 2**31 or len(ids_W.unique()) != len(ids_W):
        raise FormatError(f"{found.files[name].path}: token_map doesn't hold ids, each once", COPY_AGAIN)
    return ids_W.long()


def heads_of(found: Found) -> MedusaHeads:
    """The heads, their numbers as they are stored, not bound to a target. Raises FormatError."""
    config, parts = config_of(found), found.parts
    heads_L = [range(config.num_heads) for _ in range(config.num_layers)]
    weights = [[found.tensor(parts.weights[head, layer]) for head in heads] for layer, heads in enumerate(heads_L)]
    flat = [*chain.from_iterable(weights)]
    biases: list[list[Tensor]] = []
    if parts.biases:
        biases = [[found.tensor(parts.biases[head, layer]) for head in heads] for layer, heads in enumerate(heads_L)]
    outputs = [found.tensor(parts.outputs[head]) for head in range(config.num_heads)] if parts.outputs else []
    if parts.shared:
        outputs = [found.tensor(parts.shared)] * config.num_heads
    dtype = reduce(torch.promote_types, (each.dtype for each in (*flat, *chain.from_iterable(biases), *outputs)))
    tensors = {
        "weight": torch.stack([torch.stack(row) for row in weights]).to(dtype),
        "bias": torch.stack([torch.stack(row) for row in biases]).to(dtype)
        if biases
        else torch.zeros(config.num_layers, config.num_heads, config.hidden_size, dtype=dtype),
        "draft_ids": _token_map(found) if parts.token_map else torch.arange(config.draft_vocab),
    }
    if outputs:
        tensors["output_weight"] = _as_one(outputs).to(dtype)
    return filled(config, tensors)


def _as_one(outputs: Sequence[Tensor]) -> Tensor:
    """The heads' outputs [K, V, H]; a view, not a copy for each, where all are the same numbers in memory."""
    first_VH = outputs[0]
    if all(output_VH.data_ptr() == first_VH.data_ptr() for output_VH in outputs):
        return first_VH.expand(len(outputs), -1, -1)
    return torch.stack([*outputs])


def filled(config: MedusaConfig, tensors: Mapping[str, Tensor]) -> MedusaHeads:
    """Heads that hold these very tensors; none is made beside them."""
    with torch.device("meta"):
        heads = MedusaHeads(config, torch.zeros(config.draft_vocab, dtype=torch.long))
    heads.load_state_dict(tensors, assign=True)
    return heads.requires_grad_(False)


class ForeignFormat:
    """The heads of one tool's layout, as contracts.HeadFormat has it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def detect(self, folder: Path) -> bool:
        """True when a weight file of the folder names its tensors like this."""
        return self.name in layout_names(folder)

    def read_config(self, folder: Path) -> MedusaConfig:
        """What the heads are, without their numbers. Raises FormatError."""
        return config_of(find_foreign(folder, self.name))

    def read(self, folder: Path) -> MedusaHeads:
        """The heads as stored. Raises FormatError."""
        return heads_of(find_foreign(folder, self.name))

    def write(self, heads: MedusaHeads, folder: Path) -> None:
        """Write bound heads over the whole vocabulary. Raises FormatError for what the format can't hold."""
        from medusa_cli.formats.foreign.writing import write

        write(self.name, heads, folder)

"""Blocks found at an earlier start: weights on a grid of 4 or 8 bits, kept in the home and mapped, not sought again.

Seeking the grids of a model takes a second for each hundred million weights.
"""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from medusa_cli.kernels import blocks
from medusa_cli.kernels.blocks import BlockLinear, Blocks
from medusa_cli.kernels.native import fingerprint
from medusa_cli.util import sealed
from medusa_cli.util.paths import cache_home, say_once

GRIDS = (4, 8)  # bits; what is stored in more is quickly made, and would take the space of the model again
FILE = "blocks.safetensors"

logger = logging.getLogger(__name__)


def folder_of(files: str) -> Path:
    """Where the blocks of a model are kept. Raises CannotCompile without a compiler.

    files   what tells the files that its weights came from
    """
    words = f"{files} {fingerprint(Path(blocks.__file__).with_name('blocks.cpp'))}"
    return cache_home() / "blocks" / hashlib.sha256(words.encode()).hexdigest()[:24]


def recall(files: str) -> Mapping[str, Blocks]:
    """Blocks by the names of the layers; none where none are kept, or they aren't as they were written."""
    folder = folder_of(files)
    if (fault := sealed.fault_in(folder, trust_times=True)) is not None:
        if folder.exists():
            say_once(f"weights are laid out anew, since {fault}", logging.INFO)
        return {}
    try:
        held = load_file(folder / FILE)
    except (OSError, SafetensorError) as error:
        logger.info("weights are laid out anew: %s", error)
        return {}
    named = ((*key.partition(" ")[::2], stored) for key, stored in held.items())
    return {name: Blocks(int(bits), stored) for bits, name, stored in named}


def keep(model: nn.Module, files: str) -> None:
    """Keep the blocks of a model that has them; one that can't be kept is laid out at every start."""
    held = {
        f"{module.blocks.bits} {name}": module.blocks.stored
        for name, module in model.named_modules()
        if isinstance(module, BlockLinear) and module.blocks.bits in GRIDS
    }
    if not held:
        return
    try:
        sealed.make(folder_of(files), lambda made: save_file(held, made / FILE))
    except (OSError, SafetensorError) as error:
        logger.info("weights are laid out at every start, for they can't be kept: %s", error)

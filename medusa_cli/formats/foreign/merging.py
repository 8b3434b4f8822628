"""Medusa-2 folders: a model's own files with heads beside them, as one model.

The model's files are copied byte for byte, its config gets two keys, and an index names the file of every tensor.
"""

import shutil
from pathlib import Path
from typing import Any

from medusa_cli.errors import FormatError
from medusa_cli.formats.foreign.weight_files import open_weights
from medusa_cli.formats.foreign.writing import MERGED, NO_ROOM, write_json
from medusa_cli.heads.config import MedusaConfig
from medusa_cli.util.files import sync
from medusa_cli.util.plain_json import parse_json

INDEX = "model.safetensors.index.json"
# what stands beside weights, as far as it is there
_BESIDE = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "LICENSE",
)  # fmt: skip


def merge_beside(config: MedusaConfig, model: Path, folder: Path) -> None:
    """Put the files of the model in the folder `model` beside heads that `writing.write` left in `folder`.

    Raises FormatError when the model's weights are in other files than safetensors, or the folder takes no more.
    """
    shards = sorted(model.glob("*.safetensors"))
    if not shards:
        raise FormatError(
            f"medusa2 needs the weights of {config.target_name} as .safetensors, and {model} holds none",
            "save the model with save_pretrained, and name that folder with --model",
        )
    index: dict[str, str] = {}
    for shard in (*shards, folder / MERGED):
        index |= dict.fromkeys(open_weights(shard).shapes, shard.name)
    try:
        for file in (*shards, *(model / name for name in _BESIDE)):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
                sync(folder / file.name)
        own: Any = parse_json((model / "config.json").read_text(encoding="utf-8"))
        counts = {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_layers}
        write_json(folder / "config.json", {**own, **counts})
        size = sum((folder / name).stat().st_size for name in set(index.values()))
        write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": index})
    except (OSError, ValueError, TypeError) as error:
        told = getattr(error, "strerror", None) or error
        raise FormatError(f"can't write {config.target_name} to {folder}: {told}", NO_ROOM) from error

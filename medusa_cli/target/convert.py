"""An embedded GGUF file becomes a folder of safetensors, once, however many processes ask for it."""

import shutil
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from medusa_cli.errors import TargetError
from medusa_cli.target.fetch import fetch_model, fetch_tokenizer
from medusa_cli.target.sources import Source, is_whole


def converted(source: Source) -> Source:
    """The source itself, or for an embedded GGUF file the folder it is converted into. Raises TargetError."""
    home = source.convert_to
    if home is None:
        return source
    if not is_whole(home):
        try:
            home.parent.mkdir(parents=True, exist_ok=True)
            # the system drops the lock of a process that dies
            with FileLock(home.with_name(f"{home.name}.lock")):
                if not is_whole(home):
                    _convert(source, home)
        except (OSError, SafetensorError) as error:
            raise TargetError(
                f"can't write the converted model to {home}: {error}", "free some disk, or set MEDUSA_HOME"
            ) from error
    return Source(source.name, str(home))


def _convert(source: Source, home: Path) -> None:
    """Write beside `home` and give it the name at the end: a kill leaves nothing that looks complete."""
    partial = home.with_name(f"{home.name}.partial")
    for left in (partial, home):  # by a killed conversion, or by someone who took files out
        shutil.rmtree(left, ignore_errors=True)
    loaded = fetch_model(source, None, torch.float32, "eager")
    tokenizer = fetch_tokenizer(source, None)
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    # The library refuses to save a model that came from GGUF: its numbers go into a fresh one.
    fresh = AutoModelForCausalLM.from_config(loaded.config)
    fresh.load_state_dict(loaded.state_dict())
    fresh.generation_config = loaded.generation_config
    try:
        fresh.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(home)
    finally:
        shutil.rmtree(partial, ignore_errors=True)

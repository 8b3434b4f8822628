"""A GGUF file becomes a folder of safetensors, once, however many processes ask for it."""

import logging
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from medusa_cli.errors import TargetError
from medusa_cli.model.loading.gguf_cache import copy_of
from medusa_cli.model.loading.gguf_library import read_once
from medusa_cli.model.loading.huggingface import fetch_config, fetch_model, fetch_tokenizer
from medusa_cli.model.loading.refusals import refuse_config
from medusa_cli.model.loading.sources import Source, fault_in
from medusa_cli.util import sealed
from medusa_cli.util.paths import make_private, say_once

logger = logging.getLogger(__name__)


def converted(source: Source) -> Source:
    """The source itself, or for a GGUF file the folder it is converted into. Raises TargetError.

    A user's own file is loaded as it is where it can't be converted.
    """
    home = source.convert_to or (copy_of(source.gguf) if source.gguf else None)
    if home is None or source.is_converted:
        return source
    if fault_in(home) is not None:
        if source.convert_to is None:
            refuse_config(fetch_config(source, None), source.name)  # before minutes are spent on it
        try:
            make_private(home.parent)
            # the system drops the lock of a process that dies
            with FileLock(home.with_name(f"{home.name}.lock")):
                _convert_once(source, home)
        except (OSError, SafetensorError, RuntimeError) as error:
            if source.convert_to is None:
                logger.info("%s is converted at every start: no copy can be kept in %s: %s", source.name, home, error)
                return source
            raise TargetError(
                f"can't write the converted model to {home}: {error}", "free some disk, or set MEDUSA_HOME"
            ) from error
    return Source(source.name, str(home), convert_to=home)


def _convert_once(source: Source, home: Path) -> None:
    """Convert, unless another process just did. Raises TargetError where what is written can't be used."""
    if (fault := fault_in(home)) is None:
        return
    if home.exists():
        say_once(f"{source.name} is converted anew, since {fault}")
    logger.info("converting %s, once", source.name)
    sealed.sweep(home)
    sealed.make(home, lambda made: _convert(source, made))
    if (fault := fault_in(home)) is not None:
        raise TargetError(
            f"the converted model can't be used: {fault}", "set MEDUSA_HOME to a folder that is yours alone"
        )


def _convert(source: Source, made: Path) -> None:
    """Write the model into a folder."""
    with read_once():
        loaded = fetch_model(source, None, torch.float32, "eager")
        tokenizer = fetch_tokenizer(source, None)
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    # The library refuses to save a model that came from GGUF: its numbers go into a fresh one.
    with torch.device("meta"):  # no random numbers are drawn for what is replaced
        fresh = AutoModelForCausalLM.from_config(loaded.config)
    fresh.load_state_dict(loaded.state_dict(), assign=True)
    fresh.generation_config = loaded.generation_config
    fresh.save_pretrained(made)
    tokenizer.save_pretrained(made)

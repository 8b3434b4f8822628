"""Names, folders, hub ids and GGUF files -> Target. Refuses, by name and with the reason, what a tree can't verify."""

import hashlib
import inspect
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging as library_logging

from medusa_cli.errors import TargetError
from medusa_cli.recipe import TargetSettings
from medusa_cli.target import attention
from medusa_cli.target.masks import MaskKinds
from medusa_cli.target.model import Identity, Target, takes_mapping
from medusa_cli.target.runner import can_pack, keep_freed_memory, pack
from medusa_cli.target.sources import Source, find_source, licence_of

ATTENTION_KINDS = {"full_attention", "sliding_attention"}
SAMPLED_TENSORS, SAMPLED_NUMBERS = 12, 512


def load_target(settings: TargetSettings) -> Target:
    """Load the model a recipe names. TargetError for everything that can go wrong on the way."""
    library_logging.set_verbosity_error()
    library_logging.disable_progress_bar()
    source = converted(find_source(settings.model))
    device = choose_device(settings.device)
    if device.type == "cpu":
        keep_freed_memory()
    dtype = choose_dtype(settings.dtype, device)
    names = {"revision": settings.revision} if settings.revision else {}
    if source.gguf_file:
        names["gguf_file"] = source.gguf_file
    config = _loading(source, lambda: AutoConfig.from_pretrained(source.location, **names))
    _refuse_layers(config, settings.model)
    model = _load_model(source, config, settings, dtype, device, names)
    tokenizer = _loading(source, lambda: AutoTokenizer.from_pretrained(source.location, **names))
    return make_target(model, tokenizer, settings)


def make_target(model: Any, tokenizer: Any, settings: TargetSettings) -> Target:
    """Wrap a model that is already in memory; packs it in place when the runner says so."""
    _refuse_forward(model, settings.model)
    kinds = mask_kinds(model)
    fingerprint = fingerprint_of(model)
    weight = model.get_input_embeddings().weight
    runner = choose_runner(settings.runner, weight.device, weight.dtype)
    if runner == "packed":
        pack(model)
    identity = Identity(settings.model, fingerprint, runner, model.config._attn_implementation, licence_of(settings.model))
    return Target(model.eval().requires_grad_(False), tokenizer, kinds, stop_ids_of(model, tokenizer), identity)


def choose_device(wanted: str) -> torch.device:
    """`auto` is the first GPU, else the CPU."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.startswith("cuda"):
        present = torch.cuda.device_count()
        index = int(wanted.partition(":")[2] or 0)
        if index >= present:
            raise TargetError(f"device {wanted} is not there: {present} CUDA devices", "use --device cpu, or auto")
    return torch.device(wanted)


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the machine multiplies matrices in it, else float32."""
    if wanted != "auto":
        return getattr(torch, wanted)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if device.type == "cpu" and torch.cpu._is_amx_tile_supported():
        return torch.bfloat16
    return torch.float32


def choose_runner(wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """`auto` packs where packing runs."""
    possible = can_pack(device, dtype)
    if wanted == "auto":
        return "packed" if possible else "eager"
    if wanted == "packed" and not possible:
        raise TargetError(f"the packed runner needs float32 on a CPU, not {dtype} on {device}", "use --runner eager")
    return wanted


def stop_ids_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """The union of what the generation config and the tokenizer call an end."""
    found: set[int] = set()
    for owner in (getattr(model, "generation_config", None), tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(found)


def mask_kinds(model: Any) -> MaskKinds:
    """Layer kind -> window. One kind for most models, two where full and sliding layers alternate."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if takes_mapping(model):
        kinds = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]))
        return {kind: window if kind == "sliding_attention" else None for kind in kinds}
    slides = "create_sliding_window_causal_mask" in inspect.getsource(type(model.base_model).forward)
    if slides and window is not None:
        return {"sliding_attention": window}
    return {"full_attention": None}


def fingerprint_of(model: Any) -> str:
    """A hash over a sample of the weights, rounded to bfloat16 so that the dtype loaded in does not matter."""
    digest = hashlib.sha256()
    named = sorted((name, tensor) for name, tensor in model.named_parameters() if tensor.is_floating_point())
    for name, tensor in named[:: max(1, len(named) // SAMPLED_TENSORS)]:
        numbers: Tensor = tensor.detach().flatten()
        sample = numbers[:: max(1, len(numbers) // SAMPLED_NUMBERS)][:SAMPLED_NUMBERS]
        digest.update(name.encode())
        digest.update(sample.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def converted(source: Source) -> Source:
    """The source itself, or for an embedded GGUF file the folder it is converted into, once."""
    if source.convert_to is None:
        return source
    home = source.convert_to
    if not (home / "config.json").is_file():
        _convert(source, home)
    return Source(source.name, str(home))


def _convert(source: Source, home: Path) -> None:
    """Dequantise a GGUF file to a folder of safetensors; a kill leaves nothing that looks complete."""
    partial = home.with_name(f"{home.name}.{os.getpid()}.partial")
    names = {"gguf_file": source.gguf_file}
    loaded = _loading(
        source, lambda: AutoModelForCausalLM.from_pretrained(source.location, dtype=torch.float32, **names)
    )
    tokenizer = _loading(source, lambda: AutoTokenizer.from_pretrained(source.location, **names))
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    # The library refuses to save a model that came from GGUF: its numbers go into a fresh one.
    fresh = AutoModelForCausalLM.from_config(loaded.config)
    fresh.load_state_dict(loaded.state_dict())
    fresh.generation_config = loaded.generation_config
    try:
        fresh.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        if home.exists():
            shutil.rmtree(home)
        partial.rename(home)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise TargetError(f"can't write the converted model to {home}: {error}", "free some disk, or set MEDUSA_HOME") from error


def _load_model(
    source: Source, config: Any, settings: TargetSettings, dtype: torch.dtype, device: torch.device, names: dict[str, Any]
) -> Any:
    implementation = _attention_for(settings.attention, config)
    load = AutoModelForCausalLM.from_pretrained
    try:
        model = _loading(source, lambda: load(source.location, dtype=dtype, attn_implementation=implementation, **names))
    except _NoSuchAttention as error:
        if settings.attention not in ("auto", "grouped"):
            raise TargetError(f"{settings.model} has no {settings.attention} attention", "use --attention eager") from error
        model = _loading(source, lambda: load(source.location, dtype=dtype, attn_implementation="eager", **names))
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        raise TargetError(f"{settings.model} does not fit on {device}", "use a smaller model, or --dtype bfloat16") from error


def _attention_for(wanted: str, config: Any) -> str:
    """`auto` is grouped attention, except where a model's attention does more than softmax of scaled products."""
    text = config.get_text_config()
    special = getattr(text, "attn_logit_softcapping", None) or "sinks" in str(getattr(text, "model_type", ""))
    if wanted in ("eager", "sdpa"):
        return wanted
    return "eager" if special or text.model_type in ("gemma2", "gpt_oss") else attention.register()


class _NoSuchAttention(Exception):
    """The architecture does not support the attention implementation asked for."""


def _loading(source: Source, load: Any) -> Any:
    """Run one of the library's loaders; its many exceptions become one TargetError."""
    try:
        return load()
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError, AttributeError) as error:
        text = " ".join(str(error).split())
        if "attn_implementation" in text or "does not support an attention" in text:
            raise _NoSuchAttention from error
        offline = not Path(source.location).exists()
        what = f"can't load {source.name} ({source.location}): {text[:200] or type(error).__name__}"
        hint = (
            "is the hub reachable and the id right? HF_HUB_OFFLINE=1 uses only what was downloaded before"
            if offline
            else "is the folder complete, and does this version of transformers know the architecture?"
        )
        raise TargetError(what, hint) from error


def _refuse_layers(config: Any, name: str) -> None:
    """Refuse layers whose state can't forget a rejected node."""
    text = config.get_text_config()
    strange = sorted(set(getattr(text, "layer_types", None) or ()) - ATTENTION_KINDS)
    recurrent = any(DynamicCache(config=text).is_linear) if not strange else False
    if strange or recurrent:
        kinds = ", ".join(strange) or "recurrent"
        raise TargetError(
            f"{name} ({text.model_type}) has {kinds} layers: their state can't forget rejected guesses",
            "use a model whose layers are all full or sliding attention",
        )


def _refuse_forward(model: Any, name: str) -> None:
    """Refuse models that can't be told the position of a node."""
    config = model.config.get_text_config()
    if "position_ids" not in inspect.signature(model.forward).parameters or getattr(config, "alibi", False):
        raise TargetError(
            f"{name} ({config.model_type}) takes no position ids: two guesses for the same place can't share a forward",
            "use a model with rotary or learned positions",
        )
    if model.get_output_embeddings() is None:
        raise TargetError(f"{name} ({config.model_type}) has no output matrix", "use a causal language model")

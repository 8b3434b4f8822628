"""Names, folders, hub ids and GGUF files -> Target. Refuses, by name and with the reason, what a tree can't verify."""

import hashlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as library_logging

from medusa_cli.config.recipe import TargetSettings
from medusa_cli.errors import TargetError
from medusa_cli.kernels.ahead import compile_ahead
from medusa_cli.model import attention
from medusa_cli.model.adapter import StoredAdapter, merge
from medusa_cli.model.costs.kept import note_choice
from medusa_cli.model.device import IN_INTEGERS
from medusa_cli.model.device import choose_device as choose_device
from medusa_cli.model.device import choose_dtype as choose_dtype
from medusa_cli.model.identity import Identity
from medusa_cli.model.loading.gguf_conversion import converted
from medusa_cli.model.loading.huggingface import (
    NoSuchAttention,
    fetch_config,
    fetch_model,
    fetch_tokenizer,
    weights_identity,
)
from medusa_cli.model.loading.placement import placing_of, refuse_offload
from medusa_cli.model.loading.refusals import refuse_config, refuse_lost_window, refuse_model
from medusa_cli.model.loading.self_check import checked
from medusa_cli.model.loading.sources import Source, find_source, licence_of
from medusa_cli.model.masks import mask_kinds
from medusa_cli.model.runners.kinds import keep_freed_memory, lay_out
from medusa_cli.model.runners.select import attach_forward, runner_for
from medusa_cli.model.target import Target
from medusa_cli.model.weights import stored

logger = logging.getLogger(__name__)

MOST_IDS = 2**31
SAMPLED_NUMBERS = 64  # of each tensor
SAMPLED_OF_A_ROW = 8


def load_target(settings: TargetSettings, adapter: StoredAdapter | None = None) -> Target:
    """Load the model a recipe names, self-checked. TargetError for everything that can go wrong on the way.

    Where `auto` chose layers or an attention that the check finds wrong for an architecture, the plain ones are taken.

    adapter   added to the weights before anything else; raises as `merge`
    """
    target = load_unchecked(settings, adapter)
    try:
        checked(target)
    except TargetError as fault:
        plain = _plainer(settings, target)
        if plain is None:
            raise
        logger.info("%s; it is loaded plainly, with eager layers and attention", fault.message)
        target = load_unchecked(plain, adapter)
        checked(target)
    return target


def _plainer(settings: TargetSettings, target: Target) -> TargetSettings | None:
    """The same with the library's own layers and attention, where `auto` chose others; None where it didn't."""
    chosen = {
        "runner": settings.runner == "auto" and target.identity.runner != "eager",
        "attention": settings.attention == "auto" and target.identity.attention != "eager",
    }
    changes = {name: "eager" for name, is_other in chosen.items() if is_other}
    return settings.model_copy(update=changes) if changes else None


def load_unchecked(
    settings: TargetSettings, adapter: StoredAdapter | None = None, on_phase: Callable[[str], None] = lambda name: None
) -> Target:
    """As `load_target`, without the self-check: for who runs it himself, or verifies no tree.

    on_phase   told what begins, for who asks where the time goes
    """
    on_phase("finding the model")
    library_logging.set_verbosity_error()
    library_logging.disable_progress_bar()
    device = choose_device(settings.device)
    source = find_source(settings.model)
    if device.type == "cpu":
        keep_freed_memory()
        if "auto" in (settings.runner, settings.attention):
            compile_ahead()
    if (
        settings.quantize == "none" or source.convert_to
    ):  # else a .gguf file is refused by name: it is quantised already
        source = converted(source)
    dtype = choose_dtype(settings.dtype, device)
    on_phase("config")
    config = fetch_config(source, settings.revision)
    refuse_config(config, settings.model)
    on_phase("tokenizer")
    tokenizer = fetch_tokenizer(source, settings.revision)
    on_phase("weights")
    files = weights_identity(source, settings.revision)  # first: files that change meanwhile are not what was loaded
    model = _load_model(source, config, settings, dtype, device)
    on_phase("layers and forward")
    return make_target(model, tokenizer, settings, adapter, files or weights_identity(source, settings.revision))


def make_target(
    model: Any, tokenizer: Any, settings: TargetSettings, adapter: StoredAdapter | None = None, files: str | None = None
) -> Target:
    """Wrap a model that is already in memory; the runner replaces its linear layers in place.

    files   what tells the files that its weights came from, if they came from files
    """
    refuse_model(model, settings.model)
    refuse_offload(model, settings.model)
    kinds = mask_kinds(model)
    refuse_lost_window(model, kinds, settings.model)
    fingerprint, rows = fingerprint_of(model), rows_of(model)
    if adapter is not None:  # before the layers are laid out: what is merged lies on no grid that they lay on
        fingerprint = merge(model, adapter, fingerprint)
    in_integers = settings.dtype == IN_INTEGERS
    runner = lay_out(
        model, runner_for(model, settings, fingerprint), None if adapter else files, in_integers=in_integers
    )
    identity = Identity(
        settings.model,
        fingerprint,
        runner,
        model.config._attn_implementation,
        licence_of(settings.model),
        adapter.folder if adapter else None,
        files,
        rows,
        IN_INTEGERS if in_integers else None,
    )
    target = Target(model.eval().requires_grad_(False), tokenizer, kinds, stop_ids_of(model, tokenizer), identity)
    if in_integers and not target.attends_natively:
        raise TargetError(
            f"dtype int8 can't run {target.name}: its attention ({target.identity.attention}) has no kernel, and would "
            "sum in another order beside other nodes",
            "use --dtype float32",
        )
    attach_forward(target, by_measurement=settings.runner == "auto")
    if settings.runner == "auto":
        note_choice(target)
    return target


def choose_attention(wanted: str, config: Any) -> str:
    """`auto` is grouped attention, where the library says that a model's attention is the plain one.

    Capped logits and attention sinks have eager code only, and grouped attention would drop them without a word.
    """
    if wanted in ("eager", "sdpa"):
        return wanted
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None or not kind._supports_sdpa:
        return "eager"
    return attention.register() if kind._supports_attention_backend else "sdpa"


def stop_ids_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """The union of what the generation config and the tokenizer call an end. Raises TargetError for what is no id."""
    found: set[int] = set()
    for owner in (getattr(model, "generation_config", None), tokenizer):
        named = getattr(owner, "eos_token_id", None)
        ids = named if isinstance(named, list | tuple) else [] if named is None else [named]
        if not all(type(id_) is int and 0 <= id_ < MOST_IDS for id_ in ids):
            raise TargetError(
                f"eos_token_id is {named!r:.60}, which names no token: texts would not end where they should",
                "correct it in the model's generation_config.json or tokenizer_config.json",
            )
        found.update(ids)
    return frozenset(found)


def fingerprint_of(model: Any) -> str:
    """A hash over a sample of every weight: the same in whatever dtype they are loaded, another when one tensor is.

    Numbers are rounded to bfloat16 and then to float16, in this order: weights stored in bfloat16 agree in all three.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(_float_tensors(model)):
        numbers: Tensor = tensor.detach().flatten()
        sample = numbers[:: max(1, len(numbers) // SAMPLED_NUMBERS)][:SAMPLED_NUMBERS]
        digest.update(f"{name} {list(tensor.shape)}".encode())
        digest.update(_rounded(sample))
    return digest.hexdigest()[:16]


def rows_of(model: Any) -> str:
    """A hash over a few numbers of every row of the embeddings and of the output matrix, of any dtype likewise.

    A fingerprint samples so few that a token's row may change unseen: in a copy with added tokens, or a damaged one.
    """
    digest = hashlib.sha256()
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight_VH: Tensor = module.weight.detach()
        if weight_VH.dim() == 2 and weight_VH.is_floating_point() and len(stored(module.weight)) == 1:
            sample = weight_VH[:, :: max(1, weight_VH.shape[1] // SAMPLED_OF_A_ROW)][:, :SAMPLED_OF_A_ROW]
            digest.update(_rounded(sample))
    return digest.hexdigest()[:16]


def _rounded(numbers: Tensor) -> bytes:
    return numbers.to("cpu", torch.bfloat16).half().contiguous().view(torch.int16).numpy().tobytes()


def _float_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters by name; of a quantised one the scale of each block, which is exact on every device."""
    for name, parameter in model.named_parameters():
        if len(parts := stored(parameter)) > 1:
            yield from ((f"{name} {part.dtype}", part) for part in parts if part.is_floating_point())
        elif parameter.is_floating_point():
            yield name, parameter
        elif hasattr(parameter, "quant_state"):
            yield f"{name} {parameter.quant_state.quant_type}", parameter.quant_state.absmax


def _load_model(source: Source, config: Any, settings: TargetSettings, dtype: torch.dtype, device: torch.device) -> Any:
    """The model on its device, with the attention asked for, or eager where `auto` meets one that has no other."""
    placing = placing_of(settings, source, dtype, device)

    def fetch(attention: str) -> Any:
        return fetch_model(source, settings.revision, dtype, attention, placing, config)

    try:
        try:
            model = fetch(choose_attention(settings.attention, config))
        except NoSuchAttention as error:
            if settings.attention != "auto":
                raise TargetError(
                    f"{settings.model} ({config.model_type}) has no {settings.attention} attention",
                    "use --attention eager",
                ) from error
            model = fetch("eager")
        return model if placing else model.to(device)
    except torch.OutOfMemoryError as error:
        raise TargetError(
            f"{settings.model} does not fit on {device}",
            "use a smaller model, --dtype bfloat16, or a recipe with target.quantize or target.device_map",
        ) from error

"""What a tree can't verify, refused by name and with the reason: before the weights are read where the config tells."""

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, DynamicCache

from medusa_cli.errors import TargetError

ATTENTION_KINDS = {"full_attention", "sliding_attention"}

# ten times and more what the largest models have
_MOST = {
    "num_hidden_layers": 10_000, "hidden_size": 2**20, "num_attention_heads": 2**16, "num_key_value_heads": 2**16,
    "head_dim": 2**16, "vocab_size": 2**27, "max_position_embeddings": 2**40,
}  # fmt: skip

_USE_CAUSAL = "use a decoder-only causal language model"


def refuse_config(config: Any, name: str) -> None:
    """Raise TargetError for an architecture that its config shows to be unfit."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise TargetError(f"{name} ({kind}) is an encoder-decoder, not a causal language model", _USE_CAUSAL)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise TargetError(f"{name} ({kind}) is not a causal language model", _USE_CAUSAL)
    _refuse_sizes(config, name)
    refuse_layers(config, name)
    architectures = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    architecture = architectures[0] if isinstance(architectures, tuple) else architectures
    _refuse_code(config, architecture, name)


def refuse_model(model: Any, name: str) -> None:
    """Raise TargetError for a loaded model that is unfit."""
    refuse_layers(model.config, name)
    _refuse_code(model.config, type(model), name)
    if model.get_output_embeddings() is None:
        raise TargetError(f"{name} ({model.config.model_type}) has no output matrix", _USE_CAUSAL)
    # vision towers, which may look both ways, number no layers of a cache
    if any(
        getattr(module, "is_causal", True) is False and getattr(module, "layer_idx", None) is not None
        for module in model.modules()
    ):
        raise _reads_ahead(model.config, name)


def _refuse_code(config: Any, architecture: Any, name: str) -> None:
    """Refuse what the stock class shows to be unfit."""
    _refuse_positions(config, architecture, name)
    _refuse_memory(config, architecture, name)
    _refuse_reading_ahead(config, architecture, name)
    _refuse_counted_positions(config, architecture, name)


def _refuse_reading_ahead(config: Any, architecture: Any, name: str) -> None:
    """Refuse encoders by a setting that only means something where the code has a mask that looks both ways."""
    if getattr(config, "is_decoder", None) is False and "create_bidirectional_mask" in _code_of(architecture):
        raise _reads_ahead(config, name)


def _reads_ahead(config: Any, name: str) -> TargetError:
    return TargetError(
        f"{name} ({config.model_type}) is an encoder: it reads the tokens that are yet to be written", _USE_CAUSAL
    )


def _refuse_memory(config: Any, architecture: Any, name: str) -> None:
    """Refuse models that remember a text in another way than by keys and values that a caller can hold."""
    parameters = inspect.signature(architecture.forward).parameters
    cache = parameters.get("cache") or parameters.get("past_key_values")
    if cache is None or str(cache.annotation).startswith("dict"):
        raise TargetError(
            f"{name} ({config.model_type}) keeps no cache of keys and values: a text can't be gone on with by a tree",
            "use a model whose forward takes past_key_values",
        )


def _code_of(architecture: Any) -> str:
    """The stock modelling file."""
    return inspect.getsource(sys.modules[architecture.__module__])


def refuse_lost_window(model: Any, kinds: Mapping[str, int | None], name: str) -> None:
    """Refuse a window that the library's cache keeps and its masks don't: a prompt sees farther than what is written.

    kinds   as `masks.mask_kinds` gives them
    """
    text = model.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    context = getattr(text, "max_position_embeddings", None)
    if window is None or any(kinds.values()) or not any(DynamicCache(config=text).is_sliding):
        return
    if context is None or context > window:
        raise TargetError(
            f"{name} ({text.model_type}) forgets what is {window} tokens back, but not within a prompt: its text "
            "depends on the pieces in which it is read",
            f"set max_position_embeddings to {window} in config.json: shorter texts never meet the window",
        )


def _refuse_sizes(config: Any, name: str) -> None:
    """Refuse sizes that are none: the library takes them, and fails with them, or builds layers without end."""
    text = config.get_text_config()
    for size, most in _MOST.items():
        try:
            value = getattr(text, size, None)
        except RuntimeError:  # layers of several sizes: the library won't say one for all
            continue
        if value is not None and not (type(value) is int and 1 <= value <= most):
            raise TargetError(
                f"{name} ({config.model_type}): {size} is {value!r:.40}, which is no size", "mend its config.json"
            )


def refuse_layers(config: Any, name: str) -> None:
    """Refuse layers whose state can't forget a rejected node, or whose mask is neither full nor a window."""
    text = config.get_text_config()
    if not isinstance(getattr(text, "num_hidden_layers", None), int):
        raise TargetError(
            f"{name} ({text.model_type}) is no single stack of layers: its config names no num_hidden_layers",
            "use a model whose layers are all full or sliding attention",
        )
    _refuse_chosen_keys(text, name)
    strange = sorted(set(getattr(text, "layer_types", None) or ()) - ATTENTION_KINDS)
    recurrent = not strange and any(DynamicCache(config=text).is_linear)
    if strange or recurrent:
        kinds = ", ".join(strange) or "recurrent"
        raise TargetError(
            f"{name} ({text.model_type}) has {kinds} layers: rejected guesses can't be kept out of them",
            "use a model whose layers are all full or sliding attention",
        )


def _refuse_chosen_keys(text: Any, name: str) -> None:
    """Refuse layers that look at their best keys only: a repeated token's keys tie, and the order of a sort decides."""
    most, context = getattr(text, "keep_window_size", None), getattr(text, "max_position_embeddings", None)
    if most is not None and (context is None or context > most):
        raise TargetError(
            f"{name} ({text.model_type}) looks at {most} keys of its own choice: between equal ones it depends on what "
            "else is in the forward",
            f"set max_position_embeddings to {most} in config.json: in shorter texts it looks at all of them",
        )


def _refuse_positions(config: Any, architecture: Any, name: str) -> None:
    """Refuse models that can't be told the position of a node."""
    takes = "position_ids" in inspect.signature(architecture.forward).parameters
    if not takes or getattr(config.get_text_config(), "alibi", False):
        raise TargetError(
            f"{name} ({config.model_type}) takes no position ids: two guesses for the same place can't share a forward",
            "use a model with rotary or learned positions",
        )


def _refuse_counted_positions(config: Any, architecture: Any, name: str) -> None:
    """Refuse models whose positions are not the tokens' places."""
    if "create_position_ids_from_input_ids" in _code_of(architecture):
        raise TargetError(
            f"{name} ({config.model_type}) counts positions over the tokens that are no padding, from another number "
            "than 0: a node's position can't be told to it",
            "use a model with rotary or learned positions",
        )

"""The settings of an architecture that change what its layers see: rope tables, windows, tied matrices."""

from collections.abc import Iterator, Mapping
from typing import Any

from tests.differential.shrink import CONTEXT, WINDOW, tiny_config

ORIGINAL, FACTOR = 24, 4.0  # tokens that the model was first trained on, and how often they go into its context

BASE = "as it comes"


def variants(model_type: str) -> dict[str, Mapping[str, Any]]:
    """Name -> what is changed in the tiny config's text part; the config as it comes is first."""
    try:
        text = tiny_config(model_type).get_text_config()
    except Exception:  # whatever a config class may raise: `examine` says why
        return {BASE: {}}
    return {BASE: {}, **dict(_ropes(text)), **dict(_windows(text)), **dict(_others(text))}


def _ropes(text: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every kind of rope table that the library makes."""
    parameters = getattr(text, "rope_parameters", None)
    if not parameters or "num_attention_heads" not in text.to_dict():
        return
    for kind, more in rope_kinds(text).items():
        changes: dict[str, Any] = {"rope_parameters": _with_rope(parameters, {"rope_type": kind, **more})}
        if "original_max_position_embeddings" in text.to_dict():
            changes["original_max_position_embeddings"] = ORIGINAL
        if kind == "dynamic":  # its table grows with texts past this
            changes["max_position_embeddings"] = ORIGINAL
        yield f"rope {kind}", changes


def rope_kinds(text: Any) -> dict[str, dict[str, Any]]:
    """Kind of table -> its settings."""
    half = _turned(text) // 2
    original = {"factor": FACTOR, "original_max_position_embeddings": ORIGINAL}
    longrope: dict[str, Any] = {
        "short_factor": [1.0 + 0.1 * place for place in range(half)],
        "long_factor": [4.0] * half,
    }
    if text.model_type == "phimoe":  # scales what it turns as well
        longrope |= {"short_mscale": 1.0, "long_mscale": 1.2}
    return {
        "linear": {"factor": FACTOR},
        "dynamic": {"factor": FACTOR},
        "yarn": original,
        "longrope": {**original, **longrope},
        "llama3": {**original, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    }


def _turned(text: Any) -> int:
    """Numbers of each head that rope turns."""
    # said in the config, even where some layers have another
    fields = text.to_dict()
    width = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    share = _first(text.rope_parameters).get("partial_rotary_factor") or fields.get("partial_rotary_factor")
    return int(width * (share or 1.0))


def _first(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the kind of layers that sees farthest, where each kind has its own."""
    return parameters if "rope_theta" in parameters else parameters.get("full_attention") or {}


def _with_rope(parameters: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The same with another table; where each kind of layer has its own, that of full attention."""
    if "rope_theta" in parameters:
        kept = {name: value for name, value in parameters.items() if name in ("rope_theta", "partial_rotary_factor")}
        return {**kept, **more}
    return {
        name: _with_rope(value, more) if name == "full_attention" and value else value
        for name, value in parameters.items()
    }


def _windows(text: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Windows on where there are none as it comes, and off where there are."""
    fields = text.to_dict()
    kinds = set(fields.get("layer_types") or ())
    if fields.get("sliding_window"):
        yield "wide window", {"sliding_window": CONTEXT}
        yield "no window", {"sliding_window": None, **_layers(text, "full_attention", kinds)}
    if "sliding_window" in fields and "sliding_attention" not in kinds:
        on = {"use_sliding_window": True} if "use_sliding_window" in fields else {}
        yield "window", {"sliding_window": WINDOW, **on, **_layers(text, "sliding_attention", kinds)}


def _layers(text: Any, kind: str, kinds: set[str]) -> dict[str, Any]:
    """Layer types with every other layer of this kind; nothing for configs without them."""
    if not kinds:
        return {}
    both = [kind, "full_attention"] * text.num_hidden_layers
    return {"layer_types": both[: text.num_hidden_layers]}


def _others(text: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    fields = text.to_dict()
    if "tie_word_embeddings" in fields:
        tied = fields["tie_word_embeddings"]
        yield ("untied" if tied else "tied"), {"tie_word_embeddings": not tied}
    if "keep_window_size" in fields:
        yield "few keys", {"keep_window_size": WINDOW}
    if fields.get("is_decoder") is False:
        yield "decoder", {"is_decoder": True}
    if "alibi" in fields:
        yield "alibi", {"alibi": not fields["alibi"]}
    for name in ("multi_query", "new_decoder_architecture", "parallel_attn", "use_sliding_window"):
        if isinstance(fields.get(name), bool) and (name != "use_sliding_window" or fields.get("layer_types") is None):
            yield name if not fields[name] else f"no {name}", {name: not fields[name]}

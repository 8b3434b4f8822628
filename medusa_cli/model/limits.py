"""The most positions a model has: those of its config, times what its rotary tables are scaled by."""

from collections.abc import Iterator, Mapping
from typing import Any


def context_limit(model: Any) -> int | None:
    """Tokens that prompt and text may have together, or None where the config names no limit.

    `max_position_embeddings` is read in two ways: some configs name the length that positions were learnt for and leave
    the scaled one to the factor (yarn of Qwen2.5, `linear`, `dynamic`), others name the scaled one and the first as the
    original (DeepSeek, llama3, longrope). The larger of the two is meant. Tables of learnt positions have no factor,
    and end. Where kinds of layers have tables of their own, the shortest counts.
    """
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    return min((_scaled(limit, parameters) for parameters in _parameters(model, config)), default=limit)


def _parameters(model: Any, config: Any) -> Iterator[Mapping[str, Any]]:
    """What the config says to each rotary module: a factor that no module reads scales nothing."""
    said = getattr(config, "rope_parameters", None) or {}
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        if types is not None:
            yield from (said.get(kind) or {} for kind in types) if isinstance(types, Mapping) else (said,)


def _scaled(limit: int, parameters: Mapping[str, Any]) -> int:
    factor = parameters.get("factor")
    original = parameters.get("original_max_position_embeddings") or limit
    if parameters.get("rope_type", "default") == "default" or not isinstance(factor, int | float):
        return limit
    return max(limit, int(original * factor))

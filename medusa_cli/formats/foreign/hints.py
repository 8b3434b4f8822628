"""What config.json of foreign heads says: hints, since published ones lie. Tensors decide; a difference is told."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_cli.errors import FormatError
from medusa_cli.util.plain_json import parse_json

logger = logging.getLogger(__name__)
_HEADS = ("medusa_num_heads", "num_medusa_heads")
_LAYERS = ("medusa_num_layers", "num_medusa_layers")
_MOST_BYTES = 4_000_000
_COPY_AGAIN = "copy config.json again from where the heads come from"


@dataclass(frozen=True)
class Hints:
    """What a config claims; None where it says nothing.

    base      the model that the heads belong to
    has_bias  whether vLLM would read biases
    of_model  the config is a whole model's, which heads lie beside
    """

    num_heads: int | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    base: str | None = None
    has_bias: bool | None = None
    of_model: bool = False

    def tell_lies(self, folder: Path, **counted: int) -> None:
        """Warn of each claim that the tensors don't bear out."""
        for name, found in counted.items():
            said = getattr(self, name)
            if said is not None and said != found:
                logger.warning(
                    "%s says %s is %s, and the tensors hold %s: the tensors count", folder / "config.json", name, said,
                    found,
                )  # fmt: skip


def read_hints(folder: Path, layout: str) -> Hints:
    """The claims of a folder's config; none where there is no config. Raises FormatError for one that is damaged."""
    file = folder / "config.json"
    if not file.is_file():
        return Hints()
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError("too long for a config")
        content = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(f"{file} is damaged: {error}", _COPY_AGAIN) from error
    if not isinstance(content, dict):
        raise FormatError(f"{file} holds no JSON object", _COPY_AGAIN)
    nested = content.get("medusa")
    claims: Mapping[str, Any] = {**(nested if isinstance(nested, dict) else {}), **content}
    is_vllm = content.get("model_type") == "medusa"
    base = claims.get("base_model_name_or_path")
    return Hints(
        num_heads=_number(claims, (*_HEADS, *(("num_heads",) if is_vllm else ()))),
        num_layers=_number(claims, (*_LAYERS, *(("num_hidden_layers",) if is_vllm else ()))),
        hidden_size=_number(claims, ("hidden_size",) if is_vllm else ()),
        base=base if isinstance(base, str) and base.strip() else None,
        has_bias=bool(claims.get("medusa_fc_bias", False)) if layout == "vllm" else None,
        of_model="model_type" in content and not is_vllm,
    )


def _number(claims: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of these that is a whole number."""
    found = (claims.get(name) for name in names)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)

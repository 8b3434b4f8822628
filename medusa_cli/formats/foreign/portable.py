"""What heads must be for another tool to read them: refused by name, or converted where nothing is lost.

Shape letters: K heads, H hidden, V rows of the target's output matrix, W draft vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_cli.errors import FormatError
from medusa_cli.formats.foreign.reading import filled
from medusa_cli.heads.base import Heads
from medusa_cli.heads.config import HeadsTarget, MedusaConfig
from medusa_cli.heads.medusa import MedusaHeads

TIED_LAYERS = ("fasterdecoding", "medusa2")  # their reader repeats one block where there should be several
OUR_RECIPE = "train heads for export: medusa train-heads -c smollm2-135m-portable shows the settings"


@dataclass(frozen=True)
class Portable:
    """Heads over the target's whole vocabulary, bound to it, and sentences on what became of them."""

    heads: MedusaHeads
    notes: tuple[str, ...]


def portable(heads: Heads, target: HeadsTarget, tool: str, *, force: bool) -> Portable:
    """Heads as `tool` can hold them. Raises FormatError, by name, for what no layout of its can say.

    force   several layers are written even where the reader ties them
    """
    _refuse(heads, tool, force)
    config: MedusaConfig = heads.config
    notes: list[str] = []
    if config.num_layers > 1 and tool in TIED_LAYERS:
        notes.append(
            f"{tool}'s reader ties the {config.num_layers} layers of a head: only the last one's numbers count"
        )
    tensors = dict(heads.state_dict())
    assert isinstance(heads, MedusaHeads)
    if config.own_output:
        tensors |= _widened(heads, target)
    elif config.draft_vocab < target.real_vocab:
        notes.append(
            f"a draft vocabulary of {config.draft_vocab:,} becomes the model's {target.vocab_size:,}: the output is "
            "the model's own, so each of its tokens keeps its logit, and others can be guessed too"
        )
    tensors["draft_ids"] = torch.arange(target.vocab_size, device=heads.device)
    whole = MedusaConfig.model_validate({**dict(config), "draft_vocab": target.vocab_size})
    return Portable(filled(whole, tensors).bind(target.output_weight).eval(), tuple(notes))


def _refuse(heads: Heads, tool: str, force: bool) -> None:
    """Raise FormatError for heads that are more than residual blocks on the last hidden state."""
    config: Any = heads.config

    def refuse(what: str, instead: str = OUR_RECIPE) -> FormatError:
        return FormatError(f"{tool} can't hold these heads: {what}", instead)

    if config.sees_path:
        raise refuse(f"{config.type} heads see the guesses before theirs (path heads), and {tool} shows them none")
    if not isinstance(heads, MedusaHeads):
        raise refuse(f"heads of the kind {config.type} are no residual blocks")
    if config.sees_root:
        raise refuse(
            f"they see the root, the token that is already decided (heads.sees_root), and {tool} shows them the hidden "
            "state alone",
            "train with heads.sees_root=false, as the recipe smollm2-135m-portable does",
        )
    if config.output_bias:
        raise refuse(
            "the model's output has a bias (output_bias), and the format has no place for one", "use this program"
        )
    if config.adapter is not None:
        raise refuse(
            "they belong to a model with an adapter merged into its weights",
            "merge it into the model (peft: merge_and_unload), save that, and train or import heads for it",
        )
    if config.num_layers > 1 and tool in TIED_LAYERS and not force:
        raise refuse(
            f"{config.num_layers} layers a head, and the tool's reader repeats one layer instead",
            "use --to vllm, tgi or trtllm, train with heads.num_layers=1, or write them still: --force --no-verify",
        )


def _widened(heads: MedusaHeads, target: HeadsTarget) -> dict[str, Tensor]:
    """An own output over all V rows; rows of padding, which no token has, are the target's."""
    draft_ids_W = heads.draft_ids.cpu()
    if not torch.equal(draft_ids_W, torch.arange(len(draft_ids_W))) or len(draft_ids_W) < target.real_vocab:
        raise FormatError(
            f"a narrowed vocabulary can't be written: heads with an output of their own for {len(draft_ids_W):,} of "
            f"{target.real_vocab:,} tokens (heads.draft_vocab) say nothing of the others",
            "train with heads.draft_vocab=0, or with heads.own_output=false",
        )
    assert heads.output_weight is not None
    own_KWH = heads.output_weight
    rest_H = target.output_weight[len(draft_ids_W) :].to(own_KWH)
    return {"output_weight": torch.cat([own_KWH, rest_H.expand(len(own_KWH), -1, -1)], dim=1)} if len(rest_H) else {}

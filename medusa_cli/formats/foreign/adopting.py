"""Heads of another tool meet their target: they get its name, fingerprint and vocabulary.

Their files don't say which weights they were trained on, so that sizes are all that can be compared.
Shape letters: K heads, H hidden, V rows of the target's output matrix, W draft vocabulary.
"""

import logging

import torch
from torch import Tensor

from medusa_cli.errors import HeadsMismatch
from medusa_cli.formats.foreign.reading import filled
from medusa_cli.heads.config import HeadsTarget, MedusaConfig
from medusa_cli.heads.medusa import MedusaHeads
from medusa_cli.heads.traits import traits_of

logger = logging.getLogger(__name__)


def adopted(heads: MedusaHeads, target: HeadsTarget) -> MedusaHeads:
    """The heads as this target's, with the same numbers; not bound to it yet.

    Ids that the tokenizer doesn't know are never drafted. An output that is the target's own is shared with it.
    Raises HeadsMismatch when sizes differ.
    """
    config: MedusaConfig = heads.config
    _check_sizes(config, target)
    tensors = dict(heads.state_dict())
    if not config.own_output:
        tensors["draft_ids"] = torch.arange(target.real_vocab)
    else:
        real_W = tensors["draft_ids"] < target.real_vocab
        if not bool(real_W.all()):
            tensors["draft_ids"] = tensors["draft_ids"][real_W]
            tensors["output_weight"] = tensors["output_weight"][:, real_W]
    own_output = config.own_output and not _is_the_targets(tensors, target)
    if not own_output:
        tensors.pop("output_weight", None)
    changes = {
        "vocab_size": target.vocab_size,
        "draft_vocab": len(tensors["draft_ids"]),
        "own_output": own_output,
        "output_bias": not own_output and target.output_bias is not None,
        "target_name": target.name,
        "target_fingerprint": target.fingerprint,
        "traits": traits_of(target),
    }
    return filled(MedusaConfig.model_validate({**dict(config), **changes}), tensors)


def _check_sizes(config: MedusaConfig, target: HeadsTarget) -> None:
    hint = f"these heads say that they belong to {config.target_name}: name that model with --model"
    if config.hidden_size != target.hidden_size:
        raise HeadsMismatch(
            f"the heads need a hidden size of {config.hidden_size}; {target.name} has {target.hidden_size}", hint
        )
    if config.vocab_size > target.vocab_size:
        raise HeadsMismatch(
            f"the heads need a vocabulary of {config.vocab_size}; {target.name} has {target.vocab_size}", hint
        )


def _is_the_targets(tensors: dict[str, Tensor], target: HeadsTarget) -> bool:
    """Whether every head's output is the target's own rows, in the dtype of whichever has fewer bits."""
    if target.output_bias is not None:
        return False  # the stored output has none
    output_KWH, ids_W = tensors["output_weight"], tensors["draft_ids"]
    rows_WH = target.output_weight[ids_W.to(target.output_weight.device)].to("cpu")
    dtype = min(output_KWH.dtype, rows_WH.dtype, key=lambda each: each.itemsize)
    rows_WH = rows_WH.to(dtype)
    apart_KWH = output_KWH[:1] if output_KWH.stride(0) == 0 else output_KWH
    return all(torch.equal(output_WH.to(dtype), rows_WH) for output_WH in apart_KWH.cpu())

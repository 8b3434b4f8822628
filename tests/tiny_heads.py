"""Heads with random numbers, for a target that is no more than an output matrix."""

from dataclasses import dataclass, field
from typing import Any

import torch

from medusa_cli.heads.config import MedusaConfig
from medusa_cli.heads.medusa import MedusaHeads
from medusa_cli.heads.traits import Traits

HIDDEN, VOCAB, REAL, HEADS, WIDTH = 16, 50, 47, 3, 20


@dataclass
class FakeTarget:
    name: str = "tiny"
    fingerprint: str = "abc"
    hidden_size: int = HIDDEN
    vocab_size: int = VOCAB
    real_vocab: int = REAL
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    output_weight: torch.Tensor = field(
        default_factory=lambda: torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
    )
    output_bias: torch.Tensor | None = None
    tokenizer: Any = None
    config: Any = None
    rows: str | None = None


def some_heads(
    *,
    num_layers: int = 1,
    own_output: bool = False,
    output_bias: bool = False,
    sees_root: bool = False,
    traits: Traits | None = None,
) -> MedusaHeads:
    target = FakeTarget()
    config = MedusaConfig(
        num_heads=HEADS,
        num_layers=num_layers,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        draft_vocab=WIDTH,
        own_output=own_output,
        output_bias=output_bias,
        sees_root=sees_root,
        target_name=target.name,
        target_fingerprint=target.fingerprint,
        traits=traits,
    )
    bias = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4)) if output_bias else None
    ids = torch.randperm(REAL, generator=torch.Generator().manual_seed(5))[:WIDTH].sort().values
    heads = MedusaHeads.fresh(config, ids, target.output_weight, bias)
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return heads

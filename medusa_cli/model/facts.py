"""What is to be known of a target: what it is called, where it lies, how large it is.

Shape letters: H hidden, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from medusa_cli.errors import TargetError
from medusa_cli.model.device import IN_INTEGERS
from medusa_cli.model.identity import Identity
from medusa_cli.model.masks import MaskKinds
from medusa_cli.model.runners.stock import StockForward


class Facts:
    """Facts of a loaded causal language model; none of them takes a forward.

    tokenizer   its tokenizer, or None for tests on ids
    stop_ids    ids that end a text
    """

    def __init__(self, stock: StockForward, tokenizer: Any, stop_ids: frozenset[int], identity: Identity) -> None:
        self.stock = stock
        self.model = stock.model
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.identity = identity
        self.config = self.model.config.get_text_config()

    @property
    def name(self) -> str:
        """The alias, hub id or folder it was asked for by."""
        return self.identity.name

    @property
    def fingerprint(self) -> str:
        """A short hash that tells these weights from others of the same shape."""
        return self.identity.fingerprint

    @property
    def rows(self) -> str | None:
        """A hash over numbers of every row of the embeddings and of the output matrix: few changed rows show in it."""
        return self.identity.rows

    @property
    def kinds(self) -> MaskKinds:
        """Layer kind -> window."""
        return self.stock.kinds

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return self.stock.device

    @cached_property
    def devices(self) -> list[torch.device]:
        """Where the weights are: one device, or those that the layers are spread over."""
        return sorted({parameter.device for parameter in self.model.parameters()} | {self.device}, key=str)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of weights, masks and hidden states."""
        return self.stock.dtype

    @property
    def dtype_name(self) -> str:
        """The dtype as recipes and documents write it: float32, or int8 where products are in integers."""
        return self.identity.dtype or str(self.dtype).removeprefix("torch.")

    @property
    def in_integers(self) -> bool:
        """Whether the linear layers multiply in integers: then a text's numbers are the same in any company."""
        return self.identity.dtype == IN_INTEGERS

    @cached_property
    def output_weight(self) -> Tensor:
        """The output matrix [V, H], on the device where inputs go: a copy, where layers lie on several."""
        output = self.model.get_output_embeddings()
        weight_VH: Tensor = output.weight.detach() if isinstance(output, nn.Linear) else output.dense()
        return weight_VH.to(self.device)

    @cached_property
    def output_bias(self) -> Tensor | None:
        """The output's bias [V], or None."""
        bias = self.model.get_output_embeddings().bias
        return None if bias is None else bias.detach().to(self.device)

    @cached_property
    def hidden_size(self) -> int:
        """H, as the output matrix takes it: not always the config's hidden_size."""
        return self.model.get_output_embeddings().in_features

    @property
    def tap_size(self) -> int:
        """The width of what goes into the layers, and of what comes out of them: not always the output's."""
        size: int = self.config.hidden_size
        return size

    @cached_property
    def vocab_size(self) -> int:
        """V: rows of the output matrix."""
        return self.model.get_output_embeddings().out_features

    @cached_property
    def real_vocab(self) -> int:
        """Ids the tokenizer knows; those past it are padding of the matrix and are never drafted."""
        return min(self.vocab_size, len(self.tokenizer)) if self.tokenizer is not None else self.vocab_size

    @property
    def context_limit(self) -> int | None:
        """The most positions the model has, or None."""
        return self.stock.context_limit

    def check_ids(self, rows: Iterable[Sequence[int]]) -> None:
        """Raise TargetError when a token has no embedding: the tokenizer is another model's, or was added to."""
        highest = max((max(row) for row in rows if row), default=0)
        known = len(self.model.get_input_embeddings().weight)
        if highest >= known:
            has_name = self.tokenizer is not None and highest < len(self.tokenizer)
            token = f" ({self.tokenizer.convert_ids_to_tokens(highest)!r})" if has_name else ""
            raise TargetError(
                f"token id {highest}{token} is beyond the {known} embeddings of {self.name}",
                "use the tokenizer that came with the model, or resize the model's embeddings to it and save it again",
            )

    @property
    def mask_mapping(self) -> list[str] | None:
        """The kinds of layers when this architecture picks its masks out of a mapping, else None."""
        return self.stock.mask_mapping

    @property
    def num_layers(self) -> int:
        """Layers that write keys and values."""
        return self.config.num_hidden_layers

    @cached_property
    def windows(self) -> list[int | None]:
        """The window of each layer, None for full attention."""
        if len(self.kinds) == 1:
            return list(self.kinds.values()) * self.num_layers
        return [self.kinds[kind] for kind in self.config.layer_types]

    def logits_of(self, hidden: Tensor) -> Tensor:
        """The target's logits [..., V] after final hidden states [..., H]."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        config = self.config
        cap = getattr(config, "final_logit_softcapping", None)
        logits = logits * (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
        return logits if cap is None else torch.tanh(logits / cap) * cap

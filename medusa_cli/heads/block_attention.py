"""Attention of blocks: rotary positions, and many blocks of many texts at once, each with the text before it.

Shape letters: B blocks, K places of a block, S texts, T places of a text, A blocks of a text at most, Q query heads,
G key heads, E head width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


class Rotary:
    """Cosines and sines of positions, made as far as they are asked for."""

    def __init__(self, width: int, theta: float) -> None:
        self._width, self._theta = width, theta
        self._tables: tuple[Tensor, Tensor] | None = None

    def of(self, positions: Tensor, last: int, dtype: torch.dtype) -> "Turn":
        """What turns states at these positions [..., T], none of which is beyond `last`."""
        cosines, sines = self._made(last, positions.device, dtype)
        return Turn(cosines[positions][..., None, :], sines[positions][..., None, :])

    def _made(self, last: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tables [P, E], with room for position `last`."""
        held = self._tables
        if held is None or len(held[0]) <= last or (held[0].device, held[0].dtype) != (device, dtype):
            size = 512 * (last // 512 + 1)
            # a table made under inference can't be part of a graph later
            with torch.inference_mode(False), torch.no_grad():
                powers = torch.arange(0, self._width, 2, device=device, dtype=torch.float64) / self._width
                angles = torch.arange(size, device=device)[:, None] * self._theta**-powers
                cosines, sines = angles.cos(), angles.sin()
                self._tables = (
                    torch.cat([cosines, cosines], dim=-1).to(dtype),
                    torch.cat([-sines, sines], dim=-1).to(dtype),
                )
        assert self._tables is not None
        return self._tables


@dataclass(frozen=True)
class Turn:
    """Cosines of positions [..., T, 1, E], and their sines with a sign for each half."""

    cosines: Tensor
    sines: Tensor

    def __call__(self, states: Tensor) -> Tensor:
        """States [..., T, heads, E], turned: their first half against their second."""
        return torch.addcmul(states * self.cosines, states.roll(states.shape[-1] // 2, -1), self.sines)


@dataclass(frozen=True)
class Blocks:
    """Where blocks stand: which text each is in, and the last place of it that the block sees.

    slot_B   numbers the blocks of a text; places are counted in the text
    """

    text_B: Tensor
    place_B: Tensor
    slot_B: Tensor
    most: int

    @classmethod
    def of(cls, text_B: Tensor, place_B: Tensor) -> "Blocks":
        """Blocks in any order."""
        order_B = text_B.argsort(stable=True)
        counts_S = text_B.bincount()
        first_S = counts_S.cumsum(0) - counts_S
        slot_B = torch.empty_like(text_B)
        slot_B[order_B] = torch.arange(len(text_B), device=text_B.device) - first_S[text_B[order_B]]
        return cls(text_B, place_B, slot_B, int(counts_S.max()) if len(counts_S) else 0)

    def attend(
        self, query_BKQE: Tensor, key_BKGE: Tensor, value_BKGE: Tensor, before: tuple[Tensor, Tensor], causal: bool
    ) -> Tensor:
        """Each block over its text's places up to its own and over itself: [B, K, Q * E].

        before   keys and values of the texts [S, T, G, E]
        """
        keys_STGE, values_STGE = before
        num_texts, length, groups, width = keys_STGE.shape
        size, most = query_BKQE.shape[1], self.most
        share = query_BKQE.shape[2] // groups

        def grid(each_BKXE: Tensor) -> Tensor:
            """[S, A, K, X, E], zeros where a text has fewer blocks."""
            laid = each_BKXE.new_zeros(num_texts, most, *each_BKXE.shape[1:])
            return laid.index_put((self.text_B, self.slot_B), each_BKXE)

        # [S, G, share * A * K, E]: all queries that read one head's keys
        query = grid(query_BKQE).unflatten(3, (groups, share)).permute(0, 3, 4, 1, 2, 5) * width**-0.5
        key, value = (grid(each).permute(0, 3, 1, 2, 4) for each in (key_BKGE, value_BKGE))  # [S, G, A, K, E]
        outer = query.flatten(2, 4) @ keys_STGE.permute(0, 2, 3, 1)
        outer = outer.view(num_texts, groups, share, most, size, length)
        outer = outer.masked_fill(self._unseen(num_texts, length)[:, None, None, :, None], -torch.inf)
        inner = query @ key.transpose(-1, -2)[:, :, None]
        if causal:
            later = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(1)
            inner = inner.masked_fill(later, -torch.inf)
        shares = torch.cat([outer, inner], dim=-1).softmax(-1)
        far, near = shares.split([length, size], dim=-1)
        mixed = (far.flatten(2, 4) @ values_STGE.transpose(1, 2)).view(*far.shape[:-1], width)
        mixed = mixed + near @ value[:, :, None]
        # [S, A, K, G, share, E]
        return mixed.permute(0, 3, 4, 1, 2, 5)[self.text_B, self.slot_B].flatten(2)

    def _unseen(self, num_texts: int, length: int) -> Tensor:
        """Places of each text that are behind those a block sees [S, A, T]."""
        last_SA = self.place_B.new_zeros(num_texts, self.most)
        last_SA[self.text_B, self.slot_B] = self.place_B
        return torch.arange(length, device=last_SA.device) > last_SA[..., None]

"""Logits as `transformers` generate would shape them, each node's with the text of its own path.

Settings such as repetition_penalty make the next token depend on the text so far, and in a tree every node ends a text
of its own. The library's processors that look at nothing but a text and its logits are applied node by node; what
can't be is refused by name, never dropped. Shape letters: B rows, N tree nodes, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import transformers as hf
from torch import Tensor
from transformers.generation.logits_process import ExponentialDecayLengthPenalty

from medusa_cli.contracts import Draft
from medusa_cli.errors import RecipeError
from medusa_cli.kernels.argmax import have_best

Process = Callable[[Tensor, Tensor], Tensor]
"""(ids [M, L], scores [M, V]) -> scores"""


class Text(Protocol):
    """What is known of a row: its ids so far, how many of them are the prompt, and how many it may have at most."""

    @property
    def tokens(self) -> Sequence[int]:
        """Prompt and new ids, the root included."""

    @property
    def prompt_tokens(self) -> int:
        """Ids of the prompt."""

    @property
    def most_tokens(self) -> int:
        """Ids that prompt and text may have together."""


class Shaping:
    """Applies the processors that `make` gives for a row, in their order.

    mends   among them is one that makes numbers of what is none, as the settings asked for
    """

    def __init__(self, make: Callable[[Text], Sequence[Process]], *, mends: bool = False) -> None:
        self._make = make
        self.mends = mends

    def _taken(self, logits: Tensor) -> Tensor:
        """A copy in float32; zeros where numbers are none, which some processors stop at: the loop refuses them."""
        taken = logits.to(torch.float32, copy=True)
        return taken if self.mends else taken.masked_fill_(~have_best(logits)[..., None], 0)

    def first(self, logits_BV: Tensor, rows: Sequence[Text]) -> Tensor:
        """The logits that decide each row's first token, in float32; the rows hold their prompts."""
        shaped_BV = self._taken(logits_BV)
        for index, row in enumerate(rows):
            shaped_BV[index] = _processed(self._make(row), [row.tokens], shaped_BV[index : index + 1])[0]
        return shaped_BV

    def nodes(self, logits_BNV: Tensor, draft: Draft, rows: Sequence[Text]) -> Tensor:
        """The logits at each node, in float32; the rows end with their roots. Reads the draft on the host."""
        shaped_BNV = self._taken(logits_BNV)
        parents_BN = draft.tree.parents_XN.expand(len(rows), -1).tolist()
        for index, (row, guesses_N) in enumerate(zip(rows, draft.tokens_BN.tolist(), strict=True)):
            processors = self._make(row)
            texts = _texts(row.tokens, guesses_N, parents_BN[index])
            for nodes in _of_equal_length(texts):
                scores_MV = shaped_BNV[index, nodes]
                shaped_BNV[index, nodes] = _processed(processors, [texts[node] for node in nodes], scores_MV)
        return shaped_BNV


def _processed(processors: Sequence[Process], texts: Sequence[Sequence[int]], scores_MV: Tensor) -> Tensor:
    """Scores of texts of one length, through every processor."""
    ids_ML = torch.tensor([list(text) for text in texts], device=scores_MV.device)
    for process in processors:
        scores_MV = process(ids_ML, scores_MV)
    return scores_MV


def _texts(tokens: Sequence[int], guesses: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """The text that ends at each node."""
    texts = [list(tokens)]
    for guess, parent in zip(guesses[1:], parents[1:], strict=True):
        texts.append([*texts[parent], guess])
    return texts


def _of_equal_length(texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Nodes grouped by the length of their text."""
    groups: dict[int, list[int]] = {}
    for node, text in enumerate(texts):
        groups.setdefault(len(text), []).append(node)
    return list(groups.values())


# --- from a generation config to processors ---


@dataclass(frozen=True)
class _For:
    """What processors are made for: a row's prompt and its most tokens, and the model's stop ids."""

    prompt: Sequence[int]
    most_tokens: int
    stops: Tensor | None
    device: torch.device

    @property
    def prompt_11(self) -> Tensor:
        """The prompt as a batch of one [1, P]."""
        return torch.tensor([list(self.prompt)], device=self.device)

    @property
    def begin(self) -> int:
        """Where the first token of the model's own choice stands, as generate counts."""
        return len(self.prompt)


@dataclass(frozen=True)
class _Penalty:
    """OpenAI's penalties on tokens that the text has already: those of the prompt don't count.

    begin   tokens of the prompt
    """

    begin: int
    presence: float = 0.0
    frequency: float = 0.0

    def __call__(self, ids_ML: Tensor, scores_MV: Tensor) -> Tensor:
        """Scores less `presence` for each token that is there, and `frequency` for each time that it is."""
        new_ML = ids_ML[:, self.begin :]
        counts_MV = torch.zeros_like(scores_MV).scatter_add_(1, new_ML, torch.ones_like(new_ML, dtype=scores_MV.dtype))
        return scores_MV - self.frequency * counts_MV - self.presence * (counts_MV > 0)


_MAKERS: Mapping[str, Callable[[Any, _For], Process]] = {
    "sequence_bias": lambda value, row: hf.SequenceBiasLogitsProcessor(value),
    "encoder_repetition_penalty": lambda value, row: hf.EncoderRepetitionPenaltyLogitsProcessor(value, row.prompt_11),
    "repetition_penalty": lambda value, row: hf.RepetitionPenaltyLogitsProcessor(value),
    "presence_penalty": lambda value, row: _Penalty(row.begin, presence=value),
    "frequency_penalty": lambda value, row: _Penalty(row.begin, frequency=value),
    "no_repeat_ngram_size": lambda value, row: hf.NoRepeatNGramLogitsProcessor(value),
    "encoder_no_repeat_ngram_size": lambda value, row: hf.EncoderNoRepeatNGramLogitsProcessor(value, row.prompt_11),
    "bad_words_ids": lambda value, row: hf.NoBadWordsLogitsProcessor(value, row.stops),
    "min_length": lambda value, row: hf.MinLengthLogitsProcessor(value, row.stops, device=str(row.device)),
    "min_new_tokens": lambda value, row: hf.MinNewTokensLengthLogitsProcessor(
        len(row.prompt), value, row.stops, device=str(row.device)
    ),
    "forced_bos_token_id": lambda value, row: hf.ForcedBOSTokenLogitsProcessor(value),
    "forced_eos_token_id": lambda value, row: hf.ForcedEOSTokenLogitsProcessor(
        row.most_tokens, value, device=str(row.device)
    ),
    "remove_invalid_values": lambda value, row: hf.InfNanRemoveLogitsProcessor(),
    "exponential_decay_length_penalty": lambda value, row: ExponentialDecayLengthPenalty(
        value, row.stops, len(row.prompt)
    ),
    "suppress_tokens": lambda value, row: hf.SuppressTokensLogitsProcessor(value, device=str(row.device)),
    "begin_suppress_tokens": lambda value, row: hf.SuppressTokensAtBeginLogitsProcessor(
        value, row.begin, device=str(row.device)
    ),
    "temperature": lambda value, row: hf.TemperatureLogitsWarper(value),
    "top_h": lambda value, row: hf.TopHLogitsWarper(value),
    "top_k": lambda value, row: hf.TopKLogitsWarper(value),
    "top_p": lambda value, row: hf.TopPLogitsWarper(value),
    "min_p": lambda value, row: hf.MinPLogitsWarper(value),
    "typical_p": lambda value, row: hf.TypicalLogitsWarper(value),
    "epsilon_cutoff": lambda value, row: hf.EpsilonLogitsWarper(value),
    "eta_cutoff": lambda value, row: hf.EtaLogitsWarper(value, device=str(row.device)),
    "renormalize_logits": lambda value, row: hf.LogitNormalization(),
}
"""A processor of the library for each setting, in the order generate applies them."""

_ABOUT_ENDS = {"min_length", "min_new_tokens", "exponential_decay_length_penalty"}
# Settings that need more than a text and its logits: another forward, or a secret shared with who reads the text.
_REFUSED: Mapping[str, Any] = {"guidance_scale": 1.0, "watermarking_config": None}
# What changes nothing, beside None: older releases fill these in.
_NEUTRAL: Mapping[str, Any] = {
    "encoder_repetition_penalty": 1.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0,
    "remove_invalid_values": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "typical_p": 1.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "renormalize_logits": False,
}  # fmt: skip
SAMPLING = ("temperature", "top_h", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings that only sampling follows."""


def asked_of(config: Any, *, sampling: bool) -> dict[str, Any]:
    """What a generation config asks for beyond plain greedy decoding or plain sampling, in the order of _MAKERS.

    Raises RecipeError for a setting that can't be followed node by node.
    """
    for name, neutral in _REFUSED.items():
        if (value := getattr(config, name, None)) is not None and value != neutral:
            raise RecipeError(
                f"the model's generation_config asks for {name}, which can't be followed in a tree",
                f"take {name} out of its generation_config.json",
            )
    names = [name for name in _MAKERS if sampling or name not in SAMPLING]
    return in_force({name: getattr(config, name, None) for name in names})


def in_force(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that change something, as the library reads them: min_new_tokens, 0 too, overrules min_length."""
    overruled = {"min_length"} if settings.get("min_new_tokens") is not None else set()
    return {
        name: value
        for name, value in settings.items()
        if value is not None and value != _NEUTRAL.get(name) and name not in overruled
    }


_LEFT_OUT: Mapping[str, Any] = {
    "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "penalty_alpha": 0.0, "dola_layers": None,
    "max_time": None, "constraints": None, "force_words_ids": None, "token_healing": False, "num_return_sequences": 1,
}  # fmt: skip


def left_out_of(config: Any) -> dict[str, Any]:
    """What a generation config asks for beside logits and stops, which no command here does, to be named."""
    values = {name: getattr(config, name, None) for name in _LEFT_OUT}
    return {name: value for name, value in values.items() if value is not None and value != _LEFT_OUT[name]}


def stop_strings_of(config: Any) -> tuple[str, ...]:
    """The strings that end a text, as a generation config has them. Raises RecipeError for what is no text."""
    named = getattr(config, "stop_strings", None)
    strings = (named,) if isinstance(named, str) else () if named is None else tuple(named)
    if not all(isinstance(text, str) and text for text in strings):
        raise RecipeError(
            f"stop_strings of the model's generation_config is {named!r}: no texts", "correct generation_config.json"
        )
    return strings


def shaping_of(settings: Mapping[str, Any], stop_ids: frozenset[int], device: torch.device) -> Shaping | None:
    """What these settings do to logits; None when there are none. Raises RecipeError for an impossible value."""
    stops = torch.tensor(sorted(stop_ids), device=device) if stop_ids else None
    # A text that has no end can't be kept from ending.
    followed = {name: value for name, value in settings.items() if stops is not None or name not in _ABOUT_ENDS}
    if not followed:
        return None

    def make(row: _For) -> list[Process]:
        return [maker(followed[name], row) for name, maker in _MAKERS.items() if name in followed]

    try:
        make(_For([0], 2, stops, device))
    except (TypeError, ValueError) as error:
        raise RecipeError(f"an impossible setting of generation: {error}", "see generation_config.json") from error
    return Shaping(
        lambda row: make(_For(row.tokens[: row.prompt_tokens], row.most_tokens, stops, device)),
        mends="remove_invalid_values" in followed,
    )

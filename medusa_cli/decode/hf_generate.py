"""What transformers' `generate` hands to a callable `custom_generate`, as requests; what can't be kept is refused.

Shape letters: B rows, T positions of the padded prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.acceptance.logits_processors import asked_of, left_out_of, shaping_of
from medusa_cli.acceptance.lossless import Lossless
from medusa_cli.acceptance.random_streams import Stream
from medusa_cli.acceptance.sampling import Choosing
from medusa_cli.decode.engine import Request
from medusa_cli.decode.rows import Limits
from medusa_cli.errors import RecipeError
from medusa_cli.model.target import Target

# What generate makes by itself for every model; all but the mask follows from the ids.
_KNOWN = {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}
_OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
_ELSE = "leave it out, or leave out custom_generate"


@dataclass(frozen=True)
class Call:
    """One call of generate. `processors` and `criteria` are those that the library prepared, the caller's own included.

    kwargs   what goes to each forward, the attention mask among it
    """

    target: Target
    ids_BT: Tensor
    processors: Sequence[Any]
    criteria: Sequence[Any]
    config: Any
    kwargs: Mapping[str, Any]

    def requests(self) -> list[Request]:
        """The texts wanted. Raises RecipeError, naming it, for what can't be kept to.

        Sampled ones are drawn from seeds that torch's own generator gives: torch.manual_seed repeats them.
        """
        self._refuse()
        choosing, limits = self._choosing(), self._limits()
        seed = int(torch.randint(2**62, ())) if self.config.do_sample else 0
        return [
            Request(prompt, limits, choosing, Stream(seed, key)) for key, prompt in enumerate(self._prompts())
        ]  # fmt: skip

    def padded(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Prompts and texts as generate returns them [B, T + the longest text], on the device of the prompts."""
        longest = max(map(len, texts))
        pad = self.config._pad_token_tensor
        filler = 0 if pad is None else int(pad)
        rows = [[*text, *[filler] * (longest - len(text))] for text in texts]
        return torch.cat([self.ids_BT, self.ids_BT.new_tensor(rows)], dim=1)

    def _prompts(self) -> list[list[int]]:
        """The ids of each row without its padding on the left."""
        mask_BT = self.kwargs.get("attention_mask")
        if mask_BT is None:
            return self.ids_BT.tolist()
        if mask_BT.dim() != 2 or (mask_BT.long().diff(dim=1) < 0).any() or not mask_BT[:, -1].all():
            raise RecipeError(
                "the attention_mask leaves out more than padding on the left", "tokenizer.padding_side = 'left'"
            )
        return [ids_T[mask_T.bool()].tolist() for ids_T, mask_T in zip(self.ids_BT, mask_BT, strict=True)]

    def _limits(self) -> Limits:
        """Where texts end, as the criteria say."""
        room, stops = [], set[int]()
        for each in self.criteria:
            if type(each) is MaxLengthCriteria:
                room.append(each.max_length - self.ids_BT.shape[1])
            elif type(each) is EosTokenCriteria:
                stops.update(each.eos_token_id.flatten().tolist())
            else:
                raise RecipeError(f"a text can't be ended by {type(each).__name__} here", _ELSE)
        if not room or min(room) < 1:
            raise RecipeError("no budget of new tokens is named", "give max_new_tokens, at least 1")
        return Limits(min(room), frozenset(stops), self.target.context_limit)

    def _choosing(self) -> Choosing:
        """How tokens are chosen, as the config says."""
        settings, sampling = asked_of(self.config, sampling=self.config.do_sample), bool(self.config.do_sample)
        ends = next((each.eos_token_id for each in self.criteria if type(each) is EosTokenCriteria), None)
        stops = frozenset(ends.flatten().tolist()) if ends is not None else frozenset[int]()
        if not sampling:
            return Choosing(Greedy(), shaping_of(settings, stops, self.target.device))
        if settings.keys() <= {"temperature", "top_k", "top_p"}:
            numbers = (settings.get("temperature", 1.0), settings.get("top_p", 1.0), settings.get("top_k", 0))
            return Choosing(Lossless(*numbers))
        return Choosing(Lossless(1.0, 1.0, 0), shaping_of(settings, stops, self.target.device))

    def _refuse(self) -> None:
        """Raise RecipeError for what no text of ours follows or gives back."""
        config = self.config
        if others := [name for name, value in self.kwargs.items() if value is not None and name not in _KNOWN]:
            raise RecipeError(f"{', '.join(sorted(others))}: only input_ids and attention_mask are read", _ELSE)
        if any(getattr(config, name, None) for name in _OUTPUTS):
            named = ", ".join(name for name in _OUTPUTS if getattr(config, name, None))
            raise RecipeError(f"{named} is asked for, and only ids are given back", _ELSE)
        left_out = {name: value for name, value in left_out_of(config).items() if name != "num_return_sequences"}
        if left_out:
            listed = ", ".join(f"{name}={value}" for name, value in left_out.items())
            raise RecipeError(f"{listed} is asked for, and one text is written plainly here", _ELSE)
        cache = self.kwargs.get("cache", self.kwargs.get("past_key_values"))
        if cache is not None and cache.get_seq_length():
            raise RecipeError("a cache that holds tokens can't be taken over", _ELSE)
        for each in self.processors:
            if _words_of(each) not in self._own_processors:
                raise RecipeError(f"the logits processor {type(each).__name__} is not the config's own", _ELSE)

    @property
    def _own_processors(self) -> set[str]:
        """Processors that the config asks for: these are followed from the config, node by node."""
        own = self.target.model._get_logits_processor(
            generation_config=self.config,
            input_ids_seq_length=self.ids_BT.shape[1],
            encoder_input_ids=self.ids_BT,
            device=self.ids_BT.device,
            model_kwargs=self.kwargs,
        )
        return set(map(_words_of, own))


def _words_of(processor: Any) -> str:
    """Kind and numbers of a processor of the library, which compares by identity alone."""
    return f"{type(processor)} {vars(processor)}"

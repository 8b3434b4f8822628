"""How texts are chosen: an acceptance rule and logits processors, by what was asked for and the model's settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.acceptance.logits_processors import SAMPLING, Shaping, asked_of, in_force, shaping_of
from medusa_cli.acceptance.lossless import Lossless
from medusa_cli.acceptance.typed_settings import check_types, try_out
from medusa_cli.acceptance.typical import Typical
from medusa_cli.contracts import AcceptanceRule
from medusa_cli.errors import RecipeError
from medusa_cli.model.target import Target


@dataclass(frozen=True)
class Sampling:
    """How texts are to be chosen. None: acceptance by temperature; all else as the model's own settings say."""

    acceptance: Literal["greedy", "lossless", "typical"] | None = None
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_new_tokens: int = 0
    posterior_threshold: float | None = None
    posterior_alpha: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def name(self) -> str:
        """The acceptance that follows."""
        return self.acceptance or ("lossless" if self.temperature > 0 else "greedy")


@dataclass(frozen=True)
class Choosing:
    """A rule, what reworks logits before it, and the settings of the model's own that this follows."""

    rule: AcceptanceRule
    shaping: Shaping | None
    followed: Mapping[str, Any]


def check_sampling(asked: Sampling) -> None:
    """Raise RecipeError for flags that contradict each other, before a model is loaded."""
    if asked.name == "greedy" and asked.temperature > 0:
        raise RecipeError(
            "greedy acceptance has no temperature", "use --acceptance lossless to sample, or --temperature 0"
        )
    if asked.name != "greedy" and asked.temperature == 0:
        raise RecipeError(
            f"{asked.name} acceptance samples, at a temperature above 0", "give --temperature, such as 0.7"
        )
    if asked.name != "typical" and (asked.posterior_threshold, asked.posterior_alpha) != (None, None):
        raise RecipeError(
            "--posterior-threshold and --posterior-alpha belong to typical acceptance",
            "add --acceptance typical, or leave them out",
        )


def load_choosing(asked: Sampling, target: Target) -> Choosing:
    """What decides tokens, from what was asked for and the model's generation_config.

    Raises RecipeError for a setting there that can't be followed in a tree.
    """
    sampling = asked.name != "greedy"
    own = asked_of(target.model.generation_config, sampling=sampling)
    own.pop("temperature", None)
    check_types(own)
    flags: dict[str, Any] = {
        "repetition_penalty": asked.repetition_penalty,
        "presence_penalty": asked.presence_penalty or None,
        "frequency_penalty": asked.frequency_penalty or None,
        "sequence_bias": {(token,): bias for token, bias in asked.logit_bias} or None,
    }
    if sampling:
        flags |= {"top_p": asked.top_p, "top_k": asked.top_k, "min_p": asked.min_p}
    given = {name: value for name, value in flags.items() if value is not None}
    if asked.min_new_tokens:
        given["min_new_tokens"] = asked.min_new_tokens
    settings = in_force({**own, **given})
    followed = {name: value for name, value in own.items() if name not in given and name in settings}
    rule, left = _rule(asked, settings)
    shaping = shaping_of(left, target.stop_ids, target.device)
    if shaping is not None:
        try_out(shaping, target.vocab_size, target.device)
    return Choosing(rule, shaping, followed)


def _rule(asked: Sampling, settings: Mapping[str, Any]) -> tuple[AcceptanceRule, dict[str, Any]]:
    """The rule, and the settings it doesn't apply by itself."""
    if asked.name == "greedy":
        return Greedy(), dict(settings)
    own = ("top_p", "top_k") if asked.name == "lossless" else ()
    others = {name: value for name, value in settings.items() if name not in own}
    temperature = asked.temperature
    if any(name in SAMPLING for name in others):  # then all of them in one chain, because their order matters
        others, temperature = {**settings, "temperature": temperature}, 1.0
    if asked.name == "typical":
        numbers = {"threshold": asked.posterior_threshold, "alpha": asked.posterior_alpha}
        return Typical(temperature, **{name: value for name, value in numbers.items() if value is not None}), others
    left = {} if "temperature" in others else settings
    return Lossless(temperature, left.get("top_p", 1.0), left.get("top_k", 0)), others

"""One architecture in one variant under one attention: equal to the library, refused by name, or different."""

import functools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.config.recipe import TargetSettings
from medusa_cli.decode.exactness import difference
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.errors import MedusaError, TargetError
from medusa_cli.model.loading.load import choose_attention, make_target
from medusa_cli.model.loading.refusals import refuse_config
from medusa_cli.model.loading.self_check import require, self_check
from medusa_cli.model.target import Target
from tests.differential.shrink import tiny_config
from tests.differential.texts import library_text, random_model, telling_voice
from tests.differential.variants import variants
from tests.fakes import DRAFTERS, SHAPES
from tests.tiny_models import prompt_of

LENGTHS = (13, 2, 30, 7, 21, 1, 25, 17)  # of prompts: on either side of every threshold
NUM_NEW, SPARE = 44, 5  # every text crosses them all; a draft may look ahead of the end
# drafter, shape of tree, rows side by side
RUNS = (
    ("oracle", "chain", 8),
    ("wrong", "dynamic", 8),
    ("random", "wide", 5),
    ("per_position", "padded", 8),
    ("random", "dynamic", 8),
)
Outcome = Literal["equal", "tie", "refused", "self-check", "differs", "broken", "unbuilt"]


@dataclass(frozen=True)
class Case:
    """Which architecture, how changed, with which attention and runner ("auto" attention: the one `load` chooses)."""

    model_type: str
    variant: str
    attention: str
    runner: str


@dataclass(frozen=True)
class Finding:
    """What came of a case.

    outcome    equal; tie (differs at near ties alone); refused, by name and before any text; self-check: refused by
               the check of logits; differs; broken: our side fails without a reason; unbuilt: the library itself
               can't make or run the tiny model
    reason     the refusal, the error, or the first difference
    compared   tokens held against the library's
    differed   of these, from the first difference of a text to its end; ties: texts that part at a near tie
    distinct   different ids in the most varied text: a text that repeats itself tests little
    """

    case: Case
    outcome: Outcome
    reason: str = ""
    compared: int = 0
    differed: int = 0
    ties: int = 0
    distinct: int = 0
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """For a line of a file."""
        fields = asdict(self)
        return {**fields.pop("case"), **fields}


@dataclass(frozen=True)
class Effort:
    """How much is compared."""

    lengths: tuple[int, ...] = LENGTHS
    num_new: int = NUM_NEW
    runs: tuple[tuple[str, str, int], ...] = RUNS


def examine(case: Case, effort: Effort = Effort()) -> Finding:
    """Build, refuse or write, and compare."""
    begun = time.perf_counter()
    finding = _examined(case, effort)
    return replace(finding, seconds=round(time.perf_counter() - begun, 2))


def _examined(case: Case, effort: Effort) -> Finding:
    try:
        config = tiny_config(case.model_type, **variants(case.model_type)[case.variant])
    except Exception as error:  # whatever a config class may raise
        return Finding(case, "unbuilt", told(error))
    try:
        refuse_config(config, case.model_type)
    except TargetError as error:
        return Finding(case, "refused", str(error))
    except Exception as error:
        return Finding(case, "broken", told(error))
    return _compared(case, effort, config, _known(case.model_type, case.variant, effort))


@functools.lru_cache(maxsize=1)
def _known(model_type: str, variant: str, effort: Effort) -> "_Known":
    """The library's texts, which every attention and runner is held to."""
    config = tiny_config(model_type, **variants(model_type)[variant])
    prompts = [prompt_of(length) for length in effort.lengths]
    try:
        voice = telling_voice(config, prompts[0])
        model = random_model(config, voice=voice)
        wanted = [library_text(model, prompt, effort.num_new + SPARE) for prompt in prompts]
    except Exception as error:  # whatever the library's models may raise
        return _Known(told(error), 1.0, [], [])
    return _Known(model, voice, prompts, wanted)


@dataclass(frozen=True)
class _Known:
    """The library's model, or why there is none, and its texts."""

    model: Any
    voice: float
    prompts: list[list[int]]
    wanted: list[list[int]]


def _compared(case: Case, effort: Effort, config: Any, known: _Known) -> Finding:
    """Our side, refusals included: they come first even where the library can't write a text."""
    try:
        target = _target(case, config, known.voice)
    except TargetError as error:
        return Finding(case, "refused", str(error))
    except Exception as error:
        return Finding(case, "unbuilt" if isinstance(known.model, str) else "broken", told(error))
    if isinstance(known.model, str):
        return Finding(case, "unbuilt", known.model)
    try:
        require(target, self_check(target))
        return _tallied(case, effort, target, known)
    except TargetError as error:
        return Finding(case, "self-check", str(error))
    except MedusaError as error:
        return Finding(case, "refused", str(error))
    except Exception as error:
        return Finding(case, "broken", told(error))


def _target(case: Case, config: Any, voice: float) -> Target:
    attention = choose_attention(case.attention, config)
    settings = TargetSettings(model=case.model_type, dtype="float32", device="cpu", runner=case.runner)
    try:
        model = random_model(config, attention, voice)
    except (ValueError, KeyError) as error:  # as loading does where an architecture turns out to have no other
        if case.attention == "sdpa":
            raise TargetError(f"{case.model_type} has no sdpa attention", "use --attention eager") from error
        if case.attention != "auto":
            raise
        model = random_model(config, "eager", voice)
    return make_target(model, None, settings)


def _tallied(case: Case, effort: Effort, target: Target, known: _Known) -> Finding:
    """Every run's texts against the library's."""
    compared = differed = ties = 0
    first = ""
    limit = target.context_limit or 10**9
    fitting = [row for row, prompt in enumerate(known.prompts) if len(prompt) < limit]
    prompts = [known.prompts[row] for row in fitting]
    wanted = [known.wanted[row] for row in fitting]
    texts = [prompt + text for prompt, text in zip(prompts, wanted, strict=True)]
    for drafter, shape, num_rows in effort.runs:
        parts = Parts(target, DRAFTERS[drafter](texts, SHAPES[shape]), Greedy())
        found = collect(parts, prompts, Limits(effort.num_new, context_limit=target.context_limit), max_rows=num_rows)
        for prompt, one, other in zip(prompts, found, wanted, strict=True):
            right = other[: min(effort.num_new, limit - len(prompt))]
            compared += len(right)
            parted = difference(one.token_ids, right, "float32", lambda ids, p=prompt: _logits(known.model, p + ids))
            if parted is not None:
                near = parted.verdict == "near-tie"
                ties += near
                differed += 0 if near else len(right) - parted.index
                first = (
                    first
                    or f"{parted.verdict} at token {parted.index} after {len(prompt)}, margin {parted.margin}, "
                    f"{drafter} {shape} {num_rows} rows"
                )
    outcome: Outcome = "differs" if differed else "tie" if ties else "equal"
    distinct = max((len(set(text)) for text in wanted), default=0)
    return Finding(case, outcome, first, compared, differed, ties, distinct)


@torch.inference_mode()
def _logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """The library's logits after these ids, one plain forward."""
    return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -1]


def told(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"

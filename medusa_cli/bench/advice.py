"""What a bench's figures advise: which part of a step takes the time, why guesses don't pay, and what to try.

Works on the document alone. Nothing is advised that the run had already.
"""

from medusa_cli.bench.document import ArmFigures, Category, Report
from medusa_cli.config.parts import MIXED, drafters

_NO_GUESS_RIGHT = 0.05
_GUESSING_IS_DEAR = 0.3
_MOST_LIES_OUTSIDE = 0.5
_NAMED = 3  # categories named in the sentence
_PARTS = {
    "prefill": "reading prompts",
    "draft": "guessing",
    "verify": "verifying",
    "accept": "accepting",
    "keep": "keeping the path",
    "other": "the rest (bookkeeping)",
}


def what_limits(ours: ArmFigures) -> list[str]:
    """The part with the largest share of the time, and guessing beside it; nothing where parts aren't timed."""
    shares = _shares(ours)
    if not shares:
        return []
    largest = max(shares, key=lambda part: shares[part])
    said = [f"{_PARTS[largest].capitalize()} takes {100 * shares[largest]:.0f} % of the time"]
    second = "draft" if largest != "draft" else "verify"
    if second in shares:
        said.append(f"{_PARTS[second]} {100 * shares[second]:.0f} %")
    return [", ".join(said) + "."]


def cause_and_cure(report: Report, even: float) -> list[str]:
    """Why the subject isn't faster, and what to try. `even`: what a step costs, in tokens of the other arm."""
    ours = report.arms[report.ours]
    drafts = ours.spec_decode_num_drafts
    if not drafts:
        return ["Cause: no guess was offered.", *_try(_more_guesses(report.ours))]
    if ours.spec_decode_accepted_tokens / drafts < _NO_GUESS_RIGHT:
        return ["Cause: almost no guess was right.", *_try(_better_guesses(report.ours))]
    shares = _shares(ours)
    if shares.get("draft", 0.0) > _GUESSING_IS_DEAR:
        return [
            f"Cause: guessing takes {100 * shares['draft']:.0f} % of the time.",
            *_try(_cheaper_guesses(report.ours)),
        ]
    outside = shares.get("prefill", 0.0) + shares.get("other", 0.0)
    if outside > _MOST_LIES_OUTSIDE:
        return [
            f"Cause: {100 * outside:.0f} % of the time goes to reading prompts and bookkeeping, which no guess "
            "shortens.",
            *_try(["longer replies (--max-new-tokens)"]),
        ]
    nodes = ours.spec_decode_draft_tokens / drafts
    guesses = "a guess" if round(nodes) == 1 else f"{nodes:.0f} guesses"
    brings = "more than it brings" if (ours.tokens_per_step or 0.0) < even else "about what it brings"
    said = [f"Cause: a step that checks {guesses} costs {even:.2f} plain tokens, {brings}."]
    if report.runner == "compiled":
        said.append("With runner compiled a plain step is cheap, so that guesses are dear beside it.")
    return [*said, *_try(_cheaper_steps(report, nodes))]


def slower_categories(report: Report) -> list[str]:
    """One sentence on the categories in which an arm writes faster than the subject; nothing where there are none."""
    ours = report.arms[report.ours].categories
    if len(ours) < 2:
        return []
    found = []
    for name in report.speedup:
        if "@" in name:  # the plain name stands for the faster of them
            continue
        theirs = report.arms[name].categories
        ratios = {category: _ratio(ours[category], theirs.get(category)) for category in ours}
        slow = sorted((ratio, category) for category, ratio in ratios.items() if ratio and round(ratio, 2) < 1)
        if slow:
            listed = ", ".join(f"{category} ({ratio:.2f}x)" for ratio, category in slow[:_NAMED])
            more = f" and {len(slow) - _NAMED} more" if len(slow) > _NAMED else ""
            found.append(f"than {name} in {listed}{more}")
    return ["Slower " + "; ".join(found) + "."] if found else []


def _with_heads(subject: str) -> bool:
    """Whether an arm's drafter asks heads; one that is no more known here does, as most."""
    part = drafters().get(subject)
    return part is None or part.heads is not None


def _gathers(subject: str) -> bool:
    """Whether an arm's drafter makes its tree anew at every step."""
    part = drafters().get(subject)
    return part is not None and part.gathers


def _more_guesses(subject: str) -> list[str]:
    if not _with_heads(subject):
        return [f"--drafter {MIXED}, which guesses with heads as well"]
    return ["--speculate on, and a tree with at least one node"]


def _better_guesses(subject: str) -> list[str]:
    if not _with_heads(subject):
        return [f"--drafter {MIXED}: copies alone help only where a text repeats itself"]
    return ["heads trained for this very model and this kind of prompt (medusa train-heads)"]


def _cheaper_guesses(subject: str) -> list[str]:
    if not _with_heads(subject):
        return ["a lower --tree-size"]
    return ["heads with a smaller draft vocabulary (medusa train-heads --draft-vocab)"]


def _cheaper_steps(report: Report, nodes: float) -> list[str]:
    """What makes a step cheaper, or makes it bring more, that this run didn't have."""
    cures = []
    if round(nodes) > 1:
        shape = "a lower --tree-size" if _gathers(report.ours) else "a smaller tree"
        cures.append(f"{shape} (medusa inspect-tree shows which pays)")
    if report.ours != MIXED:
        cures.append(f"--drafter {MIXED}, which weighs each node by what it costs")
    if report.device == "cpu":
        cures += _cheaper_on_cpu(report.runner, report.dtype)
    elif report.dtype == "float32":
        cures.append("--dtype bfloat16")
    return cures if not _with_heads(report.ours) else [*cures, "heads trained on more text"]


def _cheaper_on_cpu(runner: str, dtype: str) -> list[str]:
    """Layouts of the layers are for float32; without matrix units a tree in 16 bits is dear."""
    if dtype not in ("float32", "int8"):
        return ["--dtype float32, unless the processor multiplies 16-bit matrices itself"]
    if runner == "eager":
        return ["--runner packed"]
    if runner in ("packed", "blocks"):
        return ["--runner compiled, where every step is cheaper (built once, in minutes)"]
    return []


def _try(cures: list[str]) -> list[str]:
    """The cures as one sentence."""
    if not cures:
        return []
    listed = cures[0] if len(cures) == 1 else f"{'; '.join(cures[:-1])}; or {cures[-1]}"
    return [f"Try: {listed}."]


def _shares(ours: ArmFigures) -> dict[str, float]:
    """Each timed part's share of the whole time."""
    if not ours.duration:
        return {}
    return {
        part: seconds / ours.duration for part, seconds in ours.time_split.model_dump().items() if seconds is not None
    }


def _ratio(ours: Category, theirs: Category | None) -> float | None:
    """The subject's speed over the arm's in one category."""
    mine, other = ours.output_throughput, theirs.output_throughput if theirs else None
    return mine / other if mine and other else None

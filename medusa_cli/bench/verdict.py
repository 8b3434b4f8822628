"""What a bench's figures say, in words, and whether they pass the gates. Works on the document alone."""

from medusa_cli.bench.advice import cause_and_cure, slower_categories, what_limits
from medusa_cli.bench.compare import AS_STORED, LLAMA_CPP, Divergence, dtype_of
from medusa_cli.bench.document import Report

_SMALLER_WEIGHTS = (
    "Cause: llama.cpp reads the weights as the file stores them, most often in 4 to 8 bits, and our arms in 16 or 32.",
    "Try: --compare greedy,llama-cpp, which also shows what guessing brings.",
)


def baseline_of(report: Report) -> str | None:
    """The arm the verdict and --min-speedup look at: hf-greedy when it ran, else greedy, else the first compared."""
    speedup = report.speedup
    return next((name for name in ("hf-greedy", "greedy") if name in speedup), next(iter(speedup), None))


def verdict_in_words(report: Report) -> str:
    """Faster or slower and by how much, break-even, what limits it or why it isn't faster, categories, identity."""
    name = baseline_of(report)
    ratio = report.speedup.get(name) if name else None
    if name is None or ratio is None:
        return f"No verdict: {report.ours} was compared with no arm that wrote a token."
    low, high = report.speedup_spread[name] or (ratio, ratio)
    sentences = [_speed(report.ours, _label(report, name), ratio, low, high)]
    if name != "greedy" and report.speedup.get("greedy"):
        even = break_even(report, "greedy")
        sentences.append(
            f"Against our own loop without guesses (greedy): {report.speedup['greedy']:.2f}x"
            + (f", break-even there: {even:.2f} tokens a step." if even is not None else ".")
        )
    sentences.append(_in_steps(report))
    sentences += _why(report, name, pays=low > 1)
    sentences += slower_categories(report)
    sentences += [_identity(report), _llama_cpp(report)]
    return " ".join(sentence for sentence in sentences if sentence)


def failed_gates(report: Report, min_speedup: float | None, require_identical: bool) -> list[str]:
    """A sentence for each gate that isn't passed.

    min_speedup         the least speed-up over the baseline (see `baseline_of`)
    require_identical   no reply may differ but at a near tie; arms in another dtype than the subject's are
                        another model to the last digit, and aren't held to it
    """
    failed = []
    name = baseline_of(report)
    if min_speedup is not None:
        ratio = report.speedup.get(name) if name else None
        if ratio is None or ratio < min_speedup:
            measured = "not to be had" if ratio is None else f"{ratio:.3f}x"
            failed.append(
                f"speed-up of {report.ours} over {name} is {measured}; --min-speedup asks for {min_speedup:g}x"
            )
    if require_identical:
        for row in _mismatches(report):
            gap = "where one reply ends" if row.margin is None else f"with a gap of {row.margin:.4g}"
            failed.append(f"prompt {row.id}: {report.ours} and {row.arm} part at token {row.index}, {gap}")
    return failed


def _speed(subject: str, label: str, ratio: float, low: float, high: float) -> str:
    """The first sentence."""
    spread = f"({low:.2f} to {high:.2f})"
    if low <= 1 <= high:
        return f"No clear difference: {subject} is {ratio:.2f}x as fast as {label} {spread}."
    word = "Faster" if ratio > 1 else "Slower"
    return f"{word}: {subject} is {ratio:.2f}x as fast as {label} {spread}."


def _in_steps(report: Report) -> str:
    """How much of the time went into reading prompts, which guesses don't make quicker, and the ratio without it."""
    ours, greedy = report.arms[report.ours], report.arms.get("greedy")
    if greedy is None or not (ours.step_throughput and greedy.step_throughput and ours.duration):
        return ""
    share = (ours.time_split.prefill or 0.0) / ours.duration
    ratio = ours.step_throughput / greedy.step_throughput
    return f"Prompts were read in {100 * share:.0f} % of the time; in steps alone it is {ratio:.2f}x as fast as greedy."


def _label(report: Report, name: str) -> str:
    """The arm's name; for one that ran in several dtypes, which of them was the faster."""
    variants = [arm for arm in report.arms if arm.startswith(f"{name}@")]
    if not variants:
        return name
    best = max(variants, key=lambda arm: report.arms[arm].output_throughput or 0.0)
    return best if len(variants) == 1 else f"{best}, the faster of {len(variants)}"


def break_even(report: Report, name: str) -> float | None:
    """Tokens a step at which the subject and the arm are equally fast; None without steps.

    The tokens the arm would have written in the subject's time, less those of the prefills, over the steps taken:
    what one step of the subject costs, in plain steps.
    """
    ours, theirs = report.arms[report.ours], report.arms[name]
    if not ours.num_steps or ours.tokens_per_step is None or theirs.output_throughput is None:
        return None
    prefills = ours.total_output_tokens - ours.tokens_per_step * ours.num_steps
    return (ours.duration * theirs.output_throughput - prefills) / ours.num_steps


def _why(report: Report, name: str, pays: bool) -> list[str]:
    """Break-even; where speculation pays, what limits it, and where it doesn't, the cause and what to try."""
    even = break_even(report, name)
    if even is None:
        return ["Every reply ended with its first token: no step was taken."]
    ours = report.arms[report.ours]
    said = [
        f"A step brings {ours.tokens_per_step:.2f} tokens and costs as much as {even:.2f} tokens of {name} "
        f"(break-even: {even:.2f} tokens a step)."
    ]
    if pays:
        return [*said, *what_limits(ours)]
    return [*said, *(_SMALLER_WEIGHTS if name == LLAMA_CPP else cause_and_cure(report, even))]


def _identity(report: Report) -> str:
    """Whether the replies are the same."""
    held = [row for row in report.divergences if dtype_of(row.arm, report.dtype) != AS_STORED]
    wrong, near = len(_mismatches(report)), sum(row.verdict == "near-tie" for row in held)
    if wrong:
        return f"NOT IDENTICAL: {wrong} replies differ where the model was not near a tie."
    alike = {name: same for name, same in report.identical.items() if _same_dtype(report, name)}
    if alike and all(same.same == same.of for same in alike.values()):
        return "Every reply is the same, token by token."
    return f"Replies that differ part at near ties only ({near} of them)." if near else ""


def _llama_cpp(report: Report) -> str:
    """How llama.cpp did, which is held to no reply of ours."""
    ratio, same = report.speedup.get(LLAMA_CPP), report.identical.get(LLAMA_CPP)
    if ratio is None or same is None:
        return ""
    return (
        f"{LLAMA_CPP} takes the weights as the file stores them, in integers where it is quantised, not in "
        f"{report.dtype}: {report.ours} is {ratio:.2f}x as fast, and {same.same} of {same.of} replies "
        "are the same; none has to be."
    )


def _mismatches(report: Report) -> list[Divergence]:
    """Divergences that are the tool's fault."""
    return [row for row in report.divergences if row.verdict == "mismatch" and _same_dtype(report, row.arm)]


def _same_dtype(report: Report, arm: str) -> bool:
    """Whether the arm ran in the subject's dtype."""
    return dtype_of(arm, report.dtype) == report.dtype

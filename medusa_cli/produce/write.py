"""What the target writes: prompts for itself, its answers, and the hidden states that decided them.

Two files grow in the run folder: prompts.jsonl, and the store of answers. Running again goes on where they end.
"""

import hashlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from medusa_cli.data.conversations import Message
from medusa_cli.data.distill import Written, read_written, steered, write_prompts
from medusa_cli.data.tokens import prompt_ids
from medusa_cli.decode.room import check_room
from medusa_cli.decode.rows import Limits
from medusa_cli.errors import DataError
from medusa_cli.produce.crew import Manner, write_beside, write_here
from medusa_cli.recipe import Recipe
from medusa_cli.target.model import Target
from medusa_cli.train.store import HiddenStore, Sample

OnProgress = Callable[[str, int, int, int], None]
"""(stage, samples done, samples wanted, tokens written in this run)"""

SYNC_EVERY = 50
# Writing on after a stop starts the random numbers anew, at another place than before.
SEED_STRIDE = 1000


@dataclass(frozen=True)
class Gathered:
    """A store of samples, and what is to be known of it.

    by_target  the target wrote the tokens that are learnt, greedily
    answers    who wrote them and how: names and numbers for provenance.json
    counts     rows by what became of them
    notes      sentences for the user; `warnings` are those that even --quiet shows
    """

    store: Path
    by_target: bool
    answers: Mapping[str, Any]
    counts: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class Fitting:
    """The prompts that leave room for an answer, as ids by key, and a sentence on those that don't, if any."""

    ids: Mapping[str, list[int]]
    notes: Sequence[str]


def write_prompts_of_its_own(
    recipe: Recipe, target: Target, folder: Path, on_progress: OnProgress
) -> dict[str, list[Message]]:
    """`--dataset self`: what is asked, by key. Nothing already written is written again."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "prompts.jsonl"
    _write_prompts(recipe, target, file, on_progress)
    rows = sorted(read_written(file), key=lambda row: row["id"])[: recipe.data.num_samples]
    return {str(row["id"]): [Message("user", row["prompt"])] for row in rows}


def answer(
    recipe: Recipe, target: Target, asked: Mapping[str, Sequence[Message]], folder: Path, on_progress: OnProgress
) -> Gathered:
    """The target answers each prompt greedily, into folder/answers. Raises DataError when none can be answered."""
    prompts = fitting(recipe, target, asked)
    place = folder / "answers"
    with HiddenStore(place, hidden_size=target.hidden_size, fingerprint=target.fingerprint) as store:
        done = set(store.keys)
        missing = {key: ids for key, ids in prompts.ids.items() if key not in done}
        total, tokens = len(done) + len(missing), 0
        on_progress("answers", len(done), total, 0)
        with closing(write_answers(recipe, target, missing)) as samples:
            for count, sample in enumerate(samples, start=1):
                store.append(sample)
                if count % SYNC_EVERY == 0:
                    store.sync()
                tokens += len(sample.ids) - 1
                on_progress("answers", len(done) + count, total, tokens)
        store.sync()
    account = {
        "by": "the model",
        "temperature": 0.0,
        "max_tokens": answer_tokens(recipe, target),
        "template": template_of(target.tokenizer),
    }
    return Gathered(place, by_target=True, answers=account, notes=prompts.notes)


def fitting(recipe: Recipe, target: Target, asked: Mapping[str, Sequence[Message]]) -> Fitting:
    """The prompts that can be answered. Raises DataError when none can, TargetError for ids without embedding."""
    chat = bool(target.tokenizer.chat_template)
    longest = longest_text(recipe, target) - answer_tokens(recipe, target)
    prompts = {
        key: ids
        for key, messages in asked.items()
        if messages[-1].content.strip() and len(ids := prompt_ids(target.tokenizer, messages, chat=chat)) <= longest
    }
    if not prompts:
        raise DataError(
            f"none of {len(asked)} prompts can be answered: all are empty, or longer than {longest} tokens",
            "give other prompts, or raise --max-seq-length",
        )
    target.check_ids(prompts.values())
    left_out = len(asked) - len(prompts)
    note = f"{left_out} of {len(asked)} prompts are left out: empty, or longer than {longest} tokens"
    return Fitting(prompts, [note] if left_out else [])


def template_of(tokenizer: Any) -> str | None:
    """A short hash of the chat template, None without one: with it the text around answers can be told apart."""
    if not tokenizer.chat_template:
        return None
    return hashlib.sha256(tokenizer.get_chat_template().encode()).hexdigest()[:16]


def write_answers(
    recipe: Recipe, target: Target, prompts: Mapping[str, Sequence[int]]
) -> Generator[Sample, None, None]:
    """The target's greedy text after each prompt (key -> ids) with its hidden states, in the order they finish.

    A sample is the last prompt token and the answer: the hidden state at place t decided the token at t + 1.
    """
    manner = Manner(
        max_new_tokens=answer_tokens(recipe, target),
        max_tokens=longest_text(recipe, target),
        rows=recipe.data.rows,
        want_hidden=True,
    )
    keys = list(prompts)
    with closing(_write(recipe, target, [prompts[key] for key in keys], manner)) as texts:
        for written in texts:
            key, answer_ids = keys[written.index], written.token_ids
            ids = [prompts[key][-1], *answer_ids]
            yield Sample(key, ids, written.hidden_TH, [False, *[True] * len(answer_ids)])


def longest_text(recipe: Recipe, target: Target) -> int:
    """Tokens a prompt and its answer may have together."""
    return min(recipe.data.max_seq_length, target.context_limit or recipe.data.max_seq_length)


def answer_tokens(recipe: Recipe, target: Target) -> int:
    """Tokens of an answer at most: at least half of the longest text is left to prompts."""
    return min(recipe.data.max_answer_tokens, longest_text(recipe, target) // 2)


def _write_prompts(recipe: Recipe, target: Target, file: Path, on_progress: OnProgress) -> None:
    wanted = steered(recipe.data, target.tokenizer, recipe.seed)
    done = len(read_written(file))
    manner = Manner(
        max_new_tokens=recipe.data.max_prompt_tokens,
        max_tokens=target.context_limit,
        rows=recipe.data.rows,
        temperature=recipe.data.prompt_temperature,
        top_p=recipe.data.prompt_top_p,
        seed=recipe.seed + SEED_STRIDE * done,
    )

    def write(prompts: Sequence[Sequence[int]]) -> Iterator[Written]:
        return _write(recipe, target, prompts, manner)

    on_progress("prompts", done, len(wanted), 0)
    tokens = 0
    with closing(write_prompts(wanted, file, target.tokenizer, write)) as counts:
        for count, new in enumerate(counts, start=1):
            tokens += new
            on_progress("prompts", done + count, len(wanted), tokens)


def _write(
    recipe: Recipe, target: Target, prompts: Sequence[Sequence[int]], manner: Manner
) -> Generator[Written, None, None]:
    """By this process, or by several when the recipe says so and there is enough to write.

    Short prompts first: those that are read together are then of one length, and little padding is read.
    """
    target.check_ids(prompts)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    queue = [prompts[index] for index in order]
    workers = min(recipe.data.workers, -(-len(prompts) // manner.rows))
    limits = Limits(manner.max_new_tokens, context_limit=manner.max_tokens)
    check_room(target, prompts, limits, manner.rows * workers, 0, "write fewer at once: data.rows and data.workers")
    texts = write_beside(recipe, queue, manner, workers) if workers > 1 else write_here(target, queue, manner)
    with closing(texts):
        for written in texts:
            yield replace(written, index=order[written.index])

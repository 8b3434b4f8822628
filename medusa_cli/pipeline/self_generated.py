"""What the target writes: prompts for itself, its answers, and the hidden states that decided them.

Two files grow in the run folder: prompts.jsonl, and the store of answers. Running again goes on where they end.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from medusa_cli.data.conversations import Message
from medusa_cli.data.distill import Steered, Written, read_prompts_of_its_own, steered, write_prompts
from medusa_cli.decode.chat import ids_of
from medusa_cli.decode.memory import check_room
from medusa_cli.decode.rows import Limits
from medusa_cli.errors import DataError
from medusa_cli.pipeline.data_context import Gathered, Stage, open_store
from medusa_cli.pipeline.fixed_runner import laid_out_like
from medusa_cli.pipeline.generation_workers import Job, Manner, write_beside, write_here
from medusa_cli.train.store import SYNC_EVERY, Sample


@dataclass(frozen=True)
class Fitting:
    """The prompts that leave room for an answer, as ids by key, and a sentence on those that don't, if any."""

    ids: Mapping[str, list[int]]
    notes: Sequence[str]


def write_prompts_of_its_own(stage: Stage) -> dict[str, list[Message]]:
    """`--dataset self`: what is asked, by key. Nothing already written is written again."""
    stage.folder.mkdir(parents=True, exist_ok=True)
    file = stage.folder / "prompts.jsonl"
    _write_prompts(stage, file)
    rows = sorted(read_prompts_of_its_own(file), key=lambda row: row["id"])[: stage.recipe.data.num_samples]
    return {str(row["id"]): [Message("user", row["prompt"])] for row in rows}


def answer(stage: Stage, asked: Mapping[str, Sequence[Message]]) -> Gathered:
    """The target answers each prompt greedily, into answers/. Raises DataError when none can be answered."""
    prompts, place = fitting(stage, asked), stage.folder / "answers"
    keep_answers(stage, prompts.ids, place, "answers")
    account = {
        "by": "the model",
        "temperature": 0.0,
        "max_tokens": stage.answer_tokens,
        "template": stage.template,
    }
    return Gathered(place, by_target=True, answers=account, notes=prompts.notes, prompts=prompts.ids)


def keep_answers(stage: Stage, prompts: Mapping[str, Sequence[int]], place: Path, what: str) -> None:
    """The target's answers to these prompts, in the store in this folder; those that are there are not written again.

    what   what they are called where progress is shown
    """
    with open_store(stage, place) as store:
        done = set(store.keys)
        missing = {key: ids for key, ids in prompts.items() if key not in done}
        total, tokens = len(done) + len(missing), 0
        stage.on_progress(what, len(done), total, 0)
        with closing(write_answers(stage, missing)) as samples:
            for count, sample in enumerate(samples, start=1):
                store.append(sample)
                if count % SYNC_EVERY == 0:
                    store.sync()
                tokens += sum(sample.supervised)
                stage.on_progress(what, len(done) + count, total, tokens)
        store.sync()


def fitting(stage: Stage, asked: Mapping[str, Sequence[Message]]) -> Fitting:
    """The prompts that can be answered. Raises DataError when none can, TargetError for ids without embedding."""
    longest = stage.longest_text - stage.answer_tokens
    prompts = {
        key: ids
        for key, messages in asked.items()
        if messages[-1].content.strip() and len(ids := ids_of(stage.target, messages)) <= longest
    }
    if not prompts:
        raise DataError(
            f"none of {len(asked)} prompts can be answered: all are empty, or longer than {longest} tokens",
            "give other prompts, or raise --max-seq-length",
        )
    stage.target.check_ids(prompts.values())
    left_out = len(asked) - len(prompts)
    note = f"{left_out} of {len(asked)} prompts are left out: empty, or longer than {longest} tokens"
    return Fitting(prompts, [note] if left_out else [])


def write_answers(stage: Stage, prompts: Mapping[str, Sequence[int]]) -> Generator[Sample, None, None]:
    """The target's greedy text after each prompt (key -> ids) with its hidden states, in the order they finish.

    A sample is the last prompt token and the answer: the hidden state at place t decided the token at t + 1. For heads
    that look at inner layers it is the whole text, with final states from the prompt's last token on.
    """
    inner = stage.inner
    manner = Manner(
        max_new_tokens=stage.answer_tokens,
        max_tokens=stage.longest_text,
        rows=stage.recipe.data.rows,
        want_hidden=True,
        taps=inner.taps if inner is not None and inner.width else (),
    )
    keys = list(prompts)
    jobs = [Job(number, prompts[key]) for number, key in enumerate(keys)]
    with closing(_write(stage, jobs, manner)) as texts:
        for written in texts:
            key, answer_ids, hidden_TH = keys[written.index], written.token_ids, written.hidden_TH
            before = list(prompts[key]) if inner is not None else [prompts[key][-1]]
            unseen_TH = hidden_TH.new_zeros(len(before) - 1, hidden_TH.shape[1])
            supervised = [*[False] * len(before), *[True] * len(answer_ids)]
            states_TH = torch.cat([unseen_TH, hidden_TH])
            yield Sample(key, [*before, *answer_ids], states_TH, supervised, written.taps_TX)


def _write_prompts(stage: Stage, file: Path) -> None:
    recipe, target = stage.recipe, stage.target
    wanted = steered(recipe.data, target.tokenizer, recipe.seed)
    done = len(read_prompts_of_its_own(file))
    manner = Manner(
        max_new_tokens=recipe.data.max_prompt_tokens,
        max_tokens=target.context_limit,
        rows=recipe.data.rows,
        temperature=recipe.data.prompt_temperature,
        top_p=recipe.data.prompt_top_p,
        seed=recipe.seed,
    )

    def write(missing: Sequence[Steered]) -> Iterator[Written]:
        # a prompt is drawn by its id: which were written before a stop, and by whom, changes none of the others
        return _write(stage, [Job(one.id, one.ids) for one in missing], manner)

    stage.on_progress("prompts", done, len(wanted), 0)
    tokens = 0
    with closing(write_prompts(wanted, file, target.tokenizer, write, target.stop_ids)) as counts:
        for count, new in enumerate(counts, start=1):
            tokens += new
            stage.on_progress("prompts", done + count, len(wanted), tokens)


def _write(stage: Stage, jobs: Sequence[Job], manner: Manner) -> Generator[Written, None, None]:
    """By this process, or by several when the recipe says so and there is enough to write.

    Short prompts first: those that are read together are then of one length, and little padding is read.
    """
    recipe, target = stage.recipe, stage.target
    prompts = [job.ids for job in jobs]
    target.check_ids(prompts)
    order = sorted(range(len(jobs)), key=lambda index: len(prompts[index]))
    queue = [jobs[index] for index in order]
    workers = min(recipe.data.workers, -(-len(jobs) // manner.rows))
    limits = Limits(manner.max_new_tokens, context_limit=manner.max_tokens)
    check_room(target, prompts, limits, manner.rows * workers, 0, "write fewer at once: data.rows and data.workers")
    texts = (
        write_beside(laid_out_like(recipe, target), queue, manner, workers)
        if workers > 1
        else write_here(target, queue, manner)
    )
    with closing(texts):
        for written in texts:
            yield replace(written, index=order[written.index])

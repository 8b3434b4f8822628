"""The data stage: prompts the target wrote for itself, its answers, and the hidden states that decided them.

Two files grow in the run folder: prompts.jsonl, and the store of answers. Running again goes on where they end.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from medusa_cli.data.conversations import Message
from medusa_cli.data.distill import Written, read_rows, steered, write_prompts
from medusa_cli.data.tokens import prompt_ids
from medusa_cli.errors import DataError
from medusa_cli.produce.crew import Manner, write_beside, write_here
from medusa_cli.recipe import Recipe
from medusa_cli.target.model import Target
from medusa_cli.train.store import HiddenStore, Sample

OnProgress = Callable[[str, int, int, int], None]
"""(stage, samples done, samples wanted, tokens written in this run)"""

SYNC_EVERY = 50


def write_self(recipe: Recipe, target: Target, folder: Path, on_progress: OnProgress) -> Path:
    """`--dataset self`: both stages; returns the store's folder. Nothing already written is written again."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "prompts.jsonl"
    _write_prompts(recipe, target, file, on_progress)
    rows = sorted(read_rows(file), key=lambda row: row["id"])[: recipe.data.num_samples]
    texts = {str(row["id"]): row["prompt"] for row in rows if row["prompt"].strip()}
    return answer(recipe, target, texts, folder / "answers", on_progress)


def answer(recipe: Recipe, target: Target, texts: dict[str, str], folder: Path, on_progress: OnProgress) -> Path:
    """The target answers each text greedily; key -> text. Raises DataError when there is nothing to answer."""
    chat = bool(getattr(target.tokenizer, "chat_template", None))
    longest = recipe.data.max_seq_length - recipe.data.max_answer_tokens
    with HiddenStore(folder, hidden_size=target.hidden_size, fingerprint=target.fingerprint) as store:
        done = set(store.keys)
        missing = [(key, _ids(target.tokenizer, text, chat)) for key, text in texts.items() if key not in done]
        jobs = [(key, ids) for key, ids in missing if 0 < len(ids) <= longest]
        if not jobs and not done:
            raise DataError(
                f"none of {len(texts)} prompts can be answered", "raise data.max_seq_length, or give more prompts"
            )
        manner = _manner(recipe, recipe.data.max_answer_tokens, temperature=0.0, want_hidden=True)
        total, tokens = len(done) + len(jobs), 0
        on_progress("answers", len(done), total, 0)
        for count, written in enumerate(_write(recipe, target, [ids for _, ids in jobs], manner), start=1):
            key, ids = jobs[written.index]
            store.append(_sample(key, ids, written))
            tokens += len(written.token_ids)
            if count % SYNC_EVERY == 0:
                store.sync()
            on_progress("answers", len(done) + count, total, tokens)
    return folder


def _write_prompts(recipe: Recipe, target: Target, file: Path, on_progress: OnProgress) -> None:
    wanted = steered(recipe.data, target.tokenizer, recipe.seed)
    done = len(read_rows(file))
    manner = _manner(recipe, recipe.data.max_prompt_tokens, recipe.data.prompt_temperature, want_hidden=False)

    def write(prompts: Sequence[Sequence[int]]) -> Iterator[Written]:
        return _write(recipe, target, prompts, manner)

    on_progress("prompts", done, len(wanted), 0)
    tokens = 0
    for count, new in enumerate(write_prompts(wanted, file, target.tokenizer, write), start=1):
        tokens += new
        on_progress("prompts", done + count, len(wanted), tokens)


def _write(recipe: Recipe, target: Target, prompts: Sequence[Sequence[int]], manner: Manner) -> Iterator[Written]:
    """By this process, or by several when the recipe says so and there is enough to write."""
    workers = min(recipe.data.workers, -(-len(prompts) // manner.rows))
    if workers > 1:
        return write_beside(recipe, prompts, manner, workers)
    return write_here(target, prompts, manner)


def _manner(recipe: Recipe, max_new_tokens: int, temperature: float, *, want_hidden: bool) -> Manner:
    data = recipe.data
    return Manner(max_new_tokens, temperature, data.prompt_top_p, data.rows, recipe.seed, want_hidden)


def _ids(tokenizer: Any, text: str, chat: bool) -> list[int]:
    return prompt_ids(tokenizer, [Message("user", text)], chat=chat)


def _sample(key: str, ids: Sequence[int], written: Written) -> Sample:
    """The last prompt token and the answer: the hidden state at place t decided the token at t + 1."""
    answer_ids = written.token_ids
    return Sample(key, [ids[-1], *answer_ids], written.hidden_TH, [False, *[True] * len(answer_ids)])

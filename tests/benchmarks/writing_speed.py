"""How fast the target writes: the data stage's writer against transformers' own batched generate, in one run.

`python -m tests.benchmarks.writing_speed` (make bench-writing). Both write greedy answers to the same prompts, in the
same process with the same threads, on the same stop ids and budget. Parts of the prompts alternate between the two, so
that a busy moment of the machine hits both. Tokens after a row's end are not counted.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import medusa_cli
from medusa_cli.config.recipe import TargetSettings
from medusa_cli.data.prompts import read_prompts
from medusa_cli.data.tokens import prompt_ids
from medusa_cli.model.loading.load import load_target, load_unchecked
from medusa_cli.model.target import Target
from medusa_cli.pipeline.generation_workers import Job, Manner, write_here

PROMPTS = Path(medusa_cli.__file__).parent / "bench" / "prompts" / "default.jsonl"


@dataclass(frozen=True)
class Wrote:
    """What one part took: the ids of every answer, up to its end, and the seconds."""

    answers: list[list[int]]
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.answers))


def ours(target: Target, prompts: Sequence[Sequence[int]], budget: int, rows: int) -> Wrote:
    """The data stage's writer: rows join and leave between steps."""
    manner = Manner(max_new_tokens=budget, max_tokens=target.context_limit, rows=rows, want_hidden=True)
    begun = time.perf_counter()
    answers: list[list[int]] = [[] for _ in prompts]
    for written in write_here(target, [Job(number, ids) for number, ids in enumerate(prompts)], manner):
        answers[written.index] = written.token_ids
    return Wrote(answers, time.perf_counter() - begun)


def theirs(model: Any, stop_ids: frozenset[int], prompts: Sequence[Sequence[int]], budget: int, rows: int) -> Wrote:
    """transformers: `rows` prompts at a time, padded on the left, each batch as long as its longest answer."""
    begun = time.perf_counter()
    answers: list[list[int]] = []
    stops = sorted(stop_ids)
    for start in range(0, len(prompts), rows):
        batch = prompts[start : start + rows]
        longest = max(map(len, batch))
        ids_BT = torch.tensor([[stops[0]] * (longest - len(ids)) + list(ids) for ids in batch])
        mask_BT = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in batch])
        with torch.inference_mode():
            out_BT = model.generate(
                ids_BT,
                attention_mask=mask_BT,
                do_sample=False,
                max_new_tokens=budget,
                eos_token_id=stops,
                pad_token_id=stops[0],
            )
        answers += [_to_the_end(row, stop_ids) for row in out_BT[:, longest:].tolist()]
    return Wrote(answers, time.perf_counter() - begun)


def _to_the_end(ids: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
    """The ids up to the first stop id, which belongs to the answer."""
    end = next((place + 1 for place, token in enumerate(ids) if token in stop_ids), len(ids))
    return list(ids[:end])


def main() -> None:
    """Print one JSON document: tokens a second of both, their ratio, its spread, and how many answers are equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=TargetSettings().model)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--parts", type=int, default=3, help="pieces the prompts are cut into; both write each")
    parser.add_argument("--copies", type=int, default=4, help="times each prompt is asked")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    asked = parser.parse_args()
    settings = TargetSettings(model=asked.model, dtype="float32")
    target = load_target(settings)
    stock = load_unchecked(settings.model_copy(update={"runner": "eager", "attention": "sdpa"})).model
    prompts = [prompt_ids(target.tokenizer, one.messages, chat=True) for one in read_prompts(asked.prompts)]
    prompts = prompts * asked.copies
    pairs = []
    for part in range(asked.parts):
        piece = prompts[part :: asked.parts]
        mine = ours(target, piece, asked.max_new_tokens, asked.rows)
        stocks = theirs(stock, target.stop_ids, piece, asked.max_new_tokens, asked.rows)
        pairs.append((mine, stocks))
    ratios = [(mine.tokens / mine.seconds) / (stocks.tokens / stocks.seconds) for mine, stocks in pairs]
    same = sum(a == b for mine, stocks in pairs for a, b in zip(mine.answers, stocks.answers, strict=True))
    document = {
        "rows": asked.rows,
        "threads": torch.get_num_threads(),
        "answers": len(prompts),
        "tokens": sum(mine.tokens for mine, _ in pairs),
        "ours_tokens_per_second": sum(m.tokens for m, _ in pairs) / sum(m.seconds for m, _ in pairs),
        "transformers_tokens_per_second": sum(s.tokens for _, s in pairs) / sum(s.seconds for _, s in pairs),
        "ratio": statistics.median(ratios),
        "ratio_spread": [min(ratios), max(ratios)],
        "same_answers": same,
    }
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()

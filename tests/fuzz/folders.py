"""Folders that grow: of a bench, and of a training run."""

import json
from pathlib import Path

import torch

from medusa_cli.bench.prompt_set import BenchPrompt
from medusa_cli.bench.results import columns, read_result
from medusa_cli.bench.resume import KeptTrials
from medusa_cli.config.loading import load_recipe
from medusa_cli.data.distill import read_prompts_of_its_own
from medusa_cli.formats.native import NativeFormat
from medusa_cli.pipeline.run_folder import open_folder
from medusa_cli.train.checkpoint import TrainLog, TrainState
from medusa_cli.train.corpus import Corpus
from medusa_cli.train.loop import make_optimizer
from medusa_cli.train.store import HiddenStore, read_store
from tests.fuzz.kind import Kind, run
from tests.fuzz.models import make_folder
from tests.fuzz.texts import PROMPTS, make_data

BENCH = ("bench", "-m", "model", "--drafter", "ngram", "--compare", "greedy", "--prompts", "prompts.jsonl", "-n", 4,
         "--num-warmups", 0, "--dtype", "float32", "--runner", "eager", "--allow-random-prompts", "--min-speedup", 0,
         "-o", "bench", "-q")  # fmt: skip


def _bench(folder: Path) -> None:
    make_data(folder)
    run(*BENCH)


def _read_bench(folder: Path, victim: str) -> None:
    place = folder / "bench"
    if victim.endswith("trials.jsonl"):
        prompts = [BenchPrompt(row["id"], row["category"], (1, 2)) for row in PROMPTS]
        KeptTrials(place, prompts, ["ngram", "greedy"])
        return
    run(*BENCH)
    for column in columns([(place, read_result(place))]):
        for kind in column.kinds:
            _ = column.speedup(kind), column.spread(kind), column.identical(column.fastest(kind))


RECIPE = """
target: {model: model, dtype: float32, runner: eager}
heads: {num_heads: 3, draft_vocab: 200}
data: {num_samples: 6, max_seq_length: 120, max_prompt_tokens: 12, max_answer_tokens: 40, rows: 4, held_out: 0.25}
train: {epochs: 50, max_steps: 4, save_steps: 2, batch_size: 64, loss_chunk: 64}
tree: {size: 4, max_size: 7}
"""
TRAIN = ("train-heads", "-c", "recipe.yaml", "-o", "run", "-q")
STORE = "run/written/answers"


def _run(folder: Path) -> None:
    make_folder(folder / "model")
    (folder / "recipe.yaml").write_text(RECIPE)
    run(*TRAIN)
    last = torch.load(folder / "run/checkpoints/step-00000004.pt", weights_only=True)
    facts = {"order": last["order"], **read_store(folder / STORE)}
    (folder / "facts.json").write_text(json.dumps(facts))


def _read_run(folder: Path, victim: str) -> None:
    """What going on reads before the model writes or learns, and what is shown at the end."""

    facts = json.loads((folder / "facts.json").read_text())
    recipe = load_recipe(folder / "recipe.yaml", ["output_dir=run"])
    opened = open_folder(recipe, resume=True)
    _ = opened.target_settings
    with opened.to_itself():
        opened.claim(facts["fingerprint"], "eager")
        read_prompts_of_its_own(folder / "run/written/prompts.jsonl")
        size, fingerprint = facts["hidden_size"], facts["fingerprint"]
        HiddenStore(folder / STORE, hidden_size=size, fingerprint=fingerprint, longest=120).close()
        corpus = Corpus.open(folder / STORE)
        corpus.split(0.25, seed=0, order=corpus.by_key() if opened.by_keys else None)
        heads = NativeFormat().read(folder / "run").float()
        state = TrainState(heads, make_optimizer(heads, recipe.train), facts["order"])
        step = opened.checkpoints(fingerprint).restore(state)
        TrainLog(folder / "run").rewind(step)


BENCH_FOLDER = Kind(
    _bench,
    {"bench/bench.json": "json", "bench/run.json": "json", "bench/trials.jsonl": "jsonl"},
    _read_bench,
    lambda *_: list(BENCH),
)
RUN_FOLDER = Kind(
    _run,
    {
        "run/run.json": "json",
        "run/train.jsonl": "jsonl",
        "run/checkpoints/step-00000004.pt": "binary",
        "run/written/prompts.jsonl": "jsonl",
        f"{STORE}/store.json": "json",
        f"{STORE}/samples.jsonl": "jsonl",
        f"{STORE}/ids.i32": "binary",
    },
    _read_run,
    lambda *_: [*TRAIN, "--resume-from-checkpoint"],
)

"""The kinds of files that a user can hand in: a valid example of each, and the reader that a command would call."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from medusa_cli.atomic import write_atomically
from medusa_cli.errors import MedusaError
from tests.cli.harness import make_model, run_here

QUICK = ("--dtype", "float32", "--runner", "eager", "-n", 3, "-q")
PROMPT = "Hi"


class Bug(Exception):
    """The program called itself wrong, or ended as no command may."""


@dataclass(frozen=True)
class Kind:
    """One kind of file.

    make      lays out a folder in which all is well; all is called in the folder, which is then `.`
    victims   files of it that are damaged, with how they are built
    read      what a command does with the folder; raises MedusaError where it refuses it, anything else is a bug
    command   that command, for a sample
    mend      afterwards, in some of the cases: checksums that go with what was damaged, so that readers go on
    """

    make: Callable[[Path], object]
    victims: Mapping[str, str]
    read: Callable[[Path, str], object]
    command: Callable[[Path, str], list[object]]
    mend: Callable[[Path, str], object] = lambda folder, victim: None


def run(*args: object) -> None:
    """The command in this process. Raises MedusaError where it refuses, and Bug unless it ends as a command may."""
    done = run_here(*args)
    said = " ".join(done.err.split())
    if done.code not in (0, 1, 2, 3) or "this is a bug" in said or "Traceback" in said:
        raise Bug(f"exit {done.code}: {said[-300:]}")
    if done.code == 1:
        if "error: " not in said or " hint: " not in said:
            raise Bug(f"exit 1 without a word: {said[-300:]}")
        raise MedusaError(*said.split("error: ", 1)[1].split(" hint: ", 1))


# --- models ---


def generate(folder: Path, *more: object) -> list[object]:
    return ["generate", PROMPT, "-m", folder, *QUICK, *more]


def of_a_model(victims: Mapping[str, str]) -> Kind:
    """A file of a model's folder."""
    return Kind(
        make=_model,
        victims=victims,
        read=lambda folder, _: run(*generate(folder)),
        command=lambda folder, _: generate(folder),
    )


GENERATION = {
    "eos_token_id": [1, 290], "pad_token_id": 2, "do_sample": True, "temperature": 0.9, "top_p": 0.9, "top_k": 50,
    "repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "bad_words_ids": [[280], [281, 3]], "suppress_tokens": [7],
    "begin_suppress_tokens": [8], "sequence_bias": [[[9], -1.0]], "min_length": 1, "max_length": 90,
    "exponential_decay_length_penalty": [50, 1.1], "forced_bos_token_id": None, "transformers_version": "5.24.0",
}  # fmt: skip


def _model(folder: Path) -> None:
    make_model(folder, layers=1)
    # settings that change nothing here, so that there is something to damage
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))


def _gguf(folder: Path) -> None:
    from tests.tiny_folders import save_gguf

    folder.mkdir(parents=True, exist_ok=True)
    save_gguf(folder / "model.gguf")


def _of_a_gguf(folder: Path, _: str) -> list[object]:
    return ["generate", "w1 1", "-m", folder / "model.gguf", *QUICK]


# --- heads and adapters ---


def _heads(folder: Path) -> None:
    from medusa_cli.formats.native import write_heads
    from medusa_cli.trees.files import write_tree
    from medusa_cli.trees.tree import TokenTree
    from tests.tiny_heads import some_heads

    folder.mkdir(parents=True, exist_ok=True)
    write_heads(some_heads(sees_root=True), folder)
    write_tree(folder / "tree.json", TokenTree.chain(3), {"expected_tokens": 1.5, "dynamic": "dynamic:4:0.1"})
    rates = [[0.4, 0.1, 0.05], [0.3, 0.1, 0.02], [0.2, 0.1, 0.01]]
    accuracy = {"plain": rates, "conditional": rates, "positions": 9, "source": "held-out"}
    write_atomically(folder / "accuracy.json", json.dumps(accuracy))
    write_atomically(folder / "provenance.json", json.dumps({"step_cost": {"1": 0.02, "4": 0.03, "8": 0.04}}))


def _seal(folder: Path, victim: str) -> None:
    """heads.json names the checksum of the numbers that are there."""
    if not victim.endswith(".safetensors"):
        return
    content = (folder / victim).read_bytes()
    described = json.loads((folder / "heads.json").read_text())
    described |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "heads.json").write_text(json.dumps(described))


def _read_heads(folder: Path, _: str) -> None:
    from medusa_cli.assemble import DrafterChoice, adapter_for, check_choice
    from medusa_cli.formats.native import read_heads
    from medusa_cli.trees.files import read_measured
    from tests.tiny_heads import FakeTarget

    choice = DrafterChoice("medusa", str(folder))
    check_choice(choice, "x")
    adapter_for(choice, "x")
    read_heads(folder, FakeTarget())
    read_measured(folder)


def _inspect(folder: Path, _: str) -> list[object]:
    return ["inspect-tree", "--heads", folder, "-m", folder]


_ADAPTER = ("adapter/adapter_config.json", "adapter/adapter_model.safetensors")


def _adapter(folder: Path) -> None:
    """A model, an adapter over it, and its description as heads hold it."""
    from medusa_cli.recipe import LoraSettings
    from medusa_cli.target.adapter import LearningAdapter

    _model(folder / "model")
    learning = LearningAdapter(_plain_model(folder), LoraSettings(rank=2), seed=1)
    with torch.no_grad():
        for parameter in learning.parameters.values():
            parameter.add_(0.01)
    learning.save(folder / "adapter")


def _plain_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)


def _read_adapter(folder: Path, _: str) -> None:
    """Found, taken for the right one, and merged."""
    from medusa_cli.target.adapter import adapter_fingerprint, merge, stored_adapter
    from medusa_cli.target.load import fingerprint_of

    model = _plain_model(folder)
    own, found = fingerprint_of(model), adapter_fingerprint(folder / "adapter")
    stored = stored_adapter(folder / "adapter", fingerprint=found, target_fingerprint=f"{own}+{found}", owner="x")
    merge(model, stored, own)


def _heads_of_an_adapter(folder: Path, _: str) -> list[object]:
    return generate(folder / "model", "--heads", folder / "adapter")


# --- trees, recipes, prompts ---

TREES = {
    "tree.json": {"paths": [[0], [0, 0], [1], [1, 0], [0, 0, 0]], "expected_tokens": 1.5, "dynamic": "dynamic:9:0.05"},
    "bare.json": [[0], [0, 0], [1]],
}
CHOICES = "first = [[0], [0, 0], [1]]\nsecond = [(0,), (1,), (0, 1)]\n"


def _trees(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, tree in TREES.items():
        (folder / name).write_text(json.dumps(tree))
    (folder / "choices.py").write_text(CHOICES)
    (folder / "spec.txt").write_text("[[0], [0, 0], [1]]")


def _read_tree(folder: Path, victim: str) -> None:
    from medusa_cli.trees.files import parse_tree, read_shape, read_tree

    if victim == "spec.txt":
        parse_tree((folder / victim).read_bytes().decode("utf-8", "surrogateescape"))
    elif victim == "tree.json":
        read_shape(folder)
    else:
        read_tree(Path(f"{folder / victim}:first") if victim == "choices.py" else folder / victim)


def _recipe(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("demo", "medusa-2-llama-3.1-8b"):
        shutil.copy(Path(__file__).parents[2] / "recipes" / f"{name}.yaml", folder / f"{name}.yaml")


def _read_recipe(folder: Path, victim: str) -> None:
    from medusa_cli.recipe_text import load_recipe, resolved

    resolved(load_recipe(folder / victim))


ROWS: list[dict[str, Any]] = [
    {"id": "a", "messages": [{"role": "user", "content": "Hi?"}, {"role": "gpt", "content": "Yes.", "weight": 1}]},
    {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes.", "train": True}]},
    {"instruction": "Say it", "input": "It", "output": "It is."},
    {"prompt": "Why?", "response": "So."},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "A"}]}, {"role": "gpt", "content": "B"}]},
    {"text": "It is blue."},
]
PROMPTS = [{"id": f"p{number}", "category": "x", "turns": [f"What is {number}?"]} for number in range(4)]


def _data(folder: Path) -> None:
    _model(folder / "model")
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "chats.json").write_text(json.dumps(ROWS))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (folder / "prompts.txt").write_text("What is it?\nWhy is it blue?\n")


def _read_data(folder: Path, victim: str) -> None:
    from transformers import AutoTokenizer

    from medusa_cli.bench.prompt_set import read_questions
    from medusa_cli.data.conversations import Counts, read_conversations
    from medusa_cli.data.prompts import read_prompts
    from medusa_cli.data.tokens import prompt_ids, tokenize

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    if victim.startswith("prompts"):
        read_questions(folder / victim)
        for prompt in read_prompts(folder / victim):
            prompt_ids(tokenizer, prompt.messages, chat=True)
    else:
        counts = Counts()
        rows = read_conversations(str(folder / victim), split="train", counts=counts)
        list(tokenize(tokenizer, rows, max_length=200, counts=counts))
        counts.describe()


def _with_data(folder: Path, victim: str) -> list[object]:
    if victim.startswith("prompts"):
        return ["generate", "--prompt-file", folder / victim, "-m", folder / "model", *QUICK]
    return [
        "train-heads",
        "-m",
        folder / "model",
        "--dataset",
        folder / victim,
        "--preview-masks",
        "--dtype",
        "float32",
    ]


# --- folders that grow ---


BENCH = ("bench", "-m", "model", "--drafter", "ngram", "--compare", "greedy", "--prompts", "prompts.jsonl", "-n", 4,
         "--num-warmups", 0, "--dtype", "float32", "--runner", "eager", "--allow-random-prompts", "--min-speedup", 0,
         "-o", "bench", "-q")  # fmt: skip


def _bench(folder: Path) -> None:
    _data(folder)
    run(*BENCH)


def _read_bench(folder: Path, victim: str) -> None:
    from medusa_cli.bench.kept import KeptTrials
    from medusa_cli.bench.prompt_set import BenchPrompt
    from medusa_cli.bench.results import columns, read_result

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
    from medusa_cli.train.store import read_store

    _model(folder / "model")
    (folder / "recipe.yaml").write_text(RECIPE)
    run(*TRAIN)
    last = torch.load(folder / "run/checkpoints/step-00000004.pt", weights_only=True)
    facts = {"order": last["order"], **read_store(folder / STORE)}
    (folder / "facts.json").write_text(json.dumps(facts))


def _read_run(folder: Path, victim: str) -> None:
    """What going on reads before the model writes or learns, and what is shown at the end."""
    from medusa_cli.data.distill import read_prompts_of_its_own
    from medusa_cli.formats.native import NativeFormat
    from medusa_cli.produce.folder import open_folder
    from medusa_cli.recipe_text import load_recipe
    from medusa_cli.train.checkpoint import TrainLog, TrainState
    from medusa_cli.train.corpus import Corpus
    from medusa_cli.train.loop import make_optimizer
    from medusa_cli.train.store import HiddenStore

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


KINDS: dict[str, Kind] = {
    "config": of_a_model({"config.json": "json"}),
    "generation_config": of_a_model({"generation_config.json": "json"}),
    "tokenizer_config": of_a_model({"tokenizer_config.json": "json", "chat_template.jinja": "text"}),
    "tokenizer": of_a_model({"tokenizer.json": "json"}),
    "weights": of_a_model({"model.safetensors": "safetensors"}),
    "gguf": Kind(_gguf, {"model.gguf": "binary"}, lambda folder, _: run(*_of_a_gguf(folder, "")), _of_a_gguf),
    "heads_weights": Kind(_heads, {"heads.safetensors": "safetensors"}, _read_heads, _inspect, _seal),
    "heads": Kind(
        _heads, {"heads.json": "json", "accuracy.json": "json", "provenance.json": "json"}, _read_heads, _inspect
    ),
    "adapter": Kind(
        _adapter, dict(zip(_ADAPTER, ("json", "safetensors"), strict=True)), _read_adapter, _heads_of_an_adapter
    ),
    "tree": Kind(
        _trees,
        {"tree.json": "json", "bare.json": "json", "choices.py": "text", "spec.txt": "text"},
        _read_tree,
        lambda folder, victim: ["inspect-tree", "--tree", folder / victim, "--heads", folder],
    ),
    "recipe": Kind(
        _recipe,
        {"demo.yaml": "yaml", "medusa-2-llama-3.1-8b.yaml": "yaml"},
        _read_recipe,
        lambda folder, victim: ["train-heads", "-c", folder / victim, "--plan", "-o", folder / "run"],
    ),
    "data": Kind(
        _data,
        {"chats.jsonl": "jsonl", "chats.json": "json", "prompts.jsonl": "jsonl", "prompts.txt": "text"},
        _read_data,
        _with_data,
    ),
    "bench": Kind(
        _bench,
        {"bench/bench.json": "json", "bench/run.json": "json", "bench/trials.jsonl": "jsonl"},
        _read_bench,
        lambda *_: list(BENCH),
    ),
    "run": Kind(
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
    ),
}

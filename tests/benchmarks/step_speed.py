"""What a step of a model of a given shape costs here, by nodes and context: random weights, nothing to download.

`python -m tests.benchmarks.step_speed` (make bench-gpu). The model is made on the device from its config. Next to each
step's time stand two ratios: to a step over 1 node, and to reading weights and cache once at the bandwidth of a copy,
which no step can beat. `--shape tiny --device cpu` takes the same way in a moment.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, Field, ValidationError
from transformers import AutoModelForCausalLM, LlamaConfig

from medusa_cli.bench.origin import origin_here
from medusa_cli.bench.report import Table, markdown
from medusa_cli.bench.results import first_fault
from medusa_cli.config.recipe import TargetSettings
from medusa_cli.errors import FormatError, MedusaError, TargetError
from medusa_cli.inspect.contexts_measured import costs_by_context
from medusa_cli.kernels.packed import PackedLinear
from medusa_cli.model.clock import now
from medusa_cli.model.loading.load import choose_attention, choose_device, choose_dtype, make_target
from medusa_cli.model.target import Target
from medusa_cli.model.weights import step_bytes
from medusa_cli.util.files import write_atomically
from medusa_cli.util.plain_json import parse_json

PROGRAM = "python -m tests.benchmarks.step_speed"
NODES, CONTEXTS = (1, 32, 64), (128, 2048, 8192)
_POSITIONS = 16_384  # random weights have no context they were trained on
_MIB = 2**20
# hidden, inner, layers, query heads, key heads, vocabulary
SHAPES = {
    "llama-7b": (4096, 11_008, 32, 32, 32, 32_000),
    "llama-8b": (4096, 14_336, 32, 32, 8, 128_256),
    "tiny": (64, 128, 2, 4, 2, 256),
}
# of a copy; timed together where one takes less than a clock can tell
_COPIED_BYTES = {"cpu": 2**26, "cuda": 2**30}
_COPIES, _ROUNDS = 4, 7
CHEAP = 1.5  # plain steps that a step over the most nodes may cost


@dataclass(frozen=True)
class Asked:
    """What is measured; nodes and contexts ascend."""

    shape: str
    device: str
    dtype: str
    nodes: Sequence[int]
    contexts: Sequence[int]


class Step(BaseModel):
    """A step over so many nodes after so many tokens."""

    context: int
    nodes: int
    seconds: float = Field(gt=0)
    to_one_node: float
    to_reading_once: float


class Document(BaseModel):
    """A measurement, as --output-json writes it. Bytes are those that one step reads; bandwidth is bytes a second."""

    shape: str
    parameters: int
    dtype: str
    device: str
    runner: str
    attention: str
    threads: int
    machine: str
    date: str
    versions: dict[str, str]
    command: str
    bandwidth: float = Field(gt=0)
    weight_bytes: int
    cache_bytes: dict[int, int]
    steps: list[Step] = Field(min_length=1)
    verdict: str


def measured(asked: Asked) -> Document:
    """Make the model, measure a copy and the steps. Raises TargetError and DataError for what can't be had or held."""
    device = gpu_or(asked.device)
    origin = origin_here(device, PROGRAM)
    bandwidth = copy_bandwidth(device)
    target = random_target(asked.shape, device, asked.dtype)
    weights = step_bytes(target)
    costs = costs_by_context(target, asked.contexts, *asked.nodes)
    steps = [
        Step(
            context=cost.context,
            nodes=nodes,
            seconds=seconds,
            to_one_node=seconds / cost.seconds[1],
            to_reading_once=seconds * bandwidth / (weights + cost.cache_bytes),
        )
        for cost in costs
        for nodes, seconds in cost.seconds.items()
    ]
    return Document(
        shape=asked.shape,
        parameters=_numbers(target),
        dtype=target.dtype_name,
        device=str(target.device),
        runner=target.identity.runner,
        attention=target.identity.attention,
        threads=torch.get_num_threads(),
        **asdict(origin),
        bandwidth=bandwidth,
        weight_bytes=weights,
        cache_bytes={cost.context: cost.cache_bytes for cost in costs},
        steps=steps,
        verdict=verdict(steps),
    )


def _numbers(target: Target) -> int:
    """Numbers of the model; layers that were laid out anew hold theirs as no parameters."""
    packed = [module for module in target.model.modules() if isinstance(module, PackedLinear)]
    plain = sum(parameter.numel() for parameter in target.model.parameters())
    return plain + sum(layer.in_features * layer.out_features for layer in packed)


def gpu_or(device: str) -> torch.device:
    """The device named; a GPU that isn't there is a TargetError that says how to try without one."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise TargetError(
            "this measurement is for a GPU, and torch sees none on this machine",
            f"{PROGRAM} --shape tiny --device cpu takes the same way on a processor",
        )
    return choose_device(device)


def random_target(shape: str, device: torch.device, dtype: str) -> Target:
    """A llama of this shape with random weights, made where it runs. Raises TargetError when it doesn't fit there."""
    hidden, inner, layers, query_heads, key_heads, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=query_heads,
        num_key_value_heads=key_heads, vocab_size=vocabulary, max_position_embeddings=_POSITIONS,
    )  # fmt: skip
    held = choose_dtype(dtype, device)
    name = str(held).removeprefix("torch.")
    try:
        with device:
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=choose_attention("auto", config), dtype=held
            )
        return make_target(model, None, TargetSettings(model=shape, dtype=name, device=str(device), runner="auto"))
    except torch.OutOfMemoryError as error:
        raise TargetError(
            f"a model of the shape {shape} does not fit on {device}", "name a smaller one with --shape"
        ) from error


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy within the device's memory reads and writes together, at the median."""
    source = torch.ones(_COPIED_BYTES["cpu" if device.type == "cpu" else "cuda"], dtype=torch.uint8, device=device)
    copy = torch.zeros_like(source)
    times = []
    for _ in range(_ROUNDS + 1):
        begun = now(device)
        for _ in range(_COPIES):
            copy.copy_(source)
        times.append((now(device) - begun) / _COPIES)
    return 2 * len(source) / statistics.median(times[1:])


def verdict(steps: Sequence[Step]) -> str:
    """What the most nodes cost at the least and at the most, and how far plain steps are from reading once."""
    most = max(step.nodes for step in steps)
    trees = [step.to_one_node for step in steps if step.nodes == most]
    plain = [step.to_reading_once for step in steps if step.nodes == 1]
    word = "cheap" if max(trees) <= CHEAP else "dear" if min(trees) > CHEAP else "cheap at some contexts only"
    return (
        f"guesses are {word} here: a step over {most} nodes costs {min(trees):.2f} to {max(trees):.2f} plain steps. "
        f"A plain step takes {min(plain):.2f} to {max(plain):.2f} times as long as reading weights and cache once."
    )


def table(document: Document) -> Table:
    """A row for each context and number of nodes."""
    headers = ("context", "nodes", "ms a step", "to 1 node", "to reading once", "cache, MiB")
    rows = [
        (
            str(step.context),
            str(step.nodes),
            f"{1000 * step.seconds:.2f}",
            f"{step.to_one_node:.2f}x",
            f"{step.to_reading_once:.2f}x",
            f"{document.cache_bytes[step.context] / _MIB:,.1f}",
        )
        for step in document.steps
    ]
    return Table(headers, rows)


def in_words(document: Document) -> str:
    """What was measured, on what, when: one line."""
    return (
        f"{document.shape} shape, {document.parameters:,} random weights in {document.dtype} on "
        f"{document.machine} ({document.device}, {document.date[:10]}): runner {document.runner}, attention "
        f"{document.attention}; a step reads {document.weight_bytes / _MIB:,.1f} MiB of weights, and a copy moves "
        f"{document.bandwidth / 1e9:.3g} GB/s."
    )


def section(document: Document) -> str:
    """The part `gpu` of docs/benchmarks.md."""
    versions = ", ".join(f"{name} {number}" for name, number in document.versions.items())
    parts = [f"```\n{document.command}\n```", in_words(document), markdown(table(document)), document.verdict]
    return "\n\n".join([*parts, f"Versions: {versions}."])


def is_document(file: Path) -> bool:
    """Whether this looks like a measurement of a shape rather than a result of medusa bench."""
    try:
        content: Any = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "shape" in content


def read_document(file: Path) -> Document:
    """A measurement that --output-json wrote. Raises FormatError."""
    try:
        return Document.model_validate_json(file.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise FormatError(
            f"{file} is no measurement of a shape: {first_fault(error)}", f"{PROGRAM} --output-json writes one"
        ) from error


def _counts(text: str) -> list[int]:
    """1,32,64 ascending."""
    found = sorted({int(word) for word in text.split(",")})
    if found[0] < 1:
        raise ValueError(text)
    return found


def main(args: Sequence[str] | None = None) -> None:
    """Print what was measured; a user's mistake, no GPU included, is two lines on stderr and exit code 1."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-7b")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu [default: cuda]")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--nodes", type=_counts, default=list(NODES), metavar="N,N,…", help="1 is always measured")
    parser.add_argument("--contexts", type=_counts, default=list(CONTEXTS), metavar="N,N,…")
    parser.add_argument("--json", action="store_true", help="print the document and no table")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the document to a file")
    given = parser.parse_args(args)
    try:
        document = measured(Asked(given.shape, given.device, given.dtype, given.nodes, given.contexts))
        text = document.model_dump_json(indent=2)
        if given.output_json:
            given.output_json.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(given.output_json, text + "\n")
    except MedusaError as error:
        sys.exit(f"error: {error.message}\n hint: {error.hint}")
    except OSError as error:
        sys.exit(f"error: can't write {given.output_json}: {error.strerror}\n hint: name a file you can write to")
    print(text if given.json else "\n\n".join([in_words(document), markdown(table(document)), document.verdict]))


if __name__ == "__main__":
    main()

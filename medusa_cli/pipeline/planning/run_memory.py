"""Memory that a run needs, stage by stage, counted on a model without numbers; knows no folder and starts nothing."""

import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from medusa_cli.config.recipe import Recipe
from medusa_cli.decode.memory import free_bytes
from medusa_cli.errors import TargetError
from medusa_cli.heads.block_config import BlockConfig
from medusa_cli.heads.config import HeadsConfig
from medusa_cli.heads.kinds import heads_class
from medusa_cli.kernels.packed import can_pack
from medusa_cli.model.cache import BLOCK
from medusa_cli.model.forward_memory import ForwardMemory, largest_of
from medusa_cli.model.loading.load import choose_device, choose_dtype
from medusa_cli.model.loading.sources import find_source
from medusa_cli.model.prefill import peak_bytes
from medusa_cli.model.runners.kinds import why_no_blocks

FLOAT, HALF = 4, 2  # bytes of a float32, and of a number of 16 bits
DRAWN = 10  # tensors of the size of the logits while tokens are drawn from them: sorted, summed up, and their places
# while heads learn: weights, gradients and two moments; a checkpoint is put together in memory without the gradients
TRAINED_COPIES, SAVED_COPIES = 4, 3
# [places, heads, hidden] while a piece of a step is learnt from: sums of both inputs, their sum, its SiLU, the blocks,
# and the gradients of the last three; each further layer keeps its sums and adds as much again in gradients
FIRST_LAYER, FURTHER_LAYER = 8, 4
# logits, softmax, and what its gradient is multiplied from
LOGITS = 3
# beside a teacher also its own chances, their distance, the signs of that, and a gradient
BESIDE = 4
# of blocks: copies of the states of their texts, and of scores of all they look at, while gradients are taken
OF_CONTEXT, OF_SCORES = 3, 4
# of a weight. NF4: half a byte and a float32 for each block of 64. int8: a byte; the outputs' scales are next to none
QUANTISED = {"4bit": 0.5 + 4 / 64, "8bit": 1.0}


@dataclass(frozen=True)
class Memory:
    """Bytes that a run needs at most, about: the weights as they are held, and what the long stages add to them.

    The mapped file of hidden states is not counted: the system takes its pages back when it needs them.

    base      Python and the libraries, as measured in this process; 0 for a run on a GPU
    weights   of one copy; the target's own model and each further writing process hold one
    loading   the weights, and the file they are converted from, mapped while it is read
    writing   copies of the weights, keys and values of all rows, and their logits
    training  one copy of the weights, the output matrix in float32, the heads with what the optimizer keeps, and a
              piece of a step or a checkpoint
    free      what the device has now; None where nobody can tell
    joint     with the adapter, if the recipe has one (pipeline/planning/joint_plan.py)
    """

    base: int
    weights: int
    loading: int
    writing: int
    training: int
    free: int | None
    joint: int = 0

    @property
    def needed(self) -> int:
        """The largest of the stages, on top of the base."""
        return self.base + max(self.loading, self.writing, self.training, self.joint)


@dataclass(frozen=True)
class Model:
    """Numbers of a model: all of them (tied ones once), its linear layers' without the output, the output matrix's."""

    numbers: int
    linear: int
    output: int
    tied: bool

    @property
    def laid_out(self) -> int:
        """Numbers of the layers that the CPU's kernels have layouts for; a tied output is one of them."""
        return self.linear + self.output

    def bytes(self, itemsize: int, *, each: float | None) -> int:
        """As the library holds them; `each`: bytes of a quantised weight, if linear layers are quantised."""
        if each is None:
            return self.numbers * itemsize
        return int((self.numbers - self.linear) * itemsize + self.linear * each)


def memory_of(recipe: Recipe, config: Any, head_parameters: int) -> Memory:
    """Memory by stage, counted on a model without numbers."""
    text, data = config.get_text_config(), recipe.data
    device, dtype = _device(recipe), _dtype(recipe)
    on_cpu = device is not None and device.type == "cpu"
    model, packed = model_of(config), packs(recipe)
    weights = model.bytes(dtype.itemsize, each=QUANTISED.get(recipe.target.quantize))
    stored = getattr(config, "dtype", None) or torch.float32
    mapped = on_cpu and stored == dtype  # the weights are the file's own pages, and stay as long as one of them is used
    held = weights
    if packed:
        held += laid_out_bytes(recipe, model, stored)
        held -= 0 if mapped else model.laid_out * dtype.itemsize
    copies = data.workers + 1 if data.workers > 1 else 1
    rows = min(data.rows, data.num_samples) * data.workers
    passing = reading_bytes(recipe, text, dtype.itemsize, on_cpu=on_cpu)
    # the heads read the output matrix itself where it lies in float32 as it was loaded
    output = 0 if dtype == torch.float32 and (model.tied or not packed) else model.output * FLOAT
    learning = learning_bytes(
        recipe, text.hidden_size, text.vocab_size, head_parameters, packed=on_cpu, num_layers=text.num_hidden_layers
    )
    if recipe.train.states == "rerun":
        learning += reading_bytes(recipe, text, dtype.itemsize, on_cpu=on_cpu, whole=True)
    return Memory(
        base=base_bytes() if on_cpu else 0,
        weights=weights,
        loading=weights + (0 if mapped or not on_cpu else model.numbers * stored.itemsize),
        writing=copies * held + rows * row_bytes(recipe, text, dtype.itemsize, on_cpu=on_cpu) + data.workers * passing,
        training=held + output + learning,
        free=sum(free_bytes(one) or 0 for one in _devices(recipe, device)) if device else None,
    )


def laid_out_bytes(recipe: Recipe, model: Model, stored: torch.dtype) -> int:
    """Layers as they would be laid out on this CPU: in as many bits as the weights were stored in, where blocks can."""
    if recipe.target.runner != "packed" and why_no_blocks() is None:
        gguf = find_source(recipe.target.model).gguf
        if gguf is not None and gguf.exists():
            return gguf.stat().st_size
        if stored.itemsize == HALF:
            return model.laid_out * HALF
        if recipe.target.runner == "compiled":
            return 0  # read where they lie
    return model.laid_out * FLOAT


def row_bytes(recipe: Recipe, text: Any, itemsize: int, *, on_cpu: bool) -> int:
    """One text while it is written: keys and values, logits, and the hidden states that wait for its end.

    on_cpu   memory that was freed is seldom the right piece for what comes next: prompts that are written first, and
             what it takes to draw their tokens, are counted beside their answers
    """
    data = recipe.data
    heads = largest_of(text, "num_attention_heads")
    width = largest_of(text, "head_dim") or text.hidden_size // heads
    key_heads = largest_of(text, "num_key_value_heads") or heads
    a_token = 2 * text.num_hidden_layers * key_heads * width * itemsize
    columns = _whole_blocks(min(data.max_seq_length, data.max_prompt_tokens + data.max_answer_tokens))
    width = inner_width(recipe, text)
    # inner states lie beside the keys, and are noted in 16 bits until the text ends
    a_token += width * itemsize
    logits = FLOAT
    if on_cpu and data.dataset == "self":
        columns += _whole_blocks(data.max_prompt_tokens)
        logits *= DRAWN
    noted = data.max_answer_tokens * text.hidden_size + columns * width
    return columns * a_token + text.vocab_size * logits + noted * HALF


def inner_width(recipe: Recipe, text: Any) -> int:
    """Numbers of inner layers that are kept of each place while the target writes or reads; 0 where none are."""
    taps = heads_class(recipe.heads.type).describes.taps_of(recipe.heads, text.num_hidden_layers)
    return len(taps) * text.hidden_size if recipe.train.states == "stored" else 0


def reading_bytes(recipe: Recipe, text: Any, itemsize: int, *, on_cpu: bool, whole: bool = False) -> int:
    """What passes through a process while prompts, or texts that are given, are read in pieces; `whole`: any texts."""
    data, attention = recipe.data, recipe.target.attention
    own = data.dataset == "self"
    memory = ForwardMemory.of(text, itemsize, attention, on_cpu=on_cpu)
    longest = data.max_prompt_tokens if own and not whole else data.max_seq_length
    return peak_bytes(memory, min(data.rows, data.num_samples), longest)


def _whole_blocks(columns: int) -> int:
    """As the cache holds them."""
    return -(-columns // BLOCK) * BLOCK


def packs(recipe: Recipe) -> bool:
    """Whether the target's layers would be laid out for the CPU's kernels."""
    device, settings = _device(recipe), recipe.target
    can = settings.runner != "eager" and settings.quantize == "none"
    return device is not None and can and can_pack(device, _dtype(recipe))


def _device(recipe: Recipe) -> torch.device | None:
    """Where the run would be; None when this machine lacks it."""
    try:
        return choose_device(recipe.target.device)
    except TargetError:
        return None


def _devices(recipe: Recipe, device: torch.device) -> list[torch.device]:
    """Where the weights would lie: on this device, or on all GPUs."""
    if recipe.target.device_map == "auto" and device.type == "cuda":
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [device]


def _dtype(recipe: Recipe) -> torch.dtype:
    """How the weights would be held; bfloat16 on a device that is not here to be asked."""
    device, wanted = _device(recipe), recipe.target.dtype
    if device is None and wanted == "auto":
        return torch.bfloat16
    return choose_dtype(wanted, device or torch.device("cpu"))


def meta_model(config: Any) -> Any:
    """The model of this config without numbers."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def model_of(config: Any) -> Model:
    """Counted on a model of this config that has shapes alone."""
    model = meta_model(config)
    output = model.get_output_embeddings()
    linear = sum(
        module.weight.numel()
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and module is not output
    )
    tied = output.weight is model.get_input_embeddings().weight
    numbers = sum(parameter.numel() for parameter in model.parameters())
    return Model(numbers, linear, output.weight.numel(), tied)


def base_bytes() -> int:
    """What Python and the libraries take: all that is resident of this process, which has yet to load a model."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return taken if sys.platform == "darwin" else taken * 1024


def draft_width(recipe: Recipe, vocab: int) -> int:
    """Entries of the draft vocabulary, of so many that there are."""
    return min(recipe.heads.draft_vocab or vocab, vocab)


def outline_of(recipe: Recipe, hidden: int, vocab: int, num_layers: int) -> HeadsConfig:
    """What the heads will be, as far as their size goes; `num_layers` of the target."""
    return heads_class(recipe.heads.type).describes.of(
        recipe.heads,
        hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab=draft_width(recipe, vocab),
        output_bias=False,
        target_name=recipe.target.model,
        target_fingerprint="",
        tap_size=hidden,
        num_layers_seen=num_layers,
    )


def learning_bytes(
    recipe: Recipe, hidden: int, vocab: int, parameters: int, *, packed: bool, num_layers: int = 1
) -> int:
    """What training adds to the target: heads, what the optimizer keeps, the rows they see, and a piece of a step.

    packed       whether a shared output is copied into the layout of the CPU's kernels
    num_layers   of the target
    """
    heads, train = recipe.heads, recipe.train
    width = draft_width(recipe, vocab)
    rows = 0 if heads.own_output else width * hidden * FLOAT * ((width < vocab) + packed)
    places = min(train.micro_batch_size or train.batch_size, train.batch_size)
    outline = outline_of(recipe, hidden, vocab, num_layers)
    logits = LOGITS + (BESIDE if train.losses.teacher or outline.looks_back else 0)
    if isinstance(outline, BlockConfig):
        passing = blocks_bytes(recipe, outline, places)
    else:
        blocks = (FIRST_LAYER + FURTHER_LAYER * (heads.num_layers - 1)) * heads.num_heads
        passing = places * hidden * FLOAT * (2 * outline.num_inputs + blocks)
        passing += places * heads.num_heads * hidden * FLOAT if train.losses.teacher else 0
    piece = passing + logits * train.loss_chunk * width * FLOAT
    # a decode has a copy of the heads, and patience the best ones
    copies = TRAINED_COPIES + bool(train.decode_steps) + bool(train.patience)
    return rows + FLOAT * parameters * copies + max(piece, SAVED_COPIES * FLOAT * parameters)


def blocks_bytes(recipe: Recipe, config: BlockConfig, places: int) -> int:
    """What so many blocks of a step hold at once: their texts, what their layers keep for gradients, their scores."""
    data, width = recipe.data, config.head_size
    whole = data.dataset != "self"
    prompt = 0 if whole else data.max_prompt_tokens
    answer = data.max_seq_length if whole else min(data.max_answer_tokens, data.max_seq_length // 2)
    length = min(prompt + answer, data.max_seq_length)
    texts = max(1.0, places / max(1.0, recipe.train.place_share * answer))
    states = len(config.taps) * config.tap_size
    context = OF_CONTEXT * states + 4 * config.hidden_size + 8 * config.num_layers * config.key_heads * width
    queries, keys = config.query_heads * width, config.key_heads * width
    layer = 10 * config.hidden_size + 5 * config.inner_size + 6 * (queries + keys)
    outside = 4 * (config.hidden_size + config.rank)
    scores = OF_SCORES * config.num_layers * config.query_heads * (length + config.num_heads)
    each = config.num_heads * (config.num_layers * layer + outside + scores)
    return int(FLOAT * (texts * length * context + places * each))

"""A tiny chat model in a folder, and the program run on it as a user runs it."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
ENOUGH = 300.0  # seconds, only to end a test that would never end

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Enough for seconds of work and for heads that guess something right.
QUICK = (
    "data.max_prompt_tokens=12", "data.max_answer_tokens=40", "data.rows=4", "data.held_out=0.25", "tree.max_size=7",
    "train.batch_size=64", "train.loss_chunk=64", "heads.num_heads=3", "heads.draft_vocab=200", "data.workers=1",
)  # fmt: skip
FEW = ("--max-steps", 3, "-q")
# an adapter beside heads that have learnt alone
LORA = (
    "lora.rank=4", "lora.max_steps=12", "lora.epochs=50", "lora.batch_size=4", "lora.learning_rate=0.02",
    "lora.heads_learning_rate=0.002", "lora.heads_warmup=0.1", "lora.heads_weight=1",
)  # fmt: skip
ALONE = ("--max-steps", 20, "--tree-size", 6)
TRAIN = ("--num-samples", "12", "--max-seq-length", "120", "--epochs", "12", "--save-steps", "10", "--eval-steps", "50")


@dataclass(frozen=True)
class Done:
    """How a run of the program ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """stdout as the one JSON document it must be."""
        return json.loads(self.out)


Medusa = Callable[..., Done]


def run_here(*args: object, stdin: str | bytes = "") -> Done:
    """The program in this process."""
    from medusa_cli.cli.app import main

    out, err = io.StringIO(), io.StringIO()
    given = io.TextIOWrapper(io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin), encoding="utf-8")
    before, sys.stdin = sys.stdin, given
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([str(arg) for arg in args])
    finally:
        sys.stdin = before
    return Done(code, out.getvalue(), err.getvalue())


def start(*args: object, **environment: str) -> subprocess.Popen[str]:
    """The program as a process of its own, at the head of its own group."""
    return subprocess.Popen(
        [sys.executable, "-m", "medusa_cli", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
        start_new_session=True,
        # a shell's background job ignores interrupts, and so would all it starts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def in_two_lines(said: str) -> bool:
    """Whether one error and one hint were told, and no traceback."""
    starts = [line.partition(" ")[0] or line[:6] for line in said.splitlines()]
    return starts.count("error:") == starts.count(" hint:") == 1 and "Traceback" not in said


def kill_group(process: subprocess.Popen[str]) -> None:
    """End a process and all it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def make_model(
    folder: Path,
    seed: int = 0,
    hidden_size: int = 32,
    layers: int = 2,
    vocab: int = 304,
    tied: bool = False,
    positions: int = 256,
) -> Path:
    """A random llama with a byte-level tokenizer and a chat template, as save_pretrained leaves it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>", "<pad>"],
    )
    inner.train_from_iterator(["Write a story about the sea. What is it? user assistant system"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<pad>")
    tokenizer.chat_template = CHATML
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden_size, intermediate_size=hidden_size * 3 // 2, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=positions, initializer_range=0.15,
        tie_word_embeddings=tied,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train_args(model: Path, folder: Path, *more: object) -> Sequence[object]:
    """A small training run of this model into this folder."""
    return ["train-heads", *QUICK, "-m", model, "--dtype", "float32", "-o", folder, *TRAIN, *more]


def joint_args(model: Path, folder: Path, *more: object) -> Sequence[object]:
    """Such a run whose heads learn alone, and then with an adapter."""
    return train_args(model, folder, *ALONE, *LORA, *more)


@dataclass(frozen=True)
class Trained:
    """A finished training run."""

    folder: Path
    done: Done


def said(n: int) -> str:
    """An answer that names its number."""
    return f"It is {n}, and the sea is the sea. " * 3


def talk(n: int, turns: int = 1) -> dict[str, Any]:
    """A conversation of so many turns, each with an answer."""
    messages = []
    for turn in range(turns):
        messages += [{"role": "user", "content": f"What is {n}.{turn}?"}, {"role": "assistant", "content": said(n)}]
    return {"messages": messages}


ANSWERS = ["It is blue. " * 4, "The sea is the sea. " * 3, "A story is a story. " * 3, "What it is, it is. " * 3]


def rows_of(count: int, make: Callable[[str, str], dict]) -> str:
    """Lines of JSON, each with a question and an answer of its own."""
    return "".join(json.dumps(make(f"What is {n}?", f"{n}: {ANSWERS[n % 4]}")) + "\n" for n in range(count))


LAYOUTS: dict[str, Callable[[str, str], dict]] = {
    "messages": lambda q, a: {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]},
    "sharegpt": lambda q, a: {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]},
    "alpaca": lambda q, a: {"instruction": q, "input": "", "output": a},
    "prompts": lambda q, a: {"prompt": q},
    "text": lambda q, a: {"text": q + " " + a},
}

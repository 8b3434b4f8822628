"""Guesses of a .gguf model that llama.cpp runs in this process: a chain of its best tokens, the next best ones beside.

llama.cpp keeps what it has read of a text and reads only what changed at its end. Its ids are the target's where the
vocabularies agree, else guesses are carried over as text.
"""

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from medusa_cli.contracts import Context
from medusa_cli.drafters.memory import NoMemory
from medusa_cli.drafters.source import Wishes
from medusa_cli.drafters.translation import PROBES, ByText, Coder, Guessed, SameIds, Translation, check_gives_back
from medusa_cli.drafters.trie import Trie
from medusa_cli.errors import TargetError
from medusa_cli.model.loading.sources import find_source
from medusa_cli.model.target import Target
from medusa_cli.util.optional import need

DEPTH = 5  # guesses of a chain at most
WIDTH = 3  # likeliest tokens of each place
CONTEXT = 8192  # tokens that llama.cpp has room for, where the target has more positions or says nothing
GREEDY = {"samplers": ["top_k"], "top_k": 1, "temperature": 0.0, "mirostat": 0}
"""Only the best token is left to draw from; a file may carry sampling settings of its own, mirostat among them."""


class LlamaCppGuesses(NoMemory):
    """The source of guesses: one text at a time, in the order of rows."""

    @classmethod
    def of(cls, target: Target, wishes: Wishes) -> "LlamaCppGuesses":
        """The file that was named. Raises MissingExtra without xllamacpp, TargetError for a file that can't guess."""
        assert wishes.draft_model is not None
        need("xllamacpp", "llama-cpp")
        file = find_source(wishes.draft_model).gguf
        if file is None or not file.is_file():
            raise TargetError(
                f"--drafter llama-cpp runs .gguf files, and {wishes.draft_model} is none",
                "name a .gguf file with --draft-model, or use --drafter model",
            )
        context = min(target.context_limit or CONTEXT, CONTEXT)
        server = open_server(file, context, torch.get_num_threads(), "use another --draft-model")
        return cls(server, context, _between(target, server, file.name))

    def __init__(self, server: Any, context: int, translation: Translation) -> None:
        self._server = server
        self._context = context
        self._translation = translation

    def add_guesses(self, context: Context, tries: Sequence[Trie], floor: float) -> None:
        """A chain for each row that there is room for, with its next best tokens as siblings. Raises TargetError."""
        for tokens, trie in zip(context.tokens, tries, strict=True):
            text = self._translation.to_draft(tokens)
            if text and len(text) + DEPTH <= self._context:
                for path in self._paths(text):
                    guess = self._translation.from_draft(tokens, text, path)
                    trie.add_path(guess.ids, (chance for chance in guess.chances if chance >= floor))

    def _paths(self, text: Sequence[int]) -> list[Guessed]:
        """What llama.cpp may write after a text."""
        asked = {"prompt": list(text), "max_tokens": DEPTH, "cache_prompt": True, "n_probs": WIDTH, **GREEDY}
        answer = self._server.handle_completions({**asked, "return_tokens": True, "verbose": True})
        if "error" in answer:
            raise TargetError(f"llama.cpp made no guess: {answer['error']['message']}", "use another --drafter")
        chain, found = Guessed([], []), list[Guessed]()
        for place in answer["__verbose"].get("completion_probabilities", []):
            reached = chain.chances[-1] if chain.chances else 1.0
            longer = {
                each["id"]: Guessed([*chain.ids, each["id"]], [*chain.chances, reached * math.exp(each["logprob"])])
                for each in place["top_logprobs"]
            }
            found += longer.values()
            if place["id"] not in longer:
                break
            chain = longer[place["id"]]
        return found


def open_server(file: Path, context: int, num_threads: int, hint: str) -> Any:
    """llama.cpp with the file loaded, on the CPU alone, silent. Raises TargetError."""
    llama = need("xllamacpp", "llama-cpp")
    params = llama.CommonParams()
    params.model.path = str(file)
    params.n_ctx = context
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
    # a build for GPUs would send large batches there even without layers on it
    params.n_gpu_layers, params.no_op_offload, params.no_kv_offload = 0, True, True
    params.fit_params = False  # it may shorten the context
    params.cache_ram_mib = params.n_ctx_checkpoints = 0
    params.cache_idle_slots = params.ui = False
    params.verbosity = -1
    # It listens before it loads, come what may: on a socket in a folder that is ours alone, and gone once it stands.
    with tempfile.TemporaryDirectory(prefix="medusa-") as folder:
        params.hostnames = [f"{folder}/llama.sock"]
        try:
            return llama.Server(params)
        except RuntimeError as error:
            raise TargetError(
                f"llama.cpp can't load {file}",
                f"if its architecture is new: pip install --upgrade xllamacpp; or {hint}",
            ) from error


def _between(target: Target, server: Any, name: str) -> Translation:
    """By ids where both split texts alike into the same ids, else by text. Raises TargetError."""
    if target.tokenizer is None:
        raise TargetError(f"{target.name} has no tokenizer: its tokens can't be told from those of another model")

    def encode(text: str) -> list[int]:
        found = server.handle_tokenize({"content": text, "add_special": False, "parse_special": True})
        return list(found["tokens"])

    def decode(ids: Sequence[int]) -> str:
        return str(server.handle_detokenize({"tokens": list(ids)})["content"])

    ours, theirs = Coder.of(target.tokenizer), Coder(encode, decode)
    if all(ours.encode(text) == theirs.encode(text) for text in PROBES):
        return SameIds(target.real_vocab)
    check_gives_back(theirs, name)
    return ByText(ours, theirs)

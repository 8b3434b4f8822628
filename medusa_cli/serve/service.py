"""What requests become: prompts to ids, fields to how tokens are chosen, gains to words. Knows no HTTP."""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from medusa_cli.acceptance.logits_processors import stop_strings_of
from medusa_cli.acceptance.random_streams import Stream
from medusa_cli.acceptance.sampling import Choosing
from medusa_cli.choosing import Sampling, load_choosing
from medusa_cli.config.recipe import COLDEST
from medusa_cli.decode.chat import Ends, ends_of, ids_of
from medusa_cli.decode.engine import Request
from medusa_cli.decode.text import TextStream
from medusa_cli.errors import MedusaError
from medusa_cli.model.target import Target
from medusa_cli.serve.errors import ApiError
from medusa_cli.serve.schema import ChatRequest, CompletionRequest, Wanted
from medusa_cli.serve.steps import StepTeller
from medusa_cli.serve.worker import Asked, News, Worker

MOST_DIGITS = 20  # of a token's id: Python reads no number of thousands
MOST_SETTINGS = 256  # ways of choosing that are kept: rows that share one are decided together


@dataclass
class Choice:
    """One text as it grows: words that are certain, and how it ended."""

    stream: TextStream
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    lent: int = 0
    queued_s: float | None = None  # until it had a row
    first_s: float | None = None  # until its first token
    since: float = field(default_factory=time.monotonic)
    told: int = 0  # characters of the tokens whose logprobs have been told
    teller: StepTeller | None = None
    _length: int = 0

    def feed(self, news: News) -> str:
        """The words that the news brings."""
        if self.teller is not None:
            self.teller.saw(news)
        self.tokens += news.tokens
        self.steps, self.drafted, self.accepted = news.steps, news.drafted, news.accepted
        self.lent, self.queued_s = news.lent, news.queued_s
        if self.first_s is None and news.tokens:
            self.first_s = time.monotonic() - self.since
        words = self.stream.feed(news.tokens)
        if news.finish_reason is not None:
            self.finish_reason = news.finish_reason
            words += self.stream.flush()
        self._length += len(words)
        return words

    def steps_told(self, words: Callable[[int], str]) -> list[dict[str, Any]]:
        """The steps all of whose words have come, each once; none where nobody asks for them."""
        return self.teller.tell(self._length, words, is_over=self.finish_reason is not None) if self.teller else []


@dataclass
class Call:
    """One request on its way: what is asked of the engine, and the choices that grow."""

    id: str
    created: int
    wanted: Wanted
    asked: Asked
    choices: list[Choice]
    prompt_tokens: int

    def usage(self) -> dict[str, object]:
        """Tokens, as OpenAI counts them."""
        written = sum(len(choice.tokens) for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self.prompt_tokens + written,
            "prompt_tokens_details": {"cached_tokens": self._cached()},
        }

    def _cached(self) -> int:
        """Prompt tokens that were not read; of the texts that share a prompt, the one that read least counts."""
        each_n = self.wanted.n
        return sum(
            max(choice.lent for choice in self.choices[start : start + each_n])
            for start in range(0, len(self.choices), each_n)
        )

    def speculation(self) -> dict[str, int]:
        """What guessing brought."""
        return {
            "num_steps": sum(choice.steps for choice in self.choices),
            "num_draft_tokens": sum(choice.drafted for choice in self.choices),
            "num_accepted_tokens": sum(choice.accepted for choice in self.choices),
        }


class Service:
    """A target behind the API, under the name that clients call it by.

    max_tokens   of a reply, where the request doesn't say: as many as the context holds if None
    """

    def __init__(self, target: Target, worker: Worker, name: str, max_model_len: int | None = None) -> None:
        self.target, self.worker, self.name = target, worker, name
        self.drafter = worker.drafter
        self.created = int(time.time())
        limits = [limit for limit in (max_model_len, target.context_limit) if limit is not None]
        self.max_model_len = min(limits, default=None)
        self._own_stops = stop_strings_of(target.model.generation_config)
        self._choosing = lru_cache(MOST_SETTINGS)(lambda sampling: _choosing(sampling, target))

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for a model that isn't served."""
        if name is not None and name != self.name:
            raise ApiError(404, f"the model '{name}' does not exist; '{self.name}' does", "model", "model_not_found")

    def call(self, wanted: Wanted, client: str, deliver: Callable[[News], None], owner: str = "") -> Call:
        """What a request asks of the engine; nothing is asked yet. Raises ApiError.

        owner   of the texts: prompts of others that begin alike are read anew
        """
        self.check_model(wanted.model)
        # before anything is made for each of them: what never gets in must not cost others their time
        if wanted.num_texts > self.worker.most_texts:
            told = f"{wanted.num_texts} texts were asked for, and {self.worker.most_texts} may be written or wait"
            raise ApiError(400, told, None, "too_many_texts")
        prompts = self._prompts(wanted)
        longest = max(map(len, prompts))
        room = None if self.max_model_len is None else self.max_model_len - longest
        if room is not None and room < 1:
            raise ApiError(
                400,
                f"this model's maximum context length is {self.max_model_len} tokens, and the prompt has {longest}",
                None,
                "context_length_exceeded",
            )
        budget = wanted.budget if wanted.budget is not None else room if room is not None else DEFAULT_TOKENS
        if room is not None:
            budget = min(budget, room)
        try:
            ends = ends_of(self.target, budget, (*wanted.stops, *self._own_stops), ignore_eos=wanted.ignore_eos)
            choosing = self._choosing(_sampling(wanted, self.target.vocab_size))
        except MedusaError as error:
            raise ApiError(400, error.message) from error
        requests = self._requests(wanted, prompts, ends, choosing, owner)
        kind = "chatcmpl" if isinstance(wanted, ChatRequest) else "cmpl"
        return Call(
            f"{kind}-{uuid.uuid4().hex}",
            int(time.time()),
            wanted,
            Asked(client, requests, deliver, wanted.num_logprobs, wanted.includes_steps),
            [Choice(ends.stream(), teller=_teller(ends) if wanted.includes_steps else None) for _ in requests],
            sum(map(len, prompts)),
        )

    def words_of(self, token: int) -> str:
        """One token as text."""
        return str(self.target.tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def _prompts(self, wanted: Wanted) -> list[list[int]]:
        """Ids of each prompt. Raises ApiError."""
        try:
            if isinstance(wanted, ChatRequest):
                return [ids_of(self.target, [message.message() for message in wanted.messages])]
            assert isinstance(wanted, CompletionRequest)
            prompts = [self._ids(prompt) for prompt in wanted.prompts]
            self.target.check_ids(prompts)
        except MedusaError as error:
            raise ApiError(400, error.message) from error
        return prompts

    def _ids(self, prompt: str | list[int]) -> list[int]:
        return prompt if isinstance(prompt, list) else list(self.target.tokenizer(prompt)["input_ids"])

    def _requests(
        self, wanted: Wanted, prompts: Sequence[list[int]], ends: Ends, choosing: Choosing, owner: str
    ) -> list[Request]:
        """Each prompt `n` times, each with random numbers of its own."""
        seed = wanted.seed if wanted.seed is not None else uuid.uuid4().int
        return [
            Request(prompt, ends.limits, choosing, Stream(seed, place * wanted.n + number), wanted.speculate, owner)
            for place, prompt in enumerate(prompts)
            for number in range(wanted.n)
        ]


DEFAULT_TOKENS = 1024  # of a reply, where neither the request nor the model bounds it


def _teller(ends: Ends) -> StepTeller:
    return StepTeller(TextStream(ends.tokenizer, ends=ends.hidden))


def _sampling(wanted: Wanted, vocab_size: int) -> Sampling:
    """How tokens are chosen. OpenAI's default temperature is 1."""
    bias = tuple(sorted(_bias(wanted, vocab_size)))
    temperature = 1.0 if wanted.temperature is None else wanted.temperature
    return Sampling(
        temperature=0.0 if temperature < COLDEST else temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        min_p=wanted.min_p,
        repetition_penalty=wanted.repetition_penalty,
        presence_penalty=wanted.presence_penalty,
        frequency_penalty=wanted.frequency_penalty,
        logit_bias=bias,
    )


def _bias(wanted: Wanted, vocab_size: int) -> list[tuple[int, float]]:
    found = []
    for token, bias in (wanted.logit_bias or {}).items():
        is_number = token.isascii() and token.isdigit() and len(token) < MOST_DIGITS
        if not is_number or int(token) >= vocab_size:
            raise ApiError(
                400, f"logit_bias: {token[:MOST_DIGITS]!r} is no token of this model", "logit_bias", "invalid_value"
            )
        found.append((int(token), bias))
    return found


def _choosing(sampling: Sampling, target: Target) -> Choosing:
    chosen = load_choosing(sampling, target)
    return Choosing(chosen.rule, chosen.shaping)

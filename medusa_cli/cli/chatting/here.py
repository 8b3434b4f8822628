"""Replies of the engine in this process, which lives as long as the conversation."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from medusa_cli.acceptance.random_streams import Stream
from medusa_cli.acceptance.sampling import Choosing
from medusa_cli.assemble import correct_costs
from medusa_cli.choosing import Sampling, check_sampling, load_choosing
from medusa_cli.cli.chatting.reply import STOPPED, Manner, Reply
from medusa_cli.cli.console import Console
from medusa_cli.cli.turns import Reading
from medusa_cli.cli.wishes import ChoosingFlags
from medusa_cli.data.conversations import Message
from medusa_cli.decode.chat import ends_of, ids_of
from medusa_cli.decode.debug import watching
from medusa_cli.decode.engine import Engine, Gain, Request
from medusa_cli.decode.loop import Parts
from medusa_cli.decode.memory import check_room
from medusa_cli.decode.prefixes import Prefixes
from medusa_cli.decode.rows import Limits
from medusa_cli.errors import DataError
from medusa_cli.model.prefill import OnRead
from medusa_cli.prefix.memory import Memory
from medusa_cli.prefix.pool import PrefixPool
from medusa_cli.util.busy import Meter

KEPT_BYTES = 2**29  # of keys and values of what was said
FULL_HINT = "/save FILE keeps the conversation, /reset begins another; or ask something shorter"


class Here:
    """The target and its drafter. Used as a context manager.

    stops   strings at which this model's texts end, whoever asks
    """

    def __init__(self, parts: Parts, stops: tuple[str, ...], console: Console) -> None:
        self._parts, self._stops, self._console = parts, stops, console
        self.name, self.context = parts.target.name, parts.target.context_limit
        self._open = ExitStack()
        self._watches = self._open.enter_context(watching(parts.target))
        self._prefixes = Prefixes(parts.target, parts.drafter.taps, PrefixPool(Memory(KEPT_BYTES)))
        self._engine = self._new_engine()
        self._on_read: OnRead = _no_news
        self._chosen: tuple[ChoosingFlags, Choosing] | None = None
        self._stopped = self._was_busy = False

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        if not self._was_busy:
            correct_costs(self._parts.drafter, self._parts.target)

    def check(self, manner: Manner, system: str | None) -> None:
        """Raise DataError where the model has no template, or one that refuses such messages; RecipeError for flags."""
        manner.check()
        self._choosing(manner.choosing)
        if not self._parts.target.tokenizer.chat_template:
            hint = "medusa generate takes a prompt as plain text"
            raise DataError(f"{self.name} has no chat template: it is no model to talk with", hint)
        spoken = [Message("user", "Hello.")]
        ids_of(self._parts.target, [Message("system", system), *spoken] if system else spoken, chat=True)

    def write(self, messages: Sequence[Message], manner: Manner, reply: Reply) -> Iterator[str]:
        """The words as they come, between steps. Raises DataError where context or memory has no room for more."""
        target, ending = self._parts.target, manner.ending
        prompt = ids_of(target, messages, chat=True)
        ends = ends_of(target, ending.max_new_tokens, (*ending.stops, *self._stops), ignore_eos=ending.ignore_eos)
        self._check_room(prompt, ends.limits)
        request = Request(prompt, ends.limits, self._choosing(manner.choosing), Stream(manner.seed, reply.number))
        reply.prompt_tokens, self._stopped = len(prompt), False
        stream, meter = ends.stream(), Meter()
        try:
            with Reading(self._console) as self._on_read:
                for gain in self._gains(self._engine.add(request)):
                    if gain is not None:
                        _count(reply, gain)
                        yield stream.feed(gain.tokens)
                    elif self._stopped:
                        reply.finish_reason = STOPPED
                    else:
                        yield ""
        except BaseException:  # in the middle of a step the cache may be half written: nothing in it goes on
            self._engine = self._new_engine()
            raise
        finally:
            self._was_busy = self._was_busy or meter.read().busy
        yield stream.flush()

    def stop(self) -> None:
        """Let the step end, and take no other."""
        self._stopped = True

    def facts(self) -> dict[str, Any]:
        """What writes, with the names of `generate --json`."""
        parts, target = self._parts, self._parts.target
        return {
            "model": self.name,
            "drafter": parts.drafter.name,
            "tree_size": parts.drafter.size,
            "dtype": target.dtype_name,
            "device": str(target.device),
            "runner": target.identity.runner,
        }

    def _gains(self, key: int) -> Iterator[Gain | None]:
        """What each step brings, None where it only read or where a stop was asked for. Raises what ended the text."""
        while not self._engine.idle:
            if self._stopped:
                self._engine.cancel(key)
                yield None
                return
            gains = self._engine.step()
            for gain in gains:
                if gain.row.error is not None:
                    raise gain.row.error
                yield gain
            if not gains:
                yield None

    def _choosing(self, flags: ChoosingFlags) -> Choosing:
        """The rule for these flags, made once. Raises RecipeError."""
        if self._chosen is None or self._chosen[0] != flags:
            sampling = Sampling(**vars(flags))
            check_sampling(sampling)
            found = load_choosing(sampling, self._parts.target)
            self._chosen = flags, Choosing(found.rule, found.shaping)
        return self._chosen[1]

    def _check_room(self, prompt: Sequence[int], limits: Limits) -> None:
        """Raise DataError where not one token more has room in the context, or the reply none in memory."""
        if limits.budget(len(prompt)) < 1:
            raise DataError(
                f"the context is full: the conversation has {len(prompt):,} tokens with this question, and "
                f"{self.name} holds {limits.context_limit:,}",
                FULL_HINT,
            )
        check_room(self._parts.target, [prompt], limits, 1, self._parts.drafter.size, "ask for less: --max-new-tokens")

    def _new_engine(self) -> Engine:
        """An engine that reads of a prompt what no prompt or reply before began with."""
        target, drafter = self._parts.target, self._parts.drafter
        return Engine(target, drafter, watches=self._watches, on_read=self._tell_read, prefixes=self._prefixes)

    def _tell_read(self, done: int, total: int) -> None:
        self._on_read(done, total)


def _no_news(done: int, total: int) -> None:
    """Nobody looks yet."""


def _count(reply: Reply, gain: Gain) -> None:
    """What the row has come to."""
    reply.saw_token()
    row = gain.row
    reply.completion_tokens, reply.num_steps, reply.stepped = len(row.new_tokens), len(row.kept), sum(row.kept)
    reply.finish_reason = row.finish_reason

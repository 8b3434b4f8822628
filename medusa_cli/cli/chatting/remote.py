"""Replies of a server that speaks OpenAI's chat completions, as it streams them. Imports no torch.

The key goes into one header of each request: no message holds it, and redirections are not followed.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import typer

from medusa_cli.cli.chatting.reply import Manner, Reply
from medusa_cli.cli.wishes import ChoosingFlags
from medusa_cli.data.conversations import Message
from medusa_cli.errors import DataError, MedusaError
from medusa_cli.util.plain_json import parse_json

PATIENCE = httpx.Timeout(600.0, connect=10.0)  # seconds without a word: a busy server reads other prompts first
AGAIN = "what was said before is kept; /retry asks again"
AT_FIRST = "try again once it is ready"
_MOST_BYTES = 65_536  # of what a server says about a mistake
_HERE_ALONE = ("acceptance", "min_new_tokens", "posterior_threshold", "posterior_alpha")
_SENT_IF_GIVEN = ("top_p", "top_k", "min_p", "repetition_penalty")


class Remote:
    """A server and the model that is asked of it. Used as a context manager.

    model   None: the only one that the server has, asked at once
    Raises DataError where the server can't be asked, or serves several.
    """

    context: int | None = None

    def __init__(self, url: str, model: str | None, key: str | None) -> None:
        self.url, self._key = base_of(url), key or ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(timeout=PATIENCE, headers=headers)
        self.name = model or self._only_model()

    def __enter__(self) -> "Remote":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def check(self, manner: Manner, system: str | None) -> None:
        """Raise typer.BadParameter for what the API has no field for."""
        manner.check()
        fresh = ChoosingFlags()
        for name in _HERE_ALONE:
            if getattr(manner.choosing, name) != getattr(fresh, name):
                raise typer.BadParameter(f"--{name.replace('_', '-')} can't be asked of a server: leave it out")

    def write(self, messages: Sequence[Message], manner: Manner, reply: Reply) -> Iterator[str]:
        """The words as they come. Raises DataError where the server refuses, fails or goes away."""
        try:
            with self._client.stream(
                "POST", f"{self.url}/chat/completions", json=self._body(messages, manner, reply)
            ) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise self._refusal(answer, AGAIN)
                for document in _events(answer):
                    yield self._words(document, reply)
        except httpx.HTTPError as error:
            raise self._lost(error) from error
        if reply.finish_reason is None:
            raise DataError(f"the server at {self.url} stopped in the middle of its answer", AGAIN)

    def stop(self) -> None:
        """Leave the connection at once: a server frees the row of a client that has gone."""
        raise KeyboardInterrupt

    def facts(self) -> dict[str, Any]:
        """Who was asked."""
        return {"model": self.name, "url": self.url}

    def _body(self, messages: Sequence[Message], manner: Manner, reply: Reply) -> dict[str, Any]:
        """One request. What was not asked for is left out: other servers refuse fields that they don't know."""
        ending, choosing = manner.ending, manner.choosing
        body: dict[str, Any] = {
            "model": self.name,
            "messages": [{"role": one.role, "content": one.content} for one in messages],
            "max_tokens": ending.max_new_tokens,
            "temperature": choosing.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        given = {name: getattr(choosing, name) for name in _SENT_IF_GIVEN}
        body |= {name: value for name, value in given.items() if value is not None}
        if choosing.temperature > 0:
            body["seed"] = manner.seed + reply.number
        if ending.stops:
            body["stop"] = list(ending.stops)
        if ending.ignore_eos:
            body["ignore_eos"] = True
        return body

    def _words(self, document: dict[str, Any], reply: Reply) -> str:
        """What one event of the stream adds. Raises DataError for one that tells of a failure."""
        if "error" in document:
            raise self._told(_message(document), AGAIN, str(_code(document)))
        _take_counts(document, reply)
        choice = _first(document.get("choices"))
        if choice is None:
            return ""
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
        delta = choice.get("delta")
        words = delta.get("content") if isinstance(delta, dict) else None
        if not isinstance(words, str) or not words:
            return ""
        reply.saw_token()
        return words

    def _only_model(self) -> str:
        try:
            answer = self._client.get(f"{self.url}/models")
        except httpx.HTTPError as error:
            raise self._lost(error) from error
        if answer.status_code != httpx.codes.OK:
            raise self._refusal(answer, AT_FIRST)
        listed = _object(answer.content).get("data")
        names = (
            [str(one["id"]) for one in listed if isinstance(one, dict) and "id" in one]
            if isinstance(listed, list)
            else []
        )
        if len(names) != 1:
            told = (
                f"serves {len(names)} models ({', '.join(names[:8])})" if names else "doesn't tell which models it has"
            )
            raise DataError(f"the server at {self.url} {told}", "name one: --model NAME")
        return names[0]

    def _refusal(self, answer: httpx.Response, hint: str) -> MedusaError:
        """What a status other than 200 means."""
        body = b""
        for piece in answer.iter_bytes():
            body += piece
            if len(body) > _MOST_BYTES:
                break
        document = _object(body)
        said = _message(document) or answer.reason_phrase or "nothing more"
        return self._told(f"HTTP {answer.status_code}: {said}", hint, str(_code(document)), answer.status_code)

    def _told(self, said: str, hint: str, code: str, status: int = 0) -> MedusaError:
        """A failure in the server's words, and what to do about it: `hint`, where there is nothing better to say."""
        if code == "context_length_exceeded":
            hint = "the context is full: /save FILE keeps the conversation, /reset begins another"
        elif status in (401, 403):
            hint = "give a key in the environment: MEDUSA_API_KEY=…"
        elif status == 404:
            hint = "does the URL end as the server's paths do, as in http://localhost:8000/v1, and is the model there?"
        return DataError(f"the server at {self.url} says: {self._without_key(said)}", hint)

    def _lost(self, error: httpx.HTTPError) -> MedusaError:
        """A connection that could not be had, or broke off."""
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return DataError(f"no server answers at {self.url}", "is it running, as by medusa serve?")
        told = " ".join(str(error).split()) or type(error).__name__
        return DataError(f"the server at {self.url} went away: {self._without_key(told)}", AGAIN)

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def base_of(url: str) -> str:
    """What paths are put behind: /v1 where the URL names a host alone. Raises typer.BadParameter for what is no URL."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise typer.BadParameter(f"--url {url} is no URL of a server, such as http://127.0.0.1:8000/v1")
    return url.rstrip("/") if parts.path.strip("/") else f"{url.rstrip('/')}/v1"


def _events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The documents of server-sent events, to the one that says it is the last."""
    for line in answer.iter_lines():
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data == "[DONE]":
            return
        if data:
            yield _object(data)


def _take_counts(document: dict[str, Any], reply: Reply) -> None:
    """Usage as OpenAI counts it, and what guessing brought where the server is one of ours."""
    usage, guessing = document.get("usage"), document.get("speculation")
    if isinstance(usage, dict):
        reply.prompt_tokens, reply.completion_tokens = (
            _count(usage, "prompt_tokens"),
            _count(usage, "completion_tokens"),
        )
    if isinstance(guessing, dict) and (steps := _count(guessing, "num_steps")) is not None:
        reply.num_steps, reply.stepped = steps, steps + (_count(guessing, "num_accepted_tokens") or 0)


def _count(document: dict[str, Any], name: str) -> int | None:
    value = document.get(name)
    return value if isinstance(value, int) else None


def _first(choices: Any) -> dict[str, Any] | None:
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None


def _object(content: str | bytes) -> dict[str, Any]:
    """A JSON object; an empty one for anything else."""
    try:
        found = parse_json(content)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _message(document: dict[str, Any]) -> str:
    """The words of an error, on one line."""
    error = document.get("error", document.get("message", ""))
    said = error.get("message", "") if isinstance(error, dict) else error
    return " ".join(str(said).split())[:300]


def _code(document: dict[str, Any]) -> Any:
    error = document.get("error")
    return error.get("code") if isinstance(error, dict) else None

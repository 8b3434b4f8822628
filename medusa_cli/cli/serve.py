"""`medusa serve`: an OpenAI-compatible server whose every reply is the model's own."""

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from medusa_cli.cli import options
from medusa_cli.cli.console import Console
from medusa_cli.errors import DataError

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from medusa_cli.contracts import Drafter
    from medusa_cli.model.target import Target
    from medusa_cli.serve.app import Policy
    from medusa_cli.serve.pools import PoolSettings
    from medusa_cli.serve.service import Service


@dataclass(frozen=True)
class Listening:
    """Where it listens, to whom, and what it allows."""

    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address; 0.0.0.0 is open to all.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option("--port", min=1, max=65535, metavar="N", help="Port.")] = 8000
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            envvar="MEDUSA_API_KEY",
            metavar="KEY|FILE",
            help="A key that requests must bring, or a file with one on each line. [default: none is asked for]",
        ),
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        typer.Option("--allow-origin", metavar="URL", help="Web pages that may call (CORS); may be given again."),
    ] = None
    max_body_bytes: Annotated[
        int, typer.Option("--max-body-bytes", min=1024, metavar="N", help="Size of a request at most.")
    ] = 4 * 2**20
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, metavar="SECONDS", help="Time of a whole answer at most.")
    ] = 600.0
    metrics: Annotated[bool, typer.Option("--metrics/--no-metrics", help="Prometheus metrics at /metrics.")] = True
    page: Annotated[bool, typer.Option("--page/--no-page", help="A page to chat on at /.")] = True

    def policy(self) -> "Policy":
        """As the application takes it. Raises DataError for a file of keys without any."""
        from medusa_cli.serve.app import Policy, digest_of

        return Policy(
            keys=[digest_of(key) for key in _keys(self.api_key)],
            body_bytes=self.max_body_bytes,
            timeout_s=self.timeout,
            origins=self.allow_origin or (),
            has_metrics=self.metrics,
            has_page=self.page,
        )


@dataclass(frozen=True)
class Rows:
    """What is served under which name, and how many texts at once."""

    served_model_name: Annotated[
        str | None,
        typer.Option("--served-model-name", metavar="NAME", help="What clients call it. [default: the model's name]"),
    ] = None
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len", min=16, metavar="N", help="Tokens of a prompt and its text. [default: the model's]"
        ),
    ] = None
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", min=1, max=1024, metavar="N", help="Texts written side by side.")
    ] = 8
    max_queue: Annotated[
        int, typer.Option("--max-queue", min=0, metavar="N", help="Texts that may wait; others are told 429.")
    ] = 256


@dataclass(frozen=True)
class Pool:
    """What is kept of prompts that were read."""

    prefix_pool: Annotated[
        str,
        typer.Option(
            "--prefix-pool",
            metavar="POOL",
            help="Where keys and values of prompts are kept: memory:2GB, redis://host:6379, both by a comma, or none.",
        ),
    ] = "memory:1GB"
    pool_secret: Annotated[
        str | None,
        typer.Option(
            "--pool-secret",
            envvar="MEDUSA_POOL_SECRET",
            metavar="SECRET|FILE",
            help="Signs what is shared: nobody without it can write what is read. [default: not signed]",
        ),
    ] = None
    pool_lifetime: Annotated[
        float, typer.Option("--pool-lifetime", min=1.0, metavar="SECONDS", help="Of what is shared.")
    ] = 86400.0

    def settings(self) -> "PoolSettings | None":
        """As the server takes them. Raises DataError."""
        from medusa_cli.serve.pools import PoolSettings

        secrets = _keys(self.pool_secret, "secret")
        return PoolSettings.of(self.prefix_pool, secrets[0].encode() if secrets else None, self.pool_lifetime)


def command(
    *,
    listening: Listening,
    rows: Rows,
    pool: Pool,
    target: options.Target,
    guessing: options.Guessing,
    drafter: Annotated[
        str | None, options.drafter("Who guesses. [default: mixed where heads are known, else suffix]")
    ] = None,
    threads: options.Threads = None,
    config: options.Config = None,
    log_format: Annotated[
        Literal["text", "json"], typer.Option("--log-format", help="One line a request on stderr, as words or as JSON.")
    ] = "text",
    quiet: options.Quiet = False,
) -> None:
    """Serve the model over HTTP as OpenAI's API does; every reply is word for word the model's own."""
    from medusa_cli.assemble import check_choice, find_heads, load_drafter, load_target_for
    from medusa_cli.config.loading import load_recipe
    from medusa_cli.util.optional import need

    for package in ("fastapi", "uvicorn", "prometheus_client"):
        need(package, "serve")
    from medusa_cli.serve.run import Serving, serve

    recipe = load_recipe(config, (), target)
    if guessing.suffix_memory is not None:
        raise typer.BadParameter("--suffix-memory would copy one client's replies for another: leave it out of serve")
    policy, pool_settings = listening.policy(), pool.settings()
    if drafter is None and guessing.heads is None and find_heads(None, recipe.target.model) is None:
        drafter = "suffix"
    choice = guessing.choice(drafter)
    check_choice(choice, recipe.target.model)
    console = Console(quiet=quiet or log_format == "json")
    _log_lines(log_format == "json", quiet, console)

    def load() -> "tuple[Target, Drafter]":
        found = load_target_for(choice, recipe.target)
        return found, load_drafter(choice, found)

    def say_open() -> None:
        _warn(listening, console)
        health = f"http://{listening.host}:{listening.port}/health"
        console.info(f"loading {recipe.target.model}; {health} says when it is done")

    serving = Serving(
        load,
        say_open,
        listening.host,
        listening.port,
        policy,
        rows.served_model_name,
        rows.max_model_len,
        rows.max_num_seqs,
        rows.max_queue,
        pool_settings,
    )

    def say_ready(service: "Service") -> None:
        _say(service, listening, console)
        if log_format == "json":
            logger.info("ready", extra={"fields": {"model": service.name, "drafter": service.drafter}})

    serve(serving, say_ready)


def _log_lines(is_json: bool, quiet: bool, console: Console) -> None:
    """Requests, and what else the program reports, a line each."""
    from medusa_cli.serve.request_log import LineHandler

    def show(level: int, line: str) -> None:
        (console.warn if level >= logging.WARNING else console.info)(line)

    reports = logging.getLogger("medusa_cli")
    reports.handlers = [LineHandler(sys.stderr if is_json else None, show)]
    reports.setLevel(logging.WARNING if quiet else logging.INFO)


def _say(service: "Service", listening: Listening, console: Console) -> None:
    where = f"http://{listening.host}:{listening.port}/v1"
    console.info(f"{service.name} is served at {where}, drafter {service.drafter}; Ctrl-C ends it once texts are done")
    if listening.page:
        console.info(f"a page to chat on: http://{listening.host}:{listening.port}/")


def _warn(listening: Listening, console: Console) -> None:
    """Say what is open to others."""
    if listening.host not in ("127.0.0.1", "localhost", "::1") and not listening.api_key:
        console.warn(f"{listening.host} can be reached from other machines, and no --api-key is asked for")


def _keys(given: str | None, noun: str = "key") -> Sequence[str]:
    """The keys themselves, or those in a file."""
    if not given:
        return ()
    file = Path(given)
    if not (os.sep in given or file.is_file()):
        return (given,)
    try:
        keys = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the file of {noun}s can't be read: {error}", f"name a text file with a {noun} on each line"
        ) from error
    if not keys:
        raise DataError(f"{file} holds no {noun}", "write one on each line")
    return keys

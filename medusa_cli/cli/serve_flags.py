"""Flags of `medusa serve`, by what they are about."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from medusa_cli.serve.policy import Policy
    from medusa_cli.serve.pools import PoolSettings


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
    otel: Annotated[
        bool, typer.Option("--otel", help="A span for each request, sent as OpenTelemetry's OTEL_* variables say.")
    ] = False

    def policy(self) -> "Policy":
        """As the application takes it. Raises DataError for a file of keys without any, and as `check_traces`."""
        from medusa_cli.serve.keys import keys_of
        from medusa_cli.serve.policy import Policy, digest_of
        from medusa_cli.serve.traces import check_traces

        if self.otel:
            check_traces()
        return Policy(
            keys=[digest_of(key) for key in keys_of(self.api_key)],
            body_bytes=self.max_body_bytes,
            timeout_s=self.timeout,
            origins=self.allow_origin or (),
            has_metrics=self.metrics,
            has_page=self.page,
            has_traces=self.otel,
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
        from medusa_cli.serve.keys import keys_of
        from medusa_cli.serve.pools import PoolSettings

        secrets = keys_of(self.pool_secret, "secret")
        return PoolSettings.of(self.prefix_pool, secrets[0].encode() if secrets else None, self.pool_lifetime)


@dataclass(frozen=True)
class Spread:
    """How many engines, under Ray Serve."""

    ray: Annotated[bool, typer.Option("--ray", help="Several engines side by side, under Ray Serve.")] = False
    replicas: Annotated[
        str | None,
        typer.Option(
            "--replicas",
            metavar="N|A..B",
            help="Engines of --ray; 2..8: as many as requests ask for. [default: 2]",
        ),
    ] = None

    def check(self) -> None:
        """Raise BadParameter for what can't be."""
        if self.replicas is None:
            return
        if not self.ray:
            raise typer.BadParameter("--replicas needs --ray")
        from medusa_cli.serve.ray_app import spread_of

        try:
            spread_of(self.replicas)
        except ValueError as error:
            raise typer.BadParameter(f"--replicas {self.replicas}: {error}") from error

"""`medusa serve`: an OpenAI-compatible server whose every reply is the model's own."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from medusa_cli.cli import options
from medusa_cli.cli.console import Console

if TYPE_CHECKING:
    from medusa_cli.assemble import DrafterChoice
    from medusa_cli.config.recipe import TargetSettings
    from medusa_cli.contracts import Drafter
    from medusa_cli.model.target import Target
    from medusa_cli.serve.app import Policy


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

    def policy(self) -> "Policy":
        """As the application takes it. Raises DataError for a file of keys without any."""
        from medusa_cli.serve.app import Policy, digest_of
        from medusa_cli.serve.keys import keys_of

        return Policy(
            keys=[digest_of(key) for key in keys_of(self.api_key)],
            body_bytes=self.max_body_bytes,
            timeout_s=self.timeout,
            origins=self.allow_origin or (),
            has_metrics=self.metrics,
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


def command(
    *,
    listening: Listening,
    rows: Rows,
    spread: Spread,
    target: options.Target,
    guessing: options.Guessing,
    drafter: Annotated[
        str | None, options.drafter("Who guesses. [default: mixed where heads are known, else suffix]")
    ] = None,
    threads: options.Threads = None,
    config: options.Config = None,
    quiet: options.Quiet = False,
) -> None:
    """Serve the model over HTTP as OpenAI's API does; every reply is word for word the model's own."""
    from medusa_cli.assemble import check_choice
    from medusa_cli.config.loading import load_recipe
    from medusa_cli.util.optional import need

    spread.check()
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        need(package, "serve")
    from medusa_cli.serve.run import serving_choice

    recipe = load_recipe(config, (), target)
    if guessing.suffix_memory is not None:
        raise typer.BadParameter("--suffix-memory would copy one client's replies for another: leave it out of serve")
    choice = serving_choice(guessing.choice(drafter), recipe.target.model)
    check_choice(choice, recipe.target.model)
    console = Console(quiet=quiet)
    if spread.ray:
        _serve_replicas(listening, rows, spread, _Engine(recipe.target, choice, threads), console)
    else:
        _serve_one(listening, rows, _Engine(recipe.target, choice, threads), console)


@dataclass(frozen=True)
class _Engine:
    """What writes."""

    target: "TargetSettings"
    choice: "DrafterChoice"
    threads: int | None


def _serve_one(listening: Listening, rows: Rows, engine: _Engine, console: Console) -> None:
    """One engine, in this process."""
    from medusa_cli.assemble import load_drafter, load_target_for
    from medusa_cli.serve.run import Serving, serve

    def load() -> "tuple[Target, Drafter]":
        found = load_target_for(engine.choice, engine.target)
        return found, load_drafter(engine.choice, found)

    serving = Serving(
        load,
        lambda: _say_open(engine.target.model, listening, console),
        listening.host,
        listening.port,
        listening.policy(),
        rows.served_model_name,
        rows.max_model_len,
        rows.max_num_seqs,
        rows.max_queue,
    )
    serve(serving, lambda service: _say(service.name, f"drafter {service.drafter}", listening, console))


def _serve_replicas(listening: Listening, rows: Rows, spread: Spread, engine: _Engine, console: Console) -> None:
    """Several engines, under Ray Serve."""
    from medusa_cli.serve.ray_app import RaySettings, checked
    from medusa_cli.serve.ray_run import RayServing, need_ray, serve_on_ray

    need_ray()
    choice, replicas = engine.choice, spread.replicas or "2"
    given = dict(
        target=engine.target,
        drafter=choice.name,
        heads=choice.heads,
        tree=choice.tree,
        tree_size=choice.tree_size,
        speculate=choice.speculate,
        draft_model=choice.wishes.draft_model,
        drafter_errors=choice.wishes.errors,
        served_model_name=rows.served_model_name,
        max_model_len=rows.max_model_len,
        max_num_seqs=rows.max_num_seqs,
        max_queue=rows.max_queue,
        replicas=replicas,
        threads=engine.threads,
    )
    serving = RayServing(
        checked(RaySettings, given),
        lambda: _say_open(engine.target.model, listening, console),
        listening.host,
        listening.port,
        listening.policy(),
    )
    name = rows.served_model_name or engine.target.model
    serve_on_ray(serving, lambda: _say(name, f"{replicas} replicas", listening, console))


def _say_open(model: str, listening: Listening, console: Console) -> None:
    """Say what is open to others, and that it loads."""
    if listening.host not in ("127.0.0.1", "localhost", "::1") and not listening.api_key:
        console.warn(f"{listening.host} can be reached from other machines, and no --api-key is asked for")
    health = f"http://{listening.host}:{listening.port}/health"
    console.info(f"loading {model}; {health} says when it is done")


def _say(name: str, how: str, listening: Listening, console: Console) -> None:
    where = f"http://{listening.host}:{listening.port}/v1"
    console.info(f"{name} is served at {where}, {how}; Ctrl-C ends it once texts are done")

"""`medusa serve`: an OpenAI-compatible server whose every reply is the model's own."""

import logging
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from medusa_cli.cli import options
from medusa_cli.cli.console import Console
from medusa_cli.cli.serve_flags import Listening, Pool, Rows, Spread

if TYPE_CHECKING:
    from medusa_cli.assemble import DrafterChoice
    from medusa_cli.config.recipe import TargetSettings
    from medusa_cli.contracts import Drafter
    from medusa_cli.model.target import Target

logger = logging.getLogger(__name__)


def command(
    *,
    listening: Listening,
    rows: Rows,
    pool: Pool,
    spread: Spread,
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
    console = Console(quiet=quiet or log_format == "json")
    engine = _Engine(recipe.target, choice, threads)
    with _log_lines(log_format == "json", quiet, console):
        if spread.ray:
            _serve_replicas(listening, rows, pool, spread, engine, console)
        else:
            _serve_one(listening, rows, pool, engine, console)


def _log_lines(is_json: bool, quiet: bool, console: Console) -> AbstractContextManager[None]:
    """Requests, and what else the program reports, a line each."""
    from medusa_cli.serve.request_log import LineHandler, log_lines

    def show(level: int, line: str) -> None:
        (console.warn if level >= logging.WARNING else console.info)(line)

    return log_lines(LineHandler(sys.stderr if is_json else None, show), logging.WARNING if quiet else logging.INFO)


@dataclass(frozen=True)
class _Engine:
    """What writes."""

    target: "TargetSettings"
    choice: "DrafterChoice"
    threads: int | None


def _serve_one(listening: Listening, rows: Rows, pool: Pool, engine: _Engine, console: Console) -> None:
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
        pool.settings(),
    )
    serve(serving, lambda service: _say(service.name, f"drafter {service.drafter}", listening, console))


def _serve_replicas(
    listening: Listening, rows: Rows, pool: Pool, spread: Spread, engine: _Engine, console: Console
) -> None:
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
        prefix_pool=pool.prefix_pool,
        pool_secret=pool.pool_secret,
        pool_lifetime=pool.pool_lifetime,
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
        logger.warning(f"{listening.host} can be reached from other machines, and no --api-key is asked for")
    if console.quiet:  # lines of JSON, or none
        logger.info("loading", extra={"fields": {"model": model}})
    health = f"http://{listening.host}:{listening.port}/health"
    console.info(f"loading {model}; {health} says when it is done")


def _say(name: str, how: str, listening: Listening, console: Console) -> None:
    if console.quiet:  # lines of JSON, or none
        logger.info("ready", extra={"fields": {"model": name, "how": how}})
    where = f"http://{listening.host}:{listening.port}"
    console.info(f"{name} is served at {where}/v1, {how}; Ctrl-C ends it once texts are done")
    if listening.page:
        console.info(f"a page to chat on: {where}/")

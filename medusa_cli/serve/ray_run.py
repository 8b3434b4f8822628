"""`medusa serve --ray`: the front in this process, replicas in a Ray of its own or the one that RAY_ADDRESS names."""

import asyncio
import importlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from medusa_cli.errors import DataError, MissingExtra, TargetError
from medusa_cli.serve.app import Policy
from medusa_cli.serve.front import make_front
from medusa_cli.serve.ray_app import ENGINE, FAULT, RayReplicas, RaySettings, engines, spread_of
from medusa_cli.serve.run import Life, run_app
from medusa_cli.util.busy import cores
from medusa_cli.util.optional import extra_hint, need

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

NAME = "medusa"  # of the application, in Ray
STORE_BYTES = 128 * 2**20  # of shared memory that Ray sets aside: answers are small and hardly use it


@dataclass(frozen=True)
class RayServing:
    """What is served, and where. on_open: told that the port is open and replicas begin to load."""

    settings: RaySettings
    on_open: Callable[[], None]
    host: str
    port: int
    policy: Policy


def serve_on_ray(serving: RayServing, on_ready: Callable[[], None]) -> None:
    """Serve until a signal ends it, and end the replicas.

    Raises DataError where the port or Ray can't be had, and TargetError where a replica can't load.
    """
    replicas = RayReplicas()

    async def load() -> None:
        replicas.handle = await asyncio.to_thread(_run, serving)
        on_ready()

    async def end() -> None:
        await asyncio.to_thread(_end)

    life = Life(load, end, serving.on_open, lambda _: None)
    run_app(lambda begin, end: make_front(serving.policy, replicas, begin, end), serving.host, serving.port, life)


def need_ray() -> None:
    """Raise MissingExtra where Ray, or the part of it that serves, is not installed."""
    need("ray", "ray")
    try:
        importlib.import_module("ray.serve")
    except ImportError as error:
        raise MissingExtra(f"this needs the package 'ray[serve]': {error.msg}", extra_hint("ray")) from error


def _run(serving: RayServing) -> "DeploymentHandle[Any]":
    """The handle of replicas that run."""
    _start(serving.settings)
    return _deploy(serving.settings.model_copy(update={"gpus": _gpus(serving.settings)}), serving.policy)


def _gpus(settings: RaySettings) -> float:
    """Of each replica; they share where there are fewer. Raises DataError where a GPU is wanted and none is there."""
    import ray

    there = ray.cluster_resources().get("GPU", 0.0)
    if settings.target.device not in ("auto", "cuda"):
        return 0.0
    if settings.target.device == "cuda" and not there:
        raise DataError("--device cuda: Ray has no GPU", "use --device auto or cpu")
    return min(1.0, there / spread_of(settings.replicas)[1])


def _start(settings: RaySettings) -> None:
    """Connect to Ray, or start one. Raises DataError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
    import ray
    from ray import serve
    from ray.serve.schema import LoggingConfig

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    address = os.environ.get("RAY_ADDRESS")
    most = spread_of(settings.replicas)[1]
    own = {} if address else {
        "num_cpus": max(cores(), ceil(most * settings.cpus) + 1),
        "object_store_memory": STORE_BYTES,
        "include_dashboard": False,
    }  # fmt: skip
    try:
        ray.init(address=address or "local", logging_level="warning", namespace="serve", **own)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        hint = "unset RAY_ADDRESS to start Ray here" if address else "is there memory for Ray, and room in /tmp/ray?"
        raise DataError(f"Ray can't be had{f' at {address}' if address else ''}: {_line(error)}", hint) from error
    if address and NAME in _running():
        raise DataError(
            f"an application named '{NAME}' runs in the Ray at {address}",
            f"end it first (serve delete {NAME}), or unset RAY_ADDRESS",
        )
    serve.start(proxy_location="Disabled", logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False))


def _running() -> "set[str]":
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        return set(serve.status().applications)
    except RayServeException:
        return set()


def _deploy(settings: RaySettings, policy: Policy) -> "DeploymentHandle[Any]":
    """The handle of replicas that run. Raises TargetError where none can."""
    from ray import serve

    try:
        serve.run(engines(settings, policy), name=NAME, route_prefix=None)
    except RuntimeError as error:
        _, found, told = str(error).partition(FAULT)
        if not found:
            raise
        message, _, hint = told.partition("\n")[0].rpartition(" (")
        raise TargetError(message, hint.removesuffix(")")) from error
    return serve.get_deployment_handle(ENGINE, NAME)


def _end() -> None:
    """End the application, and Ray where it is ours."""
    import ray
    from ray import serve

    if not ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        if NAME in _running():
            serve.delete(NAME)
    else:
        serve.shutdown()
    ray.shutdown()


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__

"""`medusa serve --ray`: the front in this process, replicas in a Ray of its own or the one that RAY_ADDRESS names."""

import asyncio
import importlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from medusa_cli.errors import DataError, MissingExtra, TargetError
from medusa_cli.model.loading.sources import find_source
from medusa_cli.serve.front import make_front
from medusa_cli.serve.policy import Policy
from medusa_cli.serve.ray_app import ENGINE, FAULT, RayReplicas, RaySettings, engines, spread_of
from medusa_cli.serve.run import Life, run_app
from medusa_cli.util.busy import cores
from medusa_cli.util.optional import extra_hint, need

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

NAME = "medusa"  # of the application, in Ray
STORE_BYTES = 128 * 2**20  # of shared memory that Ray sets aside: answers are small and hardly use it
CONNECT_S = 5.0


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
    replicas, ray = RayReplicas(), _Ray(_address())

    async def load() -> None:
        if ray.address is None:
            find_source(serving.settings.target.model)  # a name that nobody knows is told before Ray starts
        with _signals_kept():
            await asyncio.to_thread(ray.start, serving.settings)
        replicas.handle = await asyncio.to_thread(ray.deploy, serving.settings, serving.policy)
        on_ready()

    async def end() -> None:
        await asyncio.to_thread(ray.end)

    life = Life(load, end, serving.on_open, lambda _: None)
    run_app(lambda begin, end: make_front(serving.policy, replicas, begin, end), serving.host, serving.port, life)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Signals end the server as before: Ray's core takes SIGTERM for itself and would break off everything."""
    kept = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in kept.items():
            signal.signal(each, handler)


def need_ray() -> None:
    """Raise MissingExtra where Ray, or the part of it that serves, is not installed."""
    need("ray", "ray")
    try:
        importlib.import_module("ray.serve")
    except ImportError as error:
        raise MissingExtra(f"this needs the package 'ray[serve]': {error.msg}", extra_hint("ray")) from error


def _check_somebody_is_there(address: str) -> None:
    """Raise DataError for an address where nobody listens: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():  # a name that Ray resolves: auto
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise DataError(f"Ray can't be had at {address}: {_line(error)}", "unset RAY_ADDRESS to start one") from error


def _address() -> str | None:
    """Of the Ray that is to be joined; None: one is started."""
    given = os.environ.get("RAY_ADDRESS")
    return None if given in (None, "", "local") else given


class _Ray:
    """The Ray at an address, or one of our own where there is none, and what we run in it."""

    def __init__(self, address: str | None) -> None:
        self.address = address
        self._is_deployed = False

    def start(self, settings: RaySettings) -> None:
        """Connect, or start one. Raises DataError."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
        import ray
        from ray import serve
        from ray.serve.schema import LoggingConfig

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        if self.address is not None:
            _check_somebody_is_there(self.address)
        own = {} if self.address else _sizes(settings)
        where = f" at {self.address}" if self.address else ""
        try:
            ray.init(self.address or "local", logging_level="error", log_to_driver=False, namespace="serve", **own)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            hint = (
                "has this process its token? unset RAY_ADDRESS to start one"
                if self.address
                else "is there memory for it, and room in /tmp/ray?"
            )
            raise DataError(f"Ray can't be had{where}: {_line(error)}", hint) from error
        if NAME in _running():
            raise DataError(
                f"an application named '{NAME}' runs in the Ray{where}",
                f"end it first (serve delete {NAME}), or unset RAY_ADDRESS",
            )
        quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
        serve.start(proxy_location="Disabled", logging_config=quiet)

    def deploy(self, settings: RaySettings, policy: Policy) -> "DeploymentHandle[Any]":
        """The handle of replicas that run. Raises TargetError where none can."""
        from ray import serve

        self._is_deployed = True
        placed = settings.model_copy(update={"gpus": _gpus_of_each(settings)})
        try:
            serve.run(engines(placed, policy), name=NAME, route_prefix=None)
        except RuntimeError as error:
            raise _fault(str(error)) from error
        return serve.get_deployment_handle(ENGINE, NAME)

    def end(self) -> None:
        """End the application, and Ray where it is ours."""
        import ray
        from ray import serve

        if not ray.is_initialized():
            return
        if self.address is None:
            serve.shutdown()
        elif self._is_deployed:
            serve.delete(NAME)
        ray.shutdown()


def _sizes(settings: RaySettings) -> dict[str, Any]:
    """Of a Ray of our own. Its processors are what it counts with: all replicas have room, however few there are."""
    most = spread_of(settings.replicas)[1]
    return {
        "num_cpus": max(cores(), ceil(most * settings.cpus) + 1),
        "object_store_memory": STORE_BYTES,
        "include_dashboard": False,
    }


def _gpus_of_each(settings: RaySettings) -> float:
    """What a replica gets; they share where there are fewer. Raises DataError where replicas would wait for ever."""
    import ray

    there, (least, most) = ray.cluster_resources(), spread_of(settings.replicas)
    if least * settings.cpus > there.get("CPU", 0.0):
        raise DataError(
            f"{least} replicas ask for {least * settings.cpus:g} processors, and Ray has {there.get('CPU', 0.0):g}",
            "ask for fewer --replicas",
        )
    if settings.target.device not in ("auto", "cuda"):
        return 0.0
    if settings.target.device == "cuda" and not there.get("GPU"):
        raise DataError("--device cuda: Ray has no GPU", "use --device auto or cpu")
    return min(1.0, there.get("GPU", 0.0) / most)


def _running() -> set[str]:
    """Names of the applications there."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        return set(serve.status().applications)
    except RayServeException:
        return set()


def _fault(told: str) -> TargetError:
    """What keeps replicas from starting, in the words of the first."""
    from ray import serve

    deployments = [app.deployments for name, app in serve.status().applications.items() if name == NAME]
    said = [told, *(each.message for found in deployments for each in found.values())]
    _, found, words = "\n".join(said).partition(FAULT)
    if not found:
        logs = os.path.join(os.environ.get("RAY_TMPDIR", "/tmp"), "ray/session_latest/logs/serve")
        return TargetError(f"no replica starts: {said[-1].partition(chr(10))[0]}", f"Ray's logs say why: {logs}")
    message, _, hint = words.partition("\n")[0].rpartition(" (")
    return TargetError(message, hint.removesuffix(")"))


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__

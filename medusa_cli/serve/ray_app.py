"""Replicas under Ray Serve: `serve run medusa_cli.serve.ray_app:app model=smollm2-135m replicas=2..4`.

Each replica loads its own model from plain settings. `app` puts the front behind Ray's proxy; `medusa serve --ray`
(ray_run.py) runs the front in its own process.
"""

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from fastapi import FastAPI
from pydantic import Field, ValidationError, field_validator, model_validator

from medusa_cli.assemble import DrafterChoice, check_choice, load_drafter, load_target_for
from medusa_cli.config.loading import load_recipe
from medusa_cli.config.recipe import TargetSettings
from medusa_cli.config.settings import Settings
from medusa_cli.drafters.source import Wishes
from medusa_cli.errors import MedusaError, RecipeError
from medusa_cli.serve.front import Full, Lost, Unready, make_front
from medusa_cli.serve.keys import keys_of
from medusa_cli.serve.policy import Policy, digest_of
from medusa_cli.serve.pools import PoolSettings
from medusa_cli.serve.replica import DRAIN_S, Ask, Piece, Replica
from medusa_cli.serve.run import Serving, load_service, serving_choice
from medusa_cli.util.busy import cores
from medusa_cli.util.threads import use_threads

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle

MOST_REPLICAS = 64
ENGINE, FRONT = "engine", "front"  # names of the deployments
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
AHEAD = 2  # requests that a replica holds beside its rows, so that a row that gets free is filled at once
FAULT = "medusa can't load: "  # before what a user can mend, in what Ray says of a replica that doesn't start


class RaySettings(Settings):
    """What is served by how many replicas; as `serve run` takes it, NAME=VALUE.

    replicas   a number, or LEAST..MOST: as many as the requests that are under way ask for
    threads    of each replica on a CPU; none: the machine's cores, shared
    cpus       that Ray sets aside for each replica
    gpus       the same; part of one where replicas share it
    api_key    a key, or a file with one on each line
    """

    target: TargetSettings = TargetSettings()
    drafter: str | None = None
    heads: str | None = None
    tree: str | None = None
    tree_size: int | None = None
    speculate: Literal["auto", "on", "off"] = "auto"
    draft_model: str | None = None
    drafter_errors: Literal["warn", "raise"] = "warn"
    served_model_name: str | None = None
    max_model_len: Annotated[int, Field(ge=16)] | None = None
    max_num_seqs: int = Field(8, ge=1, le=1024)
    max_queue: int = Field(256, ge=0)
    prefix_pool: str = "memory:1GB"
    pool_secret: str | None = Field(None, repr=False)
    pool_lifetime: float = Field(86400.0, ge=1)
    replicas: str = "1"
    threads: Annotated[int, Field(ge=1)] | None = None
    cpus: float = Field(0.5, ge=0)
    gpus: float = Field(0.0, ge=0)

    @field_validator("replicas")
    @classmethod
    def _are_some(cls, given: str) -> str:
        spread_of(given)
        return given

    @property
    def choice(self) -> DrafterChoice:
        """Who guesses."""
        wishes = Wishes(self.draft_model, self.drafter_errors)
        choice = DrafterChoice(self.drafter, self.heads, self.tree, self.tree_size, self.speculate, wishes)
        return serving_choice(choice, self.target.model)

    @model_validator(mode="after")
    def _names_no_gpu(self) -> "RaySettings":
        if self.target.device.startswith("cuda:"):
            raise ValueError(f"Ray hands out the GPUs: write device cuda instead of {self.target.device}")
        return self

    @property
    def pool(self) -> PoolSettings | None:
        """What each replica keeps of prompts; through Redis they share it. Raises DataError."""
        secrets = keys_of(self.pool_secret, "secret")
        return PoolSettings.of(self.prefix_pool, secrets[0].encode() if secrets else None, self.pool_lifetime)

    def anywhere(self) -> "RaySettings":
        """The same for a process that runs in another folder."""
        model = self.target.model_copy(update={"model": _whole_path(self.target.model)})
        paths = {name: _whole_path(getattr(self, name)) for name in ("heads", "tree", "draft_model")}
        return self.model_copy(update={"target": model, **paths})


def _whole_path(name: str | None) -> str | None:
    return str(Path(name).absolute()) if name is not None and Path(name).exists() else name


Kind = TypeVar("Kind", bound=RaySettings)


def checked(kind: type[Kind], given: Mapping[str, Any]) -> Kind:
    """The settings. Raises RecipeError naming the first that is wrong."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, fault["loc"]))
        told = fault["msg"].removeprefix("Value error, ")
        names = ", ".join((*TargetSettings.model_fields, *(name for name in kind.model_fields if name != "target")))
        raise RecipeError(f"{where}: {told}" if where else told, f"settings are {names}") from error


def spread_of(replicas: str) -> tuple[int, int]:
    """(least, most) replicas. Raises ValueError."""
    found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", replicas.strip(), re.ASCII)
    if found is None:
        raise ValueError("write a number of replicas, as 2, or the least and the most, as 2..8")
    least, most = int(found[1]), int(found[2] or found[1])
    if not 1 <= least <= most <= MOST_REPLICAS:
        raise ValueError(f"there can be 1 to {MOST_REPLICAS} replicas, the least first")
    return least, most


class Engine(Replica):
    """A replica that Ray starts, and ends when it is unhealthy or not needed."""

    def __init__(self, settings: Mapping[str, Any], policy: Policy) -> None:
        """settings: RaySettings as plain values."""
        found = RaySettings.model_validate(settings)
        use_threads(found.threads or max(1, cores() // spread_of(found.replicas)[1]))
        choice = found.choice

        def load() -> Any:
            target = load_target_for(choice, found.target)
            return target, load_drafter(choice, target)

        serving = Serving(
            load,
            lambda: None,
            "",
            0,
            policy,
            found.served_model_name,
            found.max_model_len,
            found.max_num_seqs,
            found.max_queue + AHEAD,
            found.pool,
        )
        try:
            super().__init__(load_service(serving), policy)
        except MedusaError as error:  # it takes two words to make, and travels as one
            raise RuntimeError(f"{FAULT}{error.message} ({error.hint})") from None

    async def counted(self) -> tuple[str, str]:
        """Its name, and what it has counted."""
        from ray.serve import get_replica_context

        return get_replica_context().replica_id.unique_id, self.metrics()

    def __del__(self) -> None:
        """Ray calls it once the requests are done."""
        if hasattr(self, "_state"):
            self.close()


class RayReplicas:
    """The replicas behind a handle; None until they run."""

    def __init__(self, handle: "DeploymentHandle[Any] | None" = None) -> None:
        self.handle = handle
        self._leaving: set[asyncio.Task[Any]] = set()

    async def ask(self, ask: Ask, key: str) -> AsyncGenerator[Piece, None]:
        """As `Replicas`. Raises Lost, Full, Unready."""
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

        if self.handle is None:
            raise Unready
        answer = self.handle.options(stream=True, session_id=key).answer.remote(ask)
        is_done = False
        try:
            async for piece in answer:
                yield piece
            is_done = True
        except (RayActorError, ReplicaUnavailableError) as error:
            is_done = True
            raise Lost from error
        except BackPressureError as error:
            is_done = True
            raise Full from error
        except DeploymentUnavailableError as error:
            is_done = True
            raise Unready from error
        finally:
            if not is_done:
                answer.cancel()
                self._leave(self.handle, ask.id)

    def _leave(self, handle: "DeploymentHandle[Any]", id: str) -> None:
        """Tell all replicas that nobody waits: Ray may miss a request that is left while it is being handed over."""
        telling = asyncio.ensure_future(_told_by_all(handle, "leave", id))
        self._leaving.add(telling)
        telling.add_done_callback(self._leaving.discard)

    async def running(self) -> int:
        """As `Replicas`, and as Ray's controller knows it: a replica that hangs holds up nobody who asks."""
        return 0 if self.handle is None else await asyncio.to_thread(_running, self.handle)

    async def metrics(self) -> Mapping[str, str]:
        """As `Replicas`."""
        return {} if self.handle is None else dict(await _told_by_all(self.handle, "counted"))


def _running(handle: "DeploymentHandle[Any]") -> int:
    from ray import serve

    app = serve.status().applications.get(handle.app_name)
    return app.deployments[handle.deployment_name].replica_states.get("RUNNING", 0) if app is not None else 0


async def _told_by_all(handle: "DeploymentHandle[Any]", method: str, *values: Any) -> list[Any]:
    """What each replica that runs answers within seconds."""
    from ray.serve.exceptions import DeploymentUnavailableError

    try:
        told = await handle.broadcast(method, *values).results_async(timeout_s=5.0, return_exceptions=True)
    except (TimeoutError, DeploymentUnavailableError):
        return []
    return [each for each in told if not isinstance(each, BaseException)]


class FrontDeployment:
    """The front as a deployment, behind Ray's proxy."""

    def __init__(self, engines: "DeploymentHandle[Any]", policy: Policy) -> None:
        self._engines, self._policy = engines, policy

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray once this is made."""

        async def nothing() -> None: ...

        return make_front(self._policy, RayReplicas(self._engines), nothing, nothing)


def engines(settings: RaySettings, policy: Policy) -> "Application":
    """The replicas as an application of Ray Serve, to be asked by its handle."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig
    from ray.serve.schema import LoggingConfig

    least, most = spread_of(settings.replicas)
    # a replica is added before all rows are taken
    wished = max(1.0, settings.max_num_seqs * 0.75)
    scaling = AutoscalingConfig(min_replicas=least, max_replicas=most, target_ongoing_requests=wished)
    many = {"num_replicas": least} if least == most else {"autoscaling_config": scaling}
    deployed = serve.deployment(Engine).options(
        name=ENGINE,
        max_ongoing_requests=settings.max_num_seqs + AHEAD,
        max_queued_requests=max(1, settings.max_queue),
        max_constructor_retry_count=1,  # what can't load is told soon; once one has run, Ray goes on trying
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=DRAIN_S + 30.0,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
        request_router_config=RequestRouterConfig(request_router_class=ROUTER, max_backoff_s=0.1),
        **many,
    )
    return deployed.bind(settings.anywhere().model_dump(mode="json"), policy)


class RunSettings(RaySettings):
    """What `serve run` may be given."""

    api_key: str | None = None
    allow_origin: str | None = None
    max_body_bytes: int = Field(Policy.body_bytes, ge=1024)
    timeout: float = Field(Policy.timeout_s, ge=1)
    metrics: bool = True


def app(settings: dict[str, str]) -> "Application":
    """The whole application, for `serve run`; a setting of the target goes by its own name: model, dtype."""
    from ray import serve

    of_target = {name: value for name, value in settings.items() if name in TargetSettings.model_fields}
    recipe = load_recipe(None, (), {f"target.{name}": value for name, value in of_target.items()})
    rest = {name: value for name, value in settings.items() if name not in of_target}
    found = checked(RunSettings, {"target": recipe.target, **rest})
    check_choice(found.choice, found.target.model)
    policy = Policy(
        keys=[digest_of(key) for key in keys_of(found.api_key or os.environ.get("MEDUSA_API_KEY"))],
        body_bytes=found.max_body_bytes,
        timeout_s=found.timeout,
        origins=found.allow_origin.split(",") if found.allow_origin else (),
        has_metrics=found.metrics,
    )
    plain = RaySettings.model_validate({name: getattr(found, name) for name in RaySettings.model_fields})
    front = serve.deployment(serve.ingress()(FrontDeployment))
    most = spread_of(found.replicas)[1] * (found.max_num_seqs + AHEAD) + found.max_queue
    deployed = front.options(name=FRONT, max_ongoing_requests=most + 64, ray_actor_options={"num_cpus": 0.1})
    return deployed.bind(engines(plain, policy), policy)

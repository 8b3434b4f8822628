"""The HTTP application: its routes, and errors in OpenAI's form. What requests mean is service.py's."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException

from medusa_cli.serve.answers import answer
from medusa_cli.serve.errors import ApiError
from medusa_cli.serve.policy import Policy, State, digest_of, service_for
from medusa_cli.serve.request_log import SILENT, RequestLog
from medusa_cli.serve.schema import ChatRequest, CompletionRequest
from medusa_cli.serve.service import Service
from medusa_cli.serve.traces import settings_of
from medusa_cli.serve.web_page import make_page


def make_app(state: State, on_start: Callable[[], Awaitable[None]], on_end: Callable[[], Awaitable[None]]) -> FastAPI:
    """The application; `on_start` begins to load, `on_end` lets texts end."""

    app = bare_app(state.policy, on_start, on_end)
    _add_routes(app, state)
    return app


def bare_app(policy: Policy, on_start: Callable[[], Awaitable[None]], on_end: Callable[[], Awaitable[None]]) -> FastAPI:
    """An application without routes: who may call from where, and errors in OpenAI's form."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await on_start()
        yield
        await on_end()

    # an older FastAPI, which makes no spans, takes these settings and ignores them
    traces: Any = {"telemetry": settings_of(policy.has_traces, SILENT)}
    app = FastAPI(title="medusa", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, **traces)
    # a redirection names whatever host the request named
    app.router.redirect_slashes = False
    if policy.origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(policy.origins), allow_methods=["*"], allow_headers=["*"])

    def is_key(word: str) -> bool:
        return digest_of(word) in policy.keys

    app.add_middleware(RequestLog, is_key=is_key, has_traces=policy.has_traces)
    _add_errors(app)
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return JSONResponse(error.document(), error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        told = {404: "there is nothing here", 405: "this method is not allowed here"}.get(error.status_code)
        return JSONResponse(ApiError(error.status_code, told or str(error.detail)).document(), error.status_code)


def _add_routes(app: FastAPI, state: State) -> None:
    @app.get("/health")
    async def health() -> Response:
        ready = state.service is not None and state.service.worker.is_alive
        told = state.fault or ("ok" if ready else "loading" if state.service is None else "ending")
        return JSONResponse({"status": told}, 200 if ready else 503)

    if state.policy.has_metrics:

        @app.get("/metrics")
        async def metrics() -> Response:
            text, kind = state.metrics.text(state.service)
            return Response(text, media_type=kind)

    if state.policy.has_page:
        front = make_page()

        @app.api_route("/", methods=["GET", "HEAD"])
        async def page() -> Response:
            return HTMLResponse(front.html, headers=front.headers)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        service = service_for(state, request)
        return JSONResponse({"object": "list", "data": [_model(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> Response:
        service = service_for(state, request)
        service.check_model(name)
        return JSONResponse(_model(service))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(state, request, ChatRequest)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(state, request, CompletionRequest)


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "medusa",
        "max_model_len": service.max_model_len,
    }

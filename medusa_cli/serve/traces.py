"""Traces: an OpenTelemetry span for each request, with its tokens. FastAPI makes and sends spans; this says which."""

import os
from collections.abc import Mapping
from typing import Any

from medusa_cli.errors import DataError

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def check_traces() -> None:
    """Raise MissingExtra without the packages, DataError where no variable says where spans go."""
    from medusa_cli.util.optional import need

    need("opentelemetry.exporter.otlp.proto.http", "otel")
    need("fastapi.telemetry", "otel")
    if not any(os.environ.get(name) for name in ENDPOINTS):
        raise DataError("--otel doesn't say where spans go", f"set {ENDPOINTS[1]}, such as http://127.0.0.1:4318")


def settings_of(has_traces: bool, silent: tuple[str, ...]) -> dict[str, Any]:
    """What FastAPI is told: spans where they are wanted, and nothing else, whatever the environment says.

    silent   paths without spans
    """

    def excluded(scope: Mapping[str, Any]) -> bool:
        return scope.get("path") in silent

    # its records of errors hold their words, which may quote a prompt; numbers are Prometheus' here
    nothing = {"metrics": False, "logs": False, "operation_spans": False}
    return {**nothing, "tracing": has_traces, "auto_configure": has_traces, "exclude": excluded}


def tell_span(request_id: str, state: Mapping[str, Any]) -> None:
    """Say on the request's span what it took, before the last of its answer ends it. Without one nothing happens."""
    from opentelemetry.trace import get_current_span

    span = get_current_span()
    if not span.is_recording():
        return
    span.set_attribute("http.response.header.x-request-id", [request_id])
    if call := state.get("call"):
        usage, told = call.usage(), call.speculation()
        span.set_attribute("gen_ai.usage.input_tokens", usage["prompt_tokens"])
        span.set_attribute("gen_ai.usage.output_tokens", usage["completion_tokens"])
        span.set_attribute("gen_ai.response.finish_reasons", [each.finish_reason or "abort" for each in call.choices])
        span.set_attributes({f"medusa.{name}": value for name, value in told.items()})

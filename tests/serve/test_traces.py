"""Traces: a span for each request with its tokens and without its words, and spans that reach who collects them."""

import http.server
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from medusa_cli.cli.app import main
from medusa_cli.serve import documents
from medusa_cli.serve.front import make_front
from medusa_cli.serve.policy import Policy
from medusa_cli.serve.replica import Replica
from medusa_cli.serve.service import Service
from tests.serve.conftest import listening, serving
from tests.serve.test_api import GO, WORDS
from tests.serve.test_command import HI, free_port, running
from tests.serve.test_engine_thread import waits_for
from tests.serve.test_front import Here, nothing
from tests.tiny_folders import CHAT_TEMPLATE, save_tiny

pytest.importorskip("opentelemetry.sdk")
PARENT = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="module")
def spans() -> Any:
    """Where this process keeps the spans that it ends."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(provider)
    return kept


@pytest.fixture(scope="module")
def records() -> Any:
    """Where this process keeps the log records that are made for OpenTelemetry."""
    from opentelemetry._logs import set_logger_provider
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor

    kept, provider = InMemoryLogRecordExporter(), LoggerProvider()
    provider.add_log_record_processor(SimpleLogRecordProcessor(kept))
    set_logger_provider(provider)
    return kept


def test_a_request_is_a_span_with_its_tokens_below_that_of_who_asked(spans: Any) -> None:
    spans.clear()
    with serving(Policy(has_traces=True)) as served:
        for stream in (False, True):
            headers = {"traceparent": f"00-{PARENT}-00f067aa0ba902b7-01", "X-Request-Id": "abc"}
            served.post(WORDS, GO | {"stream": stream}, headers=headers)
        with served.client() as client:
            client.get("/health")
            client.get("/metrics")
        assert waits_for(lambda: len(spans.get_finished_spans()) == 2)
    for span in spans.get_finished_spans():
        assert f"{span.context.trace_id:x}" == PARENT
        assert span.name == f"POST {WORDS}"
        told = span.attributes
        assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (3, 8)
        assert told["gen_ai.response.finish_reasons"] == ("length",)
        assert told["http.response.status_code"] == 200
        assert told["http.response.header.x-request-id"] == ("abc",)
        assert told["medusa.num_steps"] > 0


def test_in_front_of_replicas_it_is_one_span(spans: Any) -> None:
    spans.clear()
    with serving() as served:
        front = make_front(Policy(has_traces=True), Here([Replica(served.state.service, Policy())]), nothing, nothing)
        with listening(front) as url:
            assert httpx.post(url + WORDS, json=GO, timeout=60).status_code == 200
        assert waits_for(lambda: len(spans.get_finished_spans()) >= 1)
    (span,) = spans.get_finished_spans()
    assert span.attributes["http.response.status_code"] == 200
    assert "gen_ai.usage.output_tokens" not in span.attributes


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_is_a_span_without_its_words_and_no_record(
    spans: Any, records: Any, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("can't read w5")

    spans.clear()
    with serving(Policy(has_traces=True)) as served:
        if stream:
            monkeypatch.setattr(documents, "chunk_of", broken)
            with pytest.raises(httpx.RemoteProtocolError):  # half an answer is out: the connection breaks
                served.post(WORDS, GO | {"stream": True})
        else:
            monkeypatch.setattr(Service, "call", broken)
            assert served.post(WORDS, GO).status_code == 500
        assert waits_for(lambda: len(spans.get_finished_spans()) == 1)
    (span,) = spans.get_finished_spans()
    assert not span.status.is_ok
    assert "w5" not in span.to_json()
    assert not records.get_finished_logs()


def test_without_the_flag_there_is_no_span(spans: Any) -> None:
    spans.clear()
    with serving() as served:
        served.post(WORDS, GO)
    assert not spans.get_finished_spans()


def test_spans_reach_who_collects_them_before_the_server_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    model = str(save_tiny(tmp_path / "tiny", chat_template=CHAT_TEMPLATE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        with running(model, free_port(), "--otel") as (client, _):
            assert client.post("/v1/chat/completions", json=HI).status_code == 200
        collector.shutdown()
    assert {path for path, _ in got} == {"/v1/traces"}
    sent = [ExportTraceServiceRequest.FromString(body) for _, body in got]
    names = [s.name for each in sent for r in each.resource_spans for scope in r.scope_spans for s in scope.spans]
    assert names == ["POST /v1/chat/completions"]


def test_without_an_address_the_flag_says_what_it_lacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert main(["serve", "--otel", "--port", str(free_port())]) == 1
    told = capsys.readouterr().err
    assert "error: --otel doesn't say where spans go" in told
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in told

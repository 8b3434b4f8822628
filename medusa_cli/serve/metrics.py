"""Prometheus metrics under the names that vLLM uses, with the prefix `medusa:`; a dashboard for one reads the other."""

import time
from collections.abc import Iterator

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from medusa_cli import __version__
from medusa_cli.serve.service import Call, Service
from medusa_cli.serve.worker import News, Worker

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)
TOKENS = tuple(2.0**power for power in range(18))


class Metrics:
    """Histograms of requests, and what the engine counts, read when somebody asks."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        ProcessCollector(registry=self._registry)

        def seconds(name: str, what: str) -> Histogram:
            return Histogram(f"medusa:{name}", what, buckets=SECONDS, registry=self._registry)

        def tokens(name: str, what: str) -> Histogram:
            return Histogram(f"medusa:{name}", what, buckets=TOKENS, registry=self._registry)

        self.first_token = seconds("time_to_first_token_seconds", "From request to first token.")
        self.between = seconds("inter_token_latency_seconds", "Between tokens of a text, those of one step alike.")
        self.queue = seconds("request_queue_time_seconds", "From request to a row, of each text.")
        self.whole = seconds("e2e_request_latency_seconds", "From request to the end of its texts.")
        self.prompt_tokens = tokens("request_prompt_tokens", "Tokens of a request's prompts.")
        self.generation_tokens = tokens("request_generation_tokens", "Tokens of a text that ended.")
        self.success = Counter(
            "medusa:request_success", "Texts that ended.", ["finished_reason"], registry=self._registry
        )

    def follow(self, call: Call) -> "Followed":
        """One request, from now on."""
        self.prompt_tokens.observe(call.prompt_tokens)
        return Followed(self, len(call.choices))

    def text(self, service: Service | None) -> tuple[bytes, str]:
        """All of it, and its content type."""
        self._engine.service = service
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class Followed:
    """Times of one request."""

    def __init__(self, metrics: Metrics, num_texts: int) -> None:
        self._metrics = metrics
        self._begun = time.monotonic()
        self._last = [0.0] * num_texts
        self._written = [0] * num_texts
        self._left = num_texts

    def saw(self, news: News) -> None:
        """A text has grown, or ended."""
        now, last = time.monotonic(), self._last[news.index]
        if news.tokens and not last:
            self._metrics.first_token.observe(now - self._begun)
            self._metrics.queue.observe(news.queued_s)
        elif news.tokens:
            for _ in news.tokens:
                self._metrics.between.observe((now - last) / len(news.tokens))
        self._last[news.index] = now
        self._written[news.index] += len(news.tokens)
        if news.finish_reason:
            self._left -= 1
            self._metrics.success.labels(news.finish_reason).inc()
            self._metrics.generation_tokens.observe(self._written[news.index])

    def ended(self) -> None:
        """Nobody waits any more; what was broken off isn't among the latencies."""
        if self._left:
            self._metrics.success.labels("abort").inc(self._left)
        else:
            self._metrics.whole.observe(time.monotonic() - self._begun)


class _EngineCollector(Collector):
    """What the engine has done and holds."""

    service: Service | None = None

    def collect(self) -> Iterator[Metric]:
        """Counters and gauges; nothing while the model is being loaded."""
        if self.service is None:
            return
        worker = self.service.worker
        counts, stats = worker.counts, worker.stats()
        for name, what, value in (
            ("spec_decode_num_drafts", "Steps of a text with guesses.", counts.drafts),
            ("spec_decode_num_draft_tokens", "Guesses verified.", counts.drafted),
            ("spec_decode_num_accepted_tokens", "Guesses that became text.", counts.accepted),
            ("prompt_tokens", "Tokens of prompts.", counts.prompt_tokens),
            ("generation_tokens", "Tokens written.", counts.tokens),
            ("engine_steps", "Forwards over all rows.", counts.steps),
        ):
            yield CounterMetricFamily(f"medusa:{name}", what, value)
        yield from _of_pool(worker)
        yield InfoMetricFamily("medusa:build", "What is served.", _build(self.service))
        by_place = CounterMetricFamily(
            "medusa:spec_decode_num_accepted_tokens_per_pos", "The same by place in the step.", labels=["position"]
        )
        for position, value in enumerate(list(counts.accepted_at)):
            by_place.add_metric([str(position)], value)
        yield by_place
        used = stats.held / (stats.held + stats.free) if stats.free is not None and stats.held else 0.0
        for name, what, held in (
            ("num_requests_running", "Texts that have a row.", stats.rows + stats.reading),
            ("num_requests_waiting", "Texts that wait for a row.", worker.num_waiting + stats.waiting),
            ("kv_cache_usage_perc", "Share of the cache's columns that is set aside for texts.", used),
        ):
            yield GaugeMetricFamily(f"medusa:{name}", what, held)


def _build(service: Service) -> dict[str, str]:
    target = service.target
    return {
        "version": __version__,
        "model": service.name,
        "drafter": service.drafter,
        "dtype": target.dtype_name,
        "runner": target.identity.runner,
        "device": str(target.device),
    }


def _of_pool(worker: Worker) -> Iterator[Metric]:
    """What is lent to prompts that begin like others."""
    if worker.prefixes is None:
        return
    pool = worker.prefixes.pool
    for name, what, value in (
        ("prefix_cache_queries", "Tokens of prompts that were looked for in the prefix pool.", pool.counts.queries),
        ("prefix_cache_hits", "Tokens that were found there.", pool.counts.hits),
        ("prefix_pool_fetched_chunks", "Chunks that came from the store.", pool.counts.fetched),
        ("prefix_pool_errors", "What the store did wrong.", pool.counts.faults),
    ):
        yield CounterMetricFamily(f"medusa:{name}", what, value)
    yield GaugeMetricFamily("medusa:prefix_pool_bytes", "Memory of the pool's chunks.", pool.memory.num_bytes)

"""The dashboard, made of a list of panels: `python -m tests.tools.make_dashboard > docs/grafana.json`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SOURCE = {"type": "prometheus", "uid": "${source}"}
HERE = '{instance=~"$instance"}'
EACH = "5m"


@dataclass(frozen=True)
class Panel:
    """A picture: its queries by legend."""

    title: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    help: str = ""
    width: int = 8


def rate(name: str, labels: str = HERE) -> str:
    """How much a counter grows a second."""
    return f"rate(medusa:{name}{labels}[$__rate_interval])"


def total(name: str) -> str:
    return f"sum({rate(name)})"


def percentiles(name: str) -> list[tuple[str, str]]:
    """p50, p90 and p99 of a histogram."""
    return [
        (f"p{share * 100:g}", f"histogram_quantile({share}, sum by (le) ({rate(name + '_bucket')}))")
        for share in (0.5, 0.9, 0.99)
    ]


PANELS = [
    Panel(
        "Acceptance length",
        [
            (
                "tokens a step",
                f"1 + {total('spec_decode_num_accepted_tokens_total')} / {total('spec_decode_num_drafts_total')}",
            )
        ],
        help="Tokens that a step with guesses brings, the target's own included.",
    ),
    Panel(
        "Acceptance rate",
        [
            (
                "guesses kept",
                f"{total('spec_decode_num_accepted_tokens_total')} / {total('spec_decode_num_draft_tokens_total')}",
            )
        ],
        "percentunit",
    ),
    Panel(
        "Accepted by place",
        [
            (
                "place {{position}}",
                f"sum by (position) ({rate('spec_decode_num_accepted_tokens_per_pos_total')}) / "
                f"ignoring(position) group_left {total('spec_decode_num_drafts_total')}",
            )
        ],
        "percentunit",
    ),
    Panel(
        "Tokens a second",
        [("written", total("generation_tokens_total")), ("read", total("prompt_tokens_total"))],
        "short",
    ),
    Panel("Steps a second", [("steps", total("engine_steps_total"))]),
    Panel(
        "Texts that ended",
        [("{{finished_reason}}", f"sum by (finished_reason) ({rate('request_success_total')})")],
        "ops",
    ),
    Panel("Time to first token", percentiles("time_to_first_token_seconds"), "s"),
    Panel("Between tokens", percentiles("inter_token_latency_seconds"), "s"),
    Panel("Whole request", percentiles("e2e_request_latency_seconds"), "s"),
    Panel("Waiting for a row", percentiles("request_queue_time_seconds"), "s"),
    Panel(
        "Texts",
        [
            ("running", f"sum(medusa:num_requests_running{HERE})"),
            ("waiting", f"sum(medusa:num_requests_waiting{HERE})"),
        ],
    ),
    Panel("Cache set aside", [("{{instance}}", f"medusa:kv_cache_usage_perc{HERE}")], "percentunit"),
    Panel(
        "Prompt tokens found in the prefix pool",
        [("found", f"{total('prefix_cache_hits_total')} / {total('prefix_cache_queries_total')}")],
        "percentunit",
    ),
    Panel(
        "Prefix pool: faults and chunks from Redis",
        [("faults", total("prefix_pool_errors_total")), ("chunks", total("prefix_pool_fetched_chunks_total"))],
        "ops",
    ),
    Panel(
        "Tokens of a request",
        [
            (f"{what} {legend}", query)
            for what, name in (("prompt", "request_prompt_tokens"), ("reply", "request_generation_tokens"))
            for legend, query in percentiles(name)[:2]
        ],
    ),
    Panel(
        "Processors in use",
        [("{{instance}}", 'rate(process_cpu_seconds_total{instance=~"$instance"}[$__rate_interval])')],
    ),
    Panel("Memory of processes", [("{{instance}}", 'process_resident_memory_bytes{instance=~"$instance"}')], "bytes"),
    Panel("Memory of prefix pools", [("{{instance}}", f"medusa:prefix_pool_bytes{HERE}")], "bytes"),
]


def dashboard() -> dict[str, Any]:
    """As Grafana 10 and later import it."""
    return {
        "title": "medusa",
        "uid": "medusa-serve",
        "tags": ["medusa", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0},
                {
                    "name": "instance",
                    "label": "Server",
                    "type": "query",
                    "datasource": SOURCE,
                    "query": {"query": "label_values(medusa:num_requests_running, instance)", "refId": "instance"},
                    "includeAll": True,
                    "multi": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                    "refresh": 2,
                },
            ]
        },
        "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, place = divmod(number, 3)
    return {
        "id": number + 1,
        "title": panel.title,
        "description": panel.help,
        "type": "timeseries",
        "datasource": SOURCE,
        "gridPos": {"x": 8 * place, "y": 8 * row, "w": panel.width, "h": 8},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(65 + place), "expr": query, "legendFormat": legend, "datasource": SOURCE}
            for place, (legend, query) in enumerate(panel.queries)
        ],
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))

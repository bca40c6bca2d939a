"""Writes the Grafana dashboard paceline/dashboards/paceline.json: python deploy/k8s/dashboard.py.

`ROWS` lists the rows of panels. A panel has a unit and queries by legend. In a query, `$its` stands for the selector of
the chosen namespace and release.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

DASHBOARD = Path(__file__).parent / "paceline" / "dashboards" / "paceline.json"
ITS = 'namespace="$namespace",service=~"$release-(gateway|target|draft)"'
WIDTH = 24
HEIGHT = 8


class Panel(NamedTuple):
    title: str
    unit: str
    queries: dict[str, str]


def quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate({metric}_bucket{{$its}}[$__rate_interval])))"


def rate(metric: str, by: str = "", more: str = "") -> str:
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} (rate({metric}{{$its{more}}}[$__rate_interval]))"


def share(part: str, whole: str) -> str:
    return f"{part} / {whole}"


def quantiles(metric: str, legend: str = "") -> dict[str, str]:
    """The median and the 99th percentile, by legend."""
    return {f"{legend} {name}".strip(): quantile(share, metric) for name, share in (("median", 0.5), ("99 %", 0.99))}


VERIFICATIONS = rate("paceline_spec_decode_num_drafts_total")
ACCEPTED = rate("paceline_spec_decode_num_accepted_tokens_total")
POSITIONS = rate("paceline_spec_decode_num_accepted_tokens_per_pos_total", by="position")

ROWS: dict[str, list[Panel]] = {
    "What clients see": [
        Panel("Answers", "reqps", {"{{endpoint}} {{status}}": rate("paceline_requests_total", by="endpoint, status")}),
        Panel("Time to first token", "s", quantiles("paceline_time_to_first_token_seconds")),
        Panel("Time between tokens", "s", quantiles("paceline_inter_token_latency_seconds")),
        Panel(
            "Tokens per second",
            "none",
            {"output": rate("paceline_generation_tokens_total"), "prompt": rate("paceline_prompt_tokens_total")},
        ),
    ],
    "Requests": [
        Panel(
            "Phases at targets",
            "s",
            {
                **quantiles("paceline_request_queue_time_seconds", "queue"),
                **quantiles("paceline_request_prefill_time_seconds", "prefill"),
                **quantiles("paceline_request_decode_time_seconds", "decode"),
            },
        ),
        Panel(
            "Prompt tokens found in prefix caches",
            "percentunit",
            {"found": share(rate("paceline_prefix_cache_hits_total"), rate("paceline_prefix_cache_queries_total"))},
        ),
        Panel(
            "Tokens of a request",
            "none",
            {
                **quantiles("paceline_request_prompt_tokens", "prompt"),
                **quantiles("paceline_request_generation_tokens", "output"),
                **quantiles("paceline_request_params_max_tokens", "max_tokens"),
            },
        ),
        Panel("Choices for a prompt", "none", quantiles("paceline_request_params_n")),
    ],
    "Speculation": [
        Panel("Acceptance length, without bonus", "none", {"accepted": share(ACCEPTED, VERIFICATIONS)}),
        Panel(
            "Accepted at each position, and all before it",
            "percentunit",
            {"position {{position}}": f"{POSITIONS} / ignoring (position) group_left {VERIFICATIONS}"},
        ),
        Panel(
            "Guesses dropped: late, double or too many",
            "percentunit",
            {
                "dropped": share(
                    rate("paceline_growth_nodes_dropped_total"), rate("paceline_growth_nodes_received_total")
                )
            },
        ),
        Panel(
            "Tokens and rows per step",
            "none",
            {
                "tokens per step": share(rate("paceline_committed_tokens_total"), rate("paceline_step_seconds_count")),
                "rows per step": share(rate("paceline_step_rows_sum"), rate("paceline_step_rows_count")),
            },
        ),
    ],
    "Targets": [
        Panel(
            "Requests",
            "none",
            {
                "{{pod}} running": "paceline_num_requests_running{$its}",
                "{{pod}} waiting": "paceline_num_requests_waiting{$its}",
            },
        ),
        Panel("KV slots in use", "percentunit", {"{{pod}}": "paceline_kv_cache_usage_perc{$its}"}),
        Panel("Step", "s", quantiles("paceline_step_seconds")),
        Panel(
            "Preemptions and replays per second",
            "none",
            {
                "preemptions": rate("paceline_num_preemptions_total"),
                "replays": rate("paceline_replays_total"),
                "replays with other numerics": rate("paceline_replays_other_numerics_total"),
            },
        ),
    ],
    "Drafts": [
        Panel("Requests drafted for", "none", {"{{pod}}": "paceline_draft_open_requests{$its}"}),
        Panel("One round of drafting", "s", {"99 %": quantile(0.99, "paceline_draft_round_seconds")}),
        Panel("Round trip to drafts, without their own time", "s", quantiles("paceline_draft_link_round_trip_seconds")),
        Panel(
            "Bytes on links to drafts",
            "Bps",
            {"{{direction}}": rate("paceline_draft_link_bytes_total", by="direction")},
        ),
    ],
}


def generated() -> str:
    return json.dumps(_dashboard(), indent=2, ensure_ascii=False) + "\n"


def _dashboard() -> dict[str, Any]:
    return {
        "uid": "paceline",
        "title": "Paceline",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_data_source(), _variable("namespace", ""), _release()]},
        "panels": _panels(),
    }


def _data_source() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus"}


def _variable(label: str, selector: str) -> dict[str, Any]:
    query = f"label_values(paceline_build_info{selector}, {label})"
    return {"name": label, "type": "query", "datasource": {"uid": "$datasource"}, "query": query, "refresh": 2}


def _release() -> dict[str, Any]:
    """The variable of the release. Its values come from the names of gateways' Services."""
    return {
        **_variable("service", '{namespace="$namespace",service=~".*-gateway"}'),
        "name": "release",
        "regex": "(.*)-gateway",
    }


def _panels() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append({"type": "row", "title": title, "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1}})
        width = WIDTH // len(row)
        for column, panel in enumerate(row):
            grid = {"x": column * width, "y": top + 1, "w": width, "h": HEIGHT}
            panels.append(_panel(panel, grid))
        top += 1 + HEIGHT
    return [{"id": number, **panel} for number, panel in enumerate(panels, 1)]


def _panel(panel: Panel, grid: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": {"uid": "$datasource"},
        "gridPos": grid,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": query.replace("$its", ITS), "legendFormat": legend}
            for number, (legend, query) in enumerate(panel.queries.items())
        ],
    }


if __name__ == "__main__":
    DASHBOARD.write_text(generated(), encoding="utf-8")

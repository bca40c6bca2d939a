"""Alerts, dashboard and autoscaling query series and labels that the services export."""

import json
import re
from collections.abc import Iterator
from functools import cache

import promql_parser as promql
import pytest
from prometheus_client import CollectorRegistry

from paceline.config import SpeculativeConfig
from paceline.telemetry.draft_metrics import DraftMetrics
from paceline.telemetry.gateway_metrics import GatewayMetrics
from paceline.telemetry.target_metrics import TargetMetrics
from tests.deploy.combinations import CHOICES
from tests.deploy.helm import CHART, ON_CPUS, RELEASE, ROOT, Document, merged, render, the

SERVICES = ("gateway", "target", "draft")
SCRAPED = {"namespace", "service", "pod", "le"}
"""Labels that Prometheus adds, and that of a histogram's buckets."""


def exported() -> dict[str, set[str]]:
    """Labels by name of every series that a service exports."""
    registries = [CollectorRegistry() for _ in SERVICES]
    GatewayMetrics(registries[0])
    TargetMetrics(registries[1], "pydoc", 1).set_strategy(SpeculativeConfig().strategy)
    DraftMetrics(registries[2], "ngram")
    found: dict[str, set[str]] = {"up": set()}
    for registry in registries:
        for collector, names in registry._collector_to_names.items():  # also series without a sample yet
            for name in names:
                found.setdefault(name, set()).update(getattr(collector, "_labelnames", ()))
        for sample in (sample for metric in registry.collect() for sample in metric.samples):
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def selectors(query: str) -> list[promql.VectorSelector]:
    """Every series of a query."""
    filled = query.replace("$release", RELEASE).replace("$__rate_interval", "5m")
    return list(_selectors(promql.parse(filled)))


def _selectors(expression: object) -> Iterator[promql.VectorSelector]:
    if isinstance(expression, promql.VectorSelector):
        yield expression
    for name in ("lhs", "rhs", "expr", "vector_selector", "args", "param"):
        below = getattr(expression, name, None)
        for each in below if isinstance(below, list) else [below]:
            if each is not None and not isinstance(each, str | float | int):
                yield from _selectors(each)


def takes(selector: promql.VectorSelector, **labels: str) -> bool:
    """Whether the selector matches a series with these labels; missing labels match."""
    return all(_met(each, labels[each.name]) for each in selector.matchers.matchers if each.name in labels)


def _met(matcher: promql.Matcher, value: str) -> bool:
    regular = matcher.op in (promql.MatchOp.Re, promql.MatchOp.NotRe)
    same = re.fullmatch(matcher.value, value) is not None if regular else matcher.value == value
    return same == (matcher.op in (promql.MatchOp.Equal, promql.MatchOp.Re))


@cache
def documents(autoscaling: str = "hpa", engine: str = "own") -> list[Document]:
    return render(merged(ON_CPUS, CHOICES["autoscaling"][autoscaling], CHOICES["engine"][engine]))


def rules(engine: str = "own") -> dict[str, Document]:
    groups = the("PrometheusRule", "services", documents(engine=engine))["spec"]["groups"]
    return {rule.get("alert") or rule["record"]: rule for group in groups for rule in group["rules"]}


def queries() -> dict[str, str]:
    """Queries of alerts, dashboard and autoscalers."""
    dashboard = json.loads((CHART / "dashboards" / "paceline.json").read_text(encoding="utf-8"))
    panels = [(panel["title"], target) for panel in dashboard["panels"] for target in panel.get("targets", ())]
    scaling = {name: the("ScaledObject", name, documents("keda"))["spec"]["triggers"][0] for name in SERVICES}
    return {
        **{name: rule["expr"] for name, rule in rules().items()},
        **{f"{title} {target['refId']}": target["expr"] for title, target in panels},
        **{name: trigger["metadata"]["query"] for name, trigger in scaling.items()},
    }


def test_queries_use_exported_series_of_their_own_release() -> None:
    known, manual = exported(), (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    asked = set()
    for name, query in queries().items():
        for selector in selectors(query):
            base = re.sub(r"_(bucket|sum|count)$", "", selector.name).removesuffix("_info")
            assert base == "up" or base in manual, (name, base)
            labels = {matcher.name for matcher in selector.matchers.matchers}
            assert labels <= known[selector.name] | SCRAPED, (name, labels)
            assert any(takes(selector, service=f"{RELEASE}-{each}") for each in SERVICES), name
            assert not takes(selector, service=f"{RELEASE}-2-target"), f"{name}: another release with the same prefix"
            asked.add(selector.name)
    assert len(asked) > 20


def test_every_alert_is_documented() -> None:
    named = {name for name, rule in rules().items() if "alert" in rule}
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^### (Paceline\w+)", text, re.MULTILINE)) == named


def test_alerts_that_would_always_fire_with_vllm_are_left_out() -> None:
    """A target with vLLM exports 0 for both: its links are in vLLM's process, and no probe looks at its rows."""
    always = {name for name, rule in rules().items() if re.search("draft_links|rows_invariant", rule["expr"])}
    assert rules().keys() - rules("vllm").keys() == always == {"PacelineNoDrafts", "PacelineRowsDepend"}
    assert rules("vllm").keys() <= rules().keys()


@pytest.mark.parametrize(
    ("endpoint", "statuses"),
    [
        ("/v1/completions", {"200": False, "429": False, "500": True, "503": True}),
        ("Generate", {"OK": False, "RESOURCE_EXHAUSTED": False, "UNAVAILABLE": True, "INTERNAL": True}),
        *((probe, {"503": False}) for probe in ("/health", "/live", "/metrics", "/ready", "/version")),
    ],
)
def test_error_alerts_count_client_requests_only(endpoint: str, statuses: dict[str, bool]) -> None:
    """The kubelet's probes would dilute them or, without a target, be most of them; gRPC counts like HTTP."""
    failed, every = selectors(rules()["PacelineErrors"]["expr"])
    assert takes(every, endpoint=endpoint) == (len(statuses) > 1)
    assert {status: takes(failed, endpoint=endpoint, status=status) for status in statuses} == statuses


def test_a_key_at_its_own_limit_is_no_overload() -> None:
    (refused,) = selectors(rules()["PacelineRefusing"]["expr"])
    assert refused.name == "paceline_rejections_total", "limits of keys are counted elsewhere"
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "services" / "gateway").rglob("*.py"))
    overloads = set(re.findall(r'raise OverloadedError\(.*?reason="(\w+)"', code, re.DOTALL))
    assert overloads == {"in_flight", "queue", "bodies", "grammars", "texts"}
    for reason in (*overloads, "no_target", "breaker", "closing", "connections"):
        assert takes(refused, reason=reason) == (reason in overloads), "the others are 503: PacelineErrors"


def test_the_same_query_is_in_the_documentation() -> None:
    _, _, query = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").partition("over HTTP and gRPC\n")
    written, alert = selectors(query.partition("```")[0]), selectors(rules()["PacelineErrors"]["expr"])
    for ours, theirs in zip(written, alert, strict=True):
        labels = {each.name: each.value for each in ours.matchers.matchers}
        assert labels.items() <= {(each.name, each.value) for each in theirs.matchers.matchers}
        assert "endpoint" in labels


@pytest.mark.parametrize("name", SERVICES)
def test_the_metrics_of_autoscalers_are_recorded(name: str) -> None:
    metric = the("HorizontalPodAutoscaler", name, documents())["spec"]["metrics"][0]["external"]["metric"]
    assert metric["selector"]["matchLabels"].items() <= rules()[metric["name"]]["labels"].items()


def test_prometheus_finds_each_service_once_and_grafana_the_dashboard() -> None:
    monitor = the("ServiceMonitor", "services", documents())["spec"]
    (expression,) = monitor["selector"]["matchExpressions"]
    ports = {endpoint["port"] for endpoint in monitor["endpoints"]}
    for document in documents():
        if document["kind"] == "Service":
            component = document["metadata"]["labels"][expression["key"]]
            found = [port for port in document["spec"]["ports"] if port["name"] in ports]
            assert len(found) == (component in expression["values"])
    config = the("ConfigMap", "dashboard", documents())
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config["data"]["paceline.json"])["title"] == "Paceline"

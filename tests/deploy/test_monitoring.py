"""Alerts, dashboard and autoscaling query series and labels that the services export."""

import json
import re
from collections.abc import Iterator

import promql_parser as promql
import pytest
from prometheus_client import CollectorRegistry

from paceline.config import SpeculativeConfig
from paceline.core.verify import strategy_of
from paceline.telemetry.draft_metrics import DraftMetrics
from paceline.telemetry.gateway_metrics import GatewayMetrics
from paceline.telemetry.target_metrics import TargetMetrics
from tests.deploy.combinations import CHOICES, MONITORING
from tests.deploy.helm import CHART, RELEASE, ROOT, Document, merged, on_cpus, render, the

SCRAPED = {"namespace", "service", "pod", "le"}
"""Labels that Prometheus adds, and that of a histogram's buckets."""


def exported() -> dict[str, set[str]]:
    """Labels by name of every series that a service exports."""
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    targets, drafts = CollectorRegistry(), CollectorRegistry()
    TargetMetrics(targets, "pydoc", 1).set_strategy(strategy_of(SpeculativeConfig()))
    DraftMetrics(drafts, "ngram")
    found: dict[str, set[str]] = {"up": set()}
    for each in (registry, targets, drafts):
        for collector, names in each._collector_to_names.items():  # also series without a sample yet
            for name in names:
                found.setdefault(name, set()).update(getattr(collector, "_labelnames", ()))
        for metric in each.collect():
            for sample in metric.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def selectors(expression: object) -> Iterator[promql.VectorSelector]:
    """Every series of a parsed query."""
    if isinstance(expression, promql.VectorSelector):
        yield expression
    for name in ("lhs", "rhs", "expr", "vector_selector", "args", "param"):
        below = getattr(expression, name, None)
        for each in below if isinstance(below, list) else [below]:
            if each is not None and not isinstance(each, str | float | int):
                yield from selectors(each)


def takes(selector: promql.VectorSelector, labels: dict[str, str]) -> bool:
    """Whether the selector matches a series with these labels; missing labels match."""
    return all(_met(each, labels[each.name]) for each in selector.matchers.matchers if each.name in labels)


def _met(matcher: promql.Matcher, value: str) -> bool:
    if matcher.op in (promql.MatchOp.Re, promql.MatchOp.NotRe):
        same = re.fullmatch(matcher.value, value) is not None
    else:
        same = matcher.value == value
    return same == (matcher.op in (promql.MatchOp.Equal, promql.MatchOp.Re))


def rules(documents: list[Document]) -> dict[str, Document]:
    groups = the("PrometheusRule", "services", documents)["spec"]["groups"]
    return {rule.get("alert") or rule["record"]: rule for group in groups for rule in group["rules"]}


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return render(merged(on_cpus(), MONITORING, CHOICES["autoscaling"]["hpa"]))


def panels() -> dict[str, str]:
    dashboard = json.loads((CHART / "dashboards" / "paceline.json").read_text(encoding="utf-8"))
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    }


def scaling() -> dict[str, str]:
    drawn = render(merged(on_cpus(), CHOICES["autoscaling"]["keda"]))
    return {
        name: the("ScaledObject", name, drawn)["spec"]["triggers"][0]["metadata"]["query"]
        for name in ("gateway", "target", "draft")
    }


def test_queries_use_exported_series(documents: list[Document]) -> None:
    queries = {**{name: rule["expr"] for name, rule in rules(documents).items()}, **panels(), **scaling()}
    known, described = exported(), (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    asked = set()
    for name, query in queries.items():
        for selector in selectors(promql.parse(query.replace("$__rate_interval", "5m"))):
            assert selector.name in known, (name, selector.name)
            base = re.sub(r"_(bucket|sum|count)$", "", selector.name).removesuffix("_info")
            assert base == "up" or base in described, (name, base)
            labels = {matcher.name for matcher in selector.matchers.matchers}
            assert labels <= known[selector.name] | SCRAPED, (name, labels)
            asked.add(selector.name)
    assert len(asked) > 20


def test_a_release_with_the_same_prefix_is_not_matched(documents: list[Document]) -> None:
    queries = {**{name: rule["expr"] for name, rule in rules(documents).items()}, **panels(), **scaling()}
    for name, query in queries.items():
        filled = query.replace("$release", RELEASE).replace("$__rate_interval", "5m")
        for selector in selectors(promql.parse(filled)):
            ours = [takes(selector, {"service": f"{RELEASE}-{each}"}) for each in ("gateway", "target", "draft")]
            assert any(ours), name
            assert not takes(selector, {"service": f"{RELEASE}-2-target"}), name


def test_an_invalid_query_is_found() -> None:
    with pytest.raises(ValueError, match="unclosed"):
        promql.parse("sum(rate(paceline_requests_total[5m])")


def test_every_alert_is_documented(documents: list[Document]) -> None:
    named = {name for name, rule in rules(documents).items() if "alert" in rule}
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^### (Paceline\w+)", text, re.MULTILINE)) == named


PROBES = ("/health", "/metrics", "/version")


def test_error_alerts_count_client_requests_only(documents: list[Document]) -> None:
    """The kubelet's probes would dilute them or, without a target, be most of them; gRPC counts like HTTP."""
    failed, every = selectors(promql.parse(rules(documents)["PacelineErrors"]["expr"]))
    for probe in PROBES:
        assert not takes(every, {"endpoint": probe})
        assert not takes(failed, {"endpoint": probe, "status": "503"})
    for endpoint, statuses in {
        "/v1/completions": {"200": False, "429": False, "500": True, "503": True},
        "Generate": {"OK": False, "RESOURCE_EXHAUSTED": False, "UNAVAILABLE": True, "INTERNAL": True},
    }.items():
        assert takes(every, {"endpoint": endpoint})
        for status, ours in statuses.items():
            assert takes(failed, {"endpoint": endpoint, "status": status}) == ours, status


def test_a_key_at_its_own_limit_is_no_overload(documents: list[Document]) -> None:
    (refused,) = selectors(promql.parse(rules(documents)["PacelineRefusing"]["expr"]))
    assert refused.name == "paceline_rejections_total", "limits of keys are counted elsewhere"
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "services" / "gateway").rglob("*.py"))
    reasons = set(re.findall(r'raise OverloadedError\(.*?reason="(\w+)"', code, re.DOTALL))
    assert reasons == {"in_flight", "queue", "bodies", "grammars", "texts"}
    for reason in reasons:
        assert takes(refused, {"reason": reason})
    for reason in ("no_target", "breaker", "closing", "connections"):
        assert not takes(refused, {"reason": reason}), "that is 503: PacelineErrors"


def test_the_same_query_is_in_the_documentation(documents: list[Document]) -> None:
    _, _, query = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").partition("over HTTP and gRPC\n")
    failed, every = selectors(promql.parse(query.partition("```")[0]))
    for ours, theirs in zip(
        (failed, every), selectors(promql.parse(rules(documents)["PacelineErrors"]["expr"])), strict=True
    ):
        labels = {(each.name, each.value) for each in ours.matchers.matchers}
        assert labels <= {(each.name, each.value) for each in theirs.matchers.matchers}
        assert "endpoint" in dict(labels)


def test_the_metrics_of_autoscalers_are_recorded(documents: list[Document]) -> None:
    recorded = rules(documents)
    for name in ("gateway", "target", "draft"):
        metric = the("HorizontalPodAutoscaler", name, documents)["spec"]["metrics"][0]["external"]["metric"]
        assert metric["selector"]["matchLabels"].items() <= recorded[metric["name"]]["labels"].items()


def test_prometheus_finds_each_service_once(documents: list[Document]) -> None:
    monitor = the("ServiceMonitor", "services", documents)["spec"]
    (expression,) = monitor["selector"]["matchExpressions"]
    ports = {endpoint["port"] for endpoint in monitor["endpoints"]}
    for document in documents:
        if document["kind"] == "Service":
            component = document["metadata"]["labels"][expression["key"]]
            found = [port for port in document["spec"]["ports"] if port["name"] in ports]
            assert len(found) == (component in expression["values"])


def test_grafana_finds_the_dashboard(documents: list[Document]) -> None:
    config = the("ConfigMap", "dashboard", documents)
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config["data"]["paceline.json"])["title"] == "Paceline"

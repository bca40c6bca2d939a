"""What Prometheus reads, parsed back from the text it is sent."""

import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from paceline.core.messages import FinishReason, SpeculationStats, Usage
from paceline.core.verify import STRATEGIES
from paceline.telemetry.draft_metrics import DraftMetrics
from paceline.telemetry.gateway_metrics import GatewayMetrics
from paceline.telemetry.metrics_exporter import serve_metrics
from paceline.telemetry.round_stats import RoundStats
from paceline.telemetry.step_stats import StepStats
from paceline.telemetry.target_metrics import TargetMetrics

MANUAL = Path(__file__).parents[2] / "docs" / "metrics.md"
MODEL = {"model_name": "family/target"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


class Scrape:
    """One scrape: values by sample name and labels, types by family name."""

    def __init__(self, text: str) -> None:
        families = list(text_string_to_metric_families(text))
        self.types = {family.name: family.type for family in families}
        self.values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    def __call__(self, name: str, labels: dict[str, str]) -> float:
        return self.values[name, frozenset(labels.items())]


def scrape(registry: CollectorRegistry) -> Scrape:
    return Scrape(generate_latest(registry).decode())


def step(*verifications: tuple[list[int], int], **others: int) -> StepStats:
    """A step of one request per (depths verified, accepted)."""
    stats = SpeculationStats()
    for depths, accepted in verifications:
        stats.record(len(depths), max(depths, default=0), accepted)
    numbers = {"rows": 12, "running": 2, "waiting": 1, "free_slots": 750, **others}
    return StepStats(step_s=0.02, speculation=stats, **numbers)


def both_names(name: str) -> Iterator[str]:
    yield f"paceline_{name}"
    yield f"vllm:{name}"


class TestTarget:
    @pytest.fixture
    def metrics(self, registry: CollectorRegistry) -> TargetMetrics:
        return TargetMetrics(registry, "family/target", slots=1000)

    @pytest.mark.parametrize(
        ("strategy", "lossy", "invariant"), [("coupled", 0, 1), ("residual", 0, 0), ("typical-acceptance", 1, 0)]
    )
    def test_shows_what_the_strategy_promises(
        self, registry: CollectorRegistry, metrics: TargetMetrics, strategy: str, lossy: int, invariant: int
    ) -> None:
        metrics.set_strategy(STRATEGIES[strategy])
        sample, labels = scrape(registry), MODEL | {"strategy": strategy}
        assert sample("paceline_verification_lossy", labels) == lossy
        assert sample("paceline_verification_drafter_invariant", labels) == invariant

    def test_counts_speculation_without_the_bonus_token(
        self, registry: CollectorRegistry, metrics: TargetMetrics
    ) -> None:
        metrics.observe_step(step(([1, 1, 2, 2, 3], 2), ([1, 2], 0), ([], 0)))
        metrics.observe_step(step(([1, 2], 2)))
        seen = scrape(registry)
        for prefix in both_names("spec_decode_num"):
            assert seen(f"{prefix}_drafts_total", MODEL) == 3
            assert seen(f"{prefix}_draft_tokens_total", MODEL) == 9
            assert seen(f"{prefix}_accepted_tokens_total", MODEL) == 4
            by_position = [
                seen(f"{prefix}_accepted_tokens_per_pos_total", {**MODEL, "position": position}) for position in "012"
            ]
            assert by_position == [2, 2, 0]

    def test_gauges_show_the_last_step(self, registry: CollectorRegistry, metrics: TargetMetrics) -> None:
        metrics.observe_step(step(running=9))
        metrics.observe_step(step())
        metrics.draft_links.set_function(lambda: 3)
        metrics.rows_invariant.set(True)
        seen = scrape(registry)
        for name in both_names("num_requests_running"):
            assert seen(name, MODEL) == 2
        for name in both_names("num_requests_waiting"):
            assert seen(name, MODEL) == 1
        for name in both_names("kv_cache_usage_perc"):
            assert seen(name, MODEL) == pytest.approx(0.25)
        assert seen("paceline_free_slots", MODEL) == 750
        assert seen("paceline_draft_links", MODEL) == 3
        assert seen("paceline_rows_invariant", MODEL) == 1

    def test_growth_is_grafted_or_dropped(self, registry: CollectorRegistry, metrics: TargetMetrics) -> None:
        metrics.observe_step(step(nodes_received=10, nodes_grafted=7))
        seen = scrape(registry)
        nodes = [seen(f"paceline_growth_nodes_{end}_total", MODEL) for end in ("received", "grafted", "dropped")]
        assert nodes == [10, 7, 3]

    def test_steps_and_tokens(self, registry: CollectorRegistry, metrics: TargetMetrics) -> None:
        metrics.observe_step(step(prompt_tokens=100, generation_tokens=5, preemptions=1))
        metrics.observe_step(step(rows=0))  # nothing was run: no step
        seen = scrape(registry)
        assert seen("paceline_step_seconds_count", MODEL) == 1
        assert seen("paceline_step_seconds_sum", MODEL) == pytest.approx(0.02)
        assert seen("paceline_step_rows_bucket", {**MODEL, "le": "16.0"}) == 1
        assert seen("paceline_step_rows_bucket", {**MODEL, "le": "8.0"}) == 0
        assert seen("paceline_computed_prompt_tokens_total", MODEL) == 100
        assert seen("paceline_committed_tokens_total", MODEL) == 5
        assert seen("vllm:num_preemptions_total", MODEL) == 1

    def test_a_vllm_name_has_the_type_of_our_metric(self, registry: CollectorRegistry, metrics: TargetMetrics) -> None:
        metrics.observe_step(step())
        types = scrape(registry).types
        vllm = {name.removeprefix("vllm:"): type_ for name, type_ in types.items() if name.startswith("vllm:")}
        assert vllm
        assert vllm == {name: types[f"paceline_{name}"] for name in vllm}


class TestGateway:
    @pytest.fixture
    def metrics(self, registry: CollectorRegistry) -> GatewayMetrics:
        return GatewayMetrics(registry)

    def test_times_a_request_token_by_token(self, registry: CollectorRegistry, metrics: GatewayMetrics) -> None:
        now = 100.0
        with metrics.track("family/target", lambda: now) as request:
            now = 100.5
            request.tokens(1)
            now = 101.1
            request.tokens(3)  # one chunk, three tokens
            now = 101.2
            request.tokens(0)
            request.finished(FinishReason.LENGTH, Usage(7, 4, cached_tokens=2))
        seen = scrape(registry)
        for name in both_names("time_to_first_token_seconds"):
            assert seen(f"{name}_sum", MODEL) == pytest.approx(0.5)
        for name in both_names("inter_token_latency_seconds"):
            assert seen(f"{name}_count", MODEL) == 3
            assert seen(f"{name}_bucket", {**MODEL, "le": "0.2"}) == 3
            assert seen(f"{name}_bucket", {**MODEL, "le": "0.15"}) == 0
        for name in both_names("e2e_request_latency_seconds"):
            assert seen(f"{name}_sum", MODEL) == pytest.approx(1.2)
        for name in both_names("request_success_total"):
            assert seen(name, {**MODEL, "finished_reason": "length"}) == 1
        tokens = [seen(f"vllm:{name}_tokens_total", MODEL) for name in ("prompt", "generation")]
        assert tokens == [7, 4]
        assert seen("paceline_cached_prompt_tokens_total", MODEL) == 2

    def test_a_request_runs_until_it_ends_however_it_ends(
        self, registry: CollectorRegistry, metrics: GatewayMetrics
    ) -> None:
        with suppress(ConnectionError), metrics.track("family/target") as request:
            assert scrape(registry)("paceline_requests_running", MODEL) == 1
            request.replayed()
            request.replayed_with_other_numerics()
            raise ConnectionError
        seen = scrape(registry)
        assert seen("paceline_requests_running", MODEL) == 0
        assert seen("paceline_replays_total", MODEL) == 1
        assert seen("paceline_replays_other_numerics_total", MODEL) == 1
        assert "vllm:request_success_total" not in {name for name, _ in seen.values}

    def test_counts_responses(self, registry: CollectorRegistry, metrics: GatewayMetrics) -> None:
        for status in (200, 200, 400):
            metrics.count_response("/v1/completions", status)
        metrics.count_response("Generate", "NOT_FOUND")
        seen = scrape(registry)
        name = "paceline_requests_total"
        assert seen(name, {"endpoint": "/v1/completions", "status": "200"}) == 2
        assert seen(name, {"endpoint": "/v1/completions", "status": "400"}) == 1
        assert seen(name, {"endpoint": "Generate", "status": "NOT_FOUND"}) == 1


def test_a_draft_counts_its_rounds(registry: CollectorRegistry) -> None:
    metrics = DraftMetrics(registry, "ngram")
    metrics.observe_round(RoundStats(round_s=0.004, nodes=6))
    metrics.observe_round(RoundStats(round_s=0.006, nodes=4, dropped=1))
    metrics.observe_round(RoundStats(round_s=0.5, nodes=0))  # no draft token: not a round
    metrics.set_gauge_sources(open_requests=lambda: 3, target_links=lambda: 2)
    seen = scrape(registry)

    def value(name: str) -> float:
        return seen(f"paceline_draft_{name}", {"method": "ngram"})

    assert value("round_seconds_sum") == pytest.approx(0.01)
    assert value("round_seconds_count") == 2
    assert value("nodes_total") == 10
    assert value("requests_dropped_total") == 1
    assert value("open_requests") == 3
    assert value("target_links") == 2


def exported() -> list[set[str]]:
    """Names of families by kind of service."""
    names = []
    for make in (
        lambda registry: TargetMetrics(registry, "m", 1),
        lambda registry: DraftMetrics(registry, "ngram"),
        GatewayMetrics,
    ):
        registry = CollectorRegistry()
        make(registry)
        names.append({family.name for family in registry.collect()} - {"paceline_build"})
    return names


def test_no_name_is_exported_by_two_kinds_of_service() -> None:
    """A sum over all services must count nothing twice."""
    assert all(exported())
    assert len(set.union(*exported())) == sum(map(len, exported()))


def test_the_manual_lists_every_metric_and_no_other() -> None:
    rows = re.findall(r"^\| `(paceline_\w+)` \|.*?(?:`(vllm:\w+)` \|)?$", MANUAL.read_text(), re.MULTILINE)
    listed = {name.removesuffix("_total") for row in rows for name in row if name}
    assert listed == set.union(*exported())


def test_metrics_are_served_over_http(registry: CollectorRegistry) -> None:
    GatewayMetrics(registry)
    with (
        serve_metrics(registry, "127.0.0.1", 0, lambda: True) as port,
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response,
    ):
        seen = Scrape(response.read().decode())
    assert ("paceline_build_info", 1.0) in {(name, value) for (name, _), value in seen.values.items()}


def test_health_needs_no_certificate(registry: CollectorRegistry) -> None:
    healthy = [False, True]
    with serve_metrics(registry, "127.0.0.1", 0, healthy.pop) as port:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health")


def test_a_port_that_is_taken_is_an_error(registry: CollectorRegistry) -> None:
    with (
        serve_metrics(registry, "127.0.0.1", 0, lambda: True) as port,
        pytest.raises(OSError, match="in use"),
        serve_metrics(registry, "127.0.0.1", port, lambda: True),
    ):
        pass

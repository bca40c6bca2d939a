"""What Prometheus reads."""

import re
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from paceline.config import STRATEGIES
from paceline.messages import FinishReason, SpeculationStats, Timings, Usage
from paceline.telemetry.draft_metrics import DraftMetrics
from paceline.telemetry.gateway_metrics import GatewayMetrics
from paceline.telemetry.instruments import serve_metrics
from paceline.telemetry.step_stats import RoundStats, StepStats
from paceline.telemetry.target_metrics import TargetMetrics

MANUAL = Path(__file__).parents[3] / "docs" / "metrics.md"


class Scraped(CollectorRegistry):
    """A registry that is asked for samples of the model "m" by name."""

    def value(self, name: str, **labels: str) -> float | None:
        return self.get_sample_value(f"paceline_{name}", {"model_name": "m", **labels})


@pytest.fixture
def scraped() -> Scraped:
    return Scraped()


def step(*verifications: tuple[int, int, int], **others: int) -> StepStats:
    """A step of one request per (nodes, deepest, accepted)."""
    stats = SpeculationStats()
    for verification in verifications:
        stats.record(*verification)
    numbers = {"rows": 12, "running": 2, "waiting": 1, "free_slots": 750, **others}
    return StepStats(step_s=0.02, speculation=stats, **numbers)


@pytest.mark.parametrize(
    ("strategy", "lossy", "invariant"), [("coupled", 0, 1), ("residual", 0, 0), ("typical-acceptance", 1, 0)]
)
def test_a_target_shows_what_its_strategy_promises(scraped: Scraped, strategy: str, lossy: int, invariant: int) -> None:
    TargetMetrics(scraped, "m", slots=1000).set_strategy(STRATEGIES[strategy])
    assert scraped.value("verification_lossy", strategy=strategy) == lossy
    assert scraped.value("verification_drafter_invariant", strategy=strategy) == invariant


def test_a_target_counts_its_steps_and_shows_the_last_one(scraped: Scraped) -> None:
    """The bonus token is not counted; a step without rows ran no pass."""
    metrics = TargetMetrics(scraped, "m", slots=1000)
    metrics.observe_step(step((5, 3, 2), (2, 2, 0), (0, 0, 0), running=9, nodes_received=10, nodes_grafted=7))
    metrics.observe_step(step(prompt_tokens=6, generation_tokens=4))
    metrics.observe_step(step((2, 2, 2), rows=0, prompt_tokens=100, generation_tokens=5, preemptions=1))
    metrics.draft_links.set_function(lambda: 3)
    metrics.rows_invariant.set(True)
    expected = {
        "spec_decode_num_drafts_total": 3,
        "spec_decode_num_draft_tokens_total": 9,
        "spec_decode_num_accepted_tokens_total": 4,
        "num_requests_running": 2,
        "num_requests_waiting": 1,
        "kv_cache_usage_perc": 0.25,
        "free_slots": 750,
        "draft_links": 3,
        "rows_invariant": 1,
        "growth_nodes_received_total": 10,
        "growth_nodes_grafted_total": 7,
        "growth_nodes_dropped_total": 3,
        "step_seconds_count": 2,
        "step_seconds_sum": 0.04,
        "computed_prompt_tokens_total": 106,
        "committed_tokens_total": 9,
        "num_preemptions_total": 1,
        "iteration_tokens_total_count": 2,
        "iteration_tokens_total_sum": 10,
    }
    assert {name: scraped.value(name) for name in expected} == pytest.approx(expected)
    by_position = [scraped.value("spec_decode_num_accepted_tokens_per_pos_total", position=each) for each in "012"]
    assert by_position == [2, 2, 0]
    assert [scraped.value("step_rows_bucket", le=bound) for bound in ("8.0", "16.0")] == [0, 2]


def test_a_target_times_the_phases_of_a_request(scraped: Scraped) -> None:
    metrics = TargetMetrics(scraped, "m", slots=1000)
    metrics.observe_request(Timings(0.5, 0.75, 3.0, prefill_s=1.0), Usage(40, 9, cached_tokens=32))
    metrics.observe_request(Timings(0.0, 0.25, 0.25, prefill_s=0.25), Usage(8, 1))
    expected = {
        "request_queue_time_seconds_sum": 0.5,
        "request_prefill_time_seconds_sum": 1.25,
        "request_decode_time_seconds_sum": 1.5,
        "request_inference_time_seconds_sum": 2.75,
        "request_inference_time_seconds_count": 2,
        "prefix_cache_queries_total": 48,
        "prefix_cache_hits_total": 32,
        "request_prefill_kv_computed_tokens_sum": 16,
    }
    assert {name: scraped.value(name) for name in expected} == pytest.approx(expected)


def test_a_gateway_times_a_request_token_by_token(scraped: Scraped) -> None:
    now = 100.0
    with GatewayMetrics(scraped).track("m", lambda: now) as request:
        now = 100.5
        request.tokens(1)
        now = 101.1
        request.tokens(3)  # one chunk, three tokens
        now = 101.2
        request.tokens(0)
        request.finished(FinishReason.LENGTH, Usage(7, 4, cached_tokens=2), max_tokens=4)
    expected = {
        "time_to_first_token_seconds_sum": 0.5,
        "inter_token_latency_seconds_count": 3,
        "e2e_request_latency_seconds_sum": 1.2,
        "prompt_tokens_total": 7,
        "generation_tokens_total": 4,
        "cached_prompt_tokens_total": 2,
        "request_time_per_output_token_seconds_sum": 0.2,
        "request_prompt_tokens_sum": 7,
        "request_generation_tokens_sum": 4,
        "request_params_max_tokens_sum": 4,
    }
    assert {name: scraped.value(name) for name in expected} == pytest.approx(expected)
    assert [scraped.value("inter_token_latency_seconds_bucket", le=bound) for bound in ("0.15", "0.2")] == [0, 3]
    assert scraped.value("request_success_total", finished_reason="length") == 1


def test_a_request_runs_until_it_ends_however_it_ends(scraped: Scraped) -> None:
    with suppress(ConnectionError), GatewayMetrics(scraped).track("m") as request:
        assert scraped.value("requests_running") == 1
        request.replayed()
        request.replayed_with_other_numerics()
        raise ConnectionError
    names = ("requests_running", "replays_total", "replays_other_numerics_total")
    assert [scraped.value(name) for name in names] == [0, 1, 1]
    assert not any(family.samples for family in scraped.collect() if family.name == "paceline_request_success")


def test_a_draft_counts_its_rounds(scraped: Scraped) -> None:
    metrics = DraftMetrics(scraped, "ngram")
    metrics.observe_round(RoundStats(round_s=0.004, nodes=6))
    metrics.observe_round(RoundStats(round_s=0.006, nodes=4, dropped=1))
    metrics.observe_round(RoundStats(round_s=0.5, nodes=0))  # no draft token: not a round
    metrics.set_gauge_sources(open_requests=lambda: 3, target_links=lambda: 2)
    expected = {
        "round_seconds_sum": 0.01,
        "round_seconds_count": 2,
        "nodes_total": 10,
        "requests_dropped_total": 1,
        "open_requests": 3,
        "target_links": 2,
    }
    seen = {name: scraped.get_sample_value(f"paceline_draft_{name}", {"method": "ngram"}) for name in expected}
    assert seen == pytest.approx(expected)


def exported() -> list[Scraped]:
    """The metrics of each kind of service, with samples."""
    target, draft, gateway = Scraped(), Scraped(), Scraped()
    metrics = TargetMetrics(target, "m", 1000)
    metrics.observe_step(step((2, 2, 1), preemptions=1, generation_tokens=2))
    metrics.observe_request(Timings(0.5, 0.5, 2.0, prefill_s=0.5), Usage(3, 2, cached_tokens=1))
    DraftMetrics(draft, "ngram")
    seen = GatewayMetrics(gateway)
    seen.observe_choices("m", [2])
    with seen.track("m") as request:
        request.tokens(1)
        request.tokens(1)
        request.finished(FinishReason.STOP, Usage(3, 2), max_tokens=2)
    return [target, draft, gateway]


def test_a_name_of_vllm_has_the_type_and_samples_of_our_metric() -> None:
    for registry, count in zip(exported(), (16, 0, 12), strict=True):
        families = {family.name: family for family in registry.collect()}
        theirs = [family for name, family in families.items() if name.startswith("vllm:")]
        assert len(theirs) == count
        for family in theirs:
            ours = families[family.name.replace("vllm:", "paceline_")]
            assert family.type == ours.type
            values = [(each.name.replace("vllm:", "paceline_"), each.labels, each.value) for each in family.samples]
            assert values == [each[:3] for each in ours.samples if not each.name.endswith("_created")]
            assert any(value for *_, value in values)


def test_the_manual_lists_every_metric_and_a_sum_over_all_services_counts_none_twice() -> None:
    names = [{family.name for family in registry.collect()} - {"paceline_build"} for registry in exported()]
    assert len(set.union(*names)) == sum(map(len, names))
    rows = re.findall(r"^\| `(paceline_\w+)` \|.*?(?:`(vllm:\w+)` \|)?$", MANUAL.read_text(), re.MULTILINE)
    listed = {name.removesuffix("_total") for row in rows for name in row if name}
    assert listed == {name.removesuffix("_total") for name in set.union(*names)}


def test_metrics_and_health_are_served_over_http(scraped: Scraped) -> None:
    """Health needs no certificate."""
    GatewayMetrics(scraped)
    healthy = [False, True]
    with serve_metrics(scraped, "127.0.0.1", 0, healthy.pop) as port:
        url = f"http://127.0.0.1:{port}"
        with urllib.request.urlopen(f"{url}/metrics") as response:
            families = text_string_to_metric_families(response.read().decode())
        assert {family.name for family in families} >= {
            "paceline_build_info",
            "paceline_requests",
            "vllm:prompt_tokens",
        }
        urllib.request.urlopen(f"{url}/health").close()
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{url}/health")
        with pytest.raises(OSError, match="in use"), serve_metrics(scraped, "127.0.0.1", port, lambda: True):
            pass

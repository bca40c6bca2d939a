"""The gateway's state of its workers: prefixes, sessions, expected costs, loads, and circuit breakers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import SamplingParams
from paceline.messages import EngineLoad, GenerationRequest, SpeculationStats
from paceline.state import open_store
from paceline.state.acceptance import AcceptanceCounts
from paceline.state.state_errors import StateUnavailableError
from paceline.state.worker_registry import RegisteredWorker, WorkerRecord
from paceline_services.gateway.routing.circuit_breaker import (
    FAILURES,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Breaker,
    BreakerState,
)
from paceline_services.gateway.routing.draft_workers import MIN_VERIFICATIONS, DraftAcceptanceRefresh, DraftWorkers
from paceline_services.gateway.routing.fleet import Fleet
from paceline_services.gateway.routing.target_connection import (
    BLOCK,
    DELTA_PRECEDENCE_S,
    LOAD_TTL_S,
    MAX_RETRY_AFTER_S,
    InFlightRequest,
    PrefixIndex,
    RequestCostModel,
    TargetConnection,
    TargetLoad,
    block_hashes,
)
from paceline_services.gateway.routing.worker_selection import session_home

TOKENS = st.lists(st.integers(0, 3), max_size=3 * BLOCK)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


SALTS = st.sampled_from(["", "a"])


@settings(deadline=None)
@given(sent=st.lists(st.tuples(TOKENS, SALTS), max_size=4), cut=st.integers(0, 3 * BLOCK), ends=TOKENS, salt=SALTS)
def test_the_longest_beginning_that_was_sent_with_the_same_salt_is_known(
    sent: list[tuple[list[int], str]], cut: int, ends: list[int], salt: str
) -> None:
    prefixes = PrefixIndex(10_000)
    for tokens, each in sent:
        prefixes.add(block_hashes(tokens, block_hashes(tokens[:cut], salt=each), each))
    prompt = (sent[0][0][:cut] if sent else []) + ends
    longest = max((common(tokens, prompt) // BLOCK * BLOCK for tokens, each in sent if each == salt), default=0)
    assert prefixes.cached_tokens(block_hashes(prompt, salt=salt)) == longest


def test_the_same_block_after_another_beginning_is_another_one() -> None:
    prefixes = PrefixIndex(10_000)
    prefixes.add(block_hashes([1] * BLOCK + [2] * BLOCK))
    assert prefixes.cached_tokens(block_hashes([2] * BLOCK)) == 0
    assert prefixes.cached_tokens(block_hashes([3] * BLOCK + [2] * BLOCK)) == 0


def test_what_was_not_used_for_longest_is_forgotten_ends_before_beginnings() -> None:
    prefixes = PrefixIndex(4 * BLOCK)
    old, new = block_hashes([1] * 3 * BLOCK), block_hashes([2] * 2 * BLOCK)
    prefixes.add(old)
    prefixes.add(new)
    assert len(prefixes) == 4
    assert prefixes.cached_tokens(new) == 2 * BLOCK
    assert prefixes.cached_tokens(old) == 2 * BLOCK
    prefixes.add(block_hashes([3] * 4 * BLOCK))
    assert prefixes.cached_tokens(old) == prefixes.cached_tokens(new) == 0


def test_requests_are_expected_to_generate_as_much_as_earlier_ones_within_their_limit() -> None:
    costs = RequestCostModel()
    for _ in range(200):
        costs.record_request(prompt_rows=100, output_tokens=20)
    assert costs.expected_output_tokens(1000) == pytest.approx(20)
    assert costs.expected_output_tokens(5) == 5
    assert costs.rows.value == pytest.approx(120)


def test_the_throughput_is_measured_while_requests_are_in_flight() -> None:
    costs = RequestCostModel()
    for second in range(40):
        costs.measure_throughput(float(second), busy=True)
        costs.record_rows(50.0)
    assert costs.rows_per_s == pytest.approx(50.0)
    for second in range(40, 400):
        costs.measure_throughput(float(second), busy=False)
    assert costs.rows_per_s == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("rows", "rows_per_s", "seconds"),
    [(1000, 0.0, 1), (0, 1000.0, 1), (1010, 500.0, 3), (0, 100.0, 3), (10**9, 1.0, MAX_RETRY_AFTER_S)],
)
def test_retry_after_is_whole_seconds_and_at_least_one_request_s_rows(
    rows: float, rows_per_s: float, seconds: int
) -> None:
    assert RequestCostModel(rows_per_s=rows_per_s).retry_after_s(rows) == seconds


@dataclass
class Link:
    """The attributes of a link that `TargetConnection` reads."""

    description: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(slots=1024, labels=(), features=(), max_model_len=512, numerics="")
    )
    load: EngineLoad | None = None
    lost: bool = False
    draining: bool = False


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def linked_target(link: Link, clock: Clock, **registered_load: float) -> TargetConnection:
    record = WorkerRecord("target", "t", "h:1", "m", "", "", 0.0)
    return TargetConnection(record, link, registered_load=registered_load, load=TargetLoad(clock))  # type: ignore[arg-type]


def in_flight(
    target: TargetConnection, costs: RequestCostModel, prompt: int = 2, max_tokens: int = 10
) -> InFlightRequest:
    request = GenerationRequest("r", [1] * prompt, SamplingParams(max_tokens=max_tokens))
    return InFlightRequest(target, request, [], costs)


@settings(deadline=None)
@given(prompt=st.integers(1, 500), max_tokens=st.integers(1, 500), arriving=st.lists(st.integers(1, 9), max_size=200))
def test_the_rows_left_of_a_request_fall_to_one_and_are_what_its_target_has_to_compute(
    prompt: int, max_tokens: int, arriving: list[int]
) -> None:
    target, costs = linked_target(Link(), Clock()), RequestCostModel()
    with in_flight(target, costs, prompt, max_tokens) as request:
        assert target.rows_before_first_token == request.rows_left == prompt + costs.expected_output_tokens(max_tokens)
        for count in arriving:
            before = request.rows_left
            request.add_tokens([1] * count)
            assert 1.0 <= request.rows_left <= before
            assert target.expected_rows(costs) == request.rows_left
            assert target.rows_before_first_token == 0.0
    assert not target.requests
    assert not target.without_first_token


def test_a_prompt_counts_as_cached_from_its_request_s_first_token_on() -> None:
    target, blocks = linked_target(Link(), Clock()), block_hashes([1] * 2 * BLOCK)
    request = GenerationRequest("r", [1] * 2 * BLOCK, SamplingParams(max_tokens=10))
    with InFlightRequest(target, request, blocks, RequestCostModel()) as in_flight:
        assert target.prefixes.cached_tokens(blocks) == 0
        in_flight.add_tokens([1])
        assert target.prefixes.cached_tokens(blocks) == 2 * BLOCK


def test_own_requests_are_not_counted_as_other_gateways_after_they_have_ended(clock: Clock) -> None:
    """Otherwise every further request would go to the other target, and from there all back again."""
    link, costs = Link(), RequestCostModel()
    target, usual = linked_target(link, clock, running=3.0), costs.rows.value
    assert target.expected_rows(costs) == 3 * usual
    with ExitStack() as stack:
        requests = [stack.enter_context(in_flight(target, costs)) for _ in range(5)]
        target.update_registered_load({"running": 8.0, "beat": 1})
        assert target.expected_rows(costs) == 3 * usual + sum(each.rows_left for each in requests)
        link.load = EngineLoad(running=6, waiting=1, free_slots=0, rows=0, step_s=0.0)
        requests[-1].add_tokens([1])
        target.update_registered_load({"running": 99.0, "beat": 2})
        own = sum(each.rows_left for each in requests)
        assert target.expected_rows(costs) == 2 * usual + own, "a delta is newer than a heartbeat soon after it"
    target.update_from_link()
    assert target.expected_rows(costs) == 2 * usual, "a load counts when it arrives, not when it is read"
    target.update_registered_load({"running": 99.0, "beat": 3})
    assert target.expected_rows(costs) == 2 * usual, "this heartbeat was sent before the requests had ended"
    clock.now += DELTA_PRECEDENCE_S
    target.update_registered_load({"running": 99.0, "beat": 3})
    assert target.expected_rows(costs) == 2 * usual, "an old heartbeat, read again"
    target.update_registered_load({"running": 4.0, "waiting": 1.0, "beat": 4})
    assert target.expected_rows(costs) == 5 * usual


def test_a_load_that_is_not_refreshed_expires(clock: Clock) -> None:
    """Redis fails while other gateways have filled the queue: this gateway would refuse requests until it is back."""
    target = linked_target(Link(), clock, running=8.0, waiting=50.0)
    clock.now += LOAD_TTL_S - 1.0
    assert target.waiting == 50.0
    target.update_registered_load({"running": 8.0, "waiting": 40.0, "beat": 1})
    clock.now += LOAD_TTL_S - 1.0
    assert target.waiting == 40.0
    clock.now += 1.0
    assert (target.waiting, target.expected_rows(RequestCostModel())) == (0.0, 0.0)
    with in_flight(target, RequestCostModel()):
        assert target.waiting == 1.0, "its own request"


def test_a_conversation_whose_home_cannot_take_a_request_has_no_other_home(clock: Clock) -> None:
    fleet = Fleet("m", "")
    fleet.targets = {name: linked_target(Link(), clock) for name in "abc"}
    request = GenerationRequest("r", [1], SamplingParams())
    home = str(session_home("abc", "talk"))
    for refused_by, has_session in ((None, True), (fleet.targets[home], False)):
        chosen = fleet.choose(request, [], session="talk", refused_by=refused_by)
        assert chosen is not None
        assert chosen[1].has_session is has_session


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock)


def opened(breaker: Breaker) -> Breaker:
    for _ in range(FAILURES):
        breaker.on_failure()
    return breaker


def test_failures_open_only_in_a_row(breaker: Breaker) -> None:
    for _ in range(3):
        for _ in range(FAILURES - 1):
            breaker.on_failure()
        breaker.on_success()
    assert breaker.state == BreakerState.CLOSED
    assert opened(breaker).state == BreakerState.OPEN
    assert not breaker.allows


def test_one_request_probes_while_others_wait(breaker: Breaker, clock: Clock) -> None:
    """An answer that ends badly opens again for longer, and a good end forgives."""
    opened(breaker)
    clock.now += FIRST_PAUSE_S
    assert (breaker.state, breaker.allows) == (BreakerState.HALF_OPEN, True)
    breaker.on_sent("probe")
    assert not breaker.allows
    breaker.on_abandoned("sent before the pause")
    assert not breaker.allows
    breaker.on_abandoned("probe")
    assert breaker.allows
    breaker.on_sent("probe")
    breaker.on_first_token()
    assert (breaker.state, breaker.allows) == (BreakerState.CLOSED, True)
    breaker.on_failure()
    assert breaker.probe_in_s == 2 * FIRST_PAUSE_S
    clock.now += 2 * FIRST_PAUSE_S
    breaker.on_sent("probe")
    breaker.on_first_token()
    breaker.on_success()
    breaker.on_failure()
    assert breaker.state == BreakerState.CLOSED
    assert opened(breaker).probe_in_s == FIRST_PAUSE_S


def test_each_failed_probe_doubles_the_pause_up_to_a_limit(breaker: Breaker, clock: Clock) -> None:
    """Failures during a pause do not prolong it."""
    opened(breaker)
    pauses = []
    for _ in range(9):
        pauses.append(breaker.probe_in_s)
        clock.now += breaker.probe_in_s / 2
        breaker.on_failure()
        assert breaker.probe_in_s == pauses[-1] / 2
        clock.now += breaker.probe_in_s
        breaker.on_sent("probe")
        breaker.on_failure()
    assert pauses == [min(FIRST_PAUSE_S * 2**n, LONGEST_PAUSE_S) for n in range(9)]


def drafts(recorded: list[tuple[str, AcceptanceCounts]] | None = None) -> DraftWorkers:
    """Three workers: two of one kind, and a lookup."""
    pool = DraftWorkers(lambda *acceptance: None if recorded is None else recorded.append(acceptance))
    records = [
        WorkerRecord("draft", "one", "one:1", "small", "draft_model", "", 0.0),
        WorkerRecord("draft", "two", "two:1", "small", "draft_model", "", 0.0),
        WorkerRecord("draft", "lookup", "lookup:1", "", "ngram", "", 0.0),
    ]
    pool.update_workers([RegisteredWorker(record, {"requests": 0.0}) for record in records])
    return pool


def stats(*served: str, drafted: int = 10, accepted: int = 5) -> SpeculationStats:
    return SpeculationStats([drafted], [accepted], drafted_tokens=drafted, verifications=drafted, drafts=list(served))


def test_the_acceptance_of_a_kind_decides_the_order() -> None:
    recorded: list[tuple[str, AcceptanceCounts]] = []
    pool = drafts(recorded)
    pool.record_request(pool.order(greedy=True), stats("one", accepted=8), greedy=True)
    [(kind, acceptance)] = recorded
    assert kind in pool.kinds()
    assert acceptance.acceptance_length == 0.8
    pool.update_acceptance(kind, sum([acceptance] * int(MIN_VERIFICATIONS), AcceptanceCounts()))
    lookup = AcceptanceCounts(MIN_VERIFICATIONS, [MIN_VERIFICATIONS], [0.1 * MIN_VERIFICATIONS])
    pool.update_acceptance("ngram  greedy", lookup)
    drafts_in_order = [pool.order(greedy=True) for _ in range(4)]
    assert all(order[2] == "lookup:1" for order in drafts_in_order)
    assert {order[0] for order in drafts_in_order} == {"one:1", "two:1"}
    assert "lookup:1" in {pool.order(greedy=False)[0] for _ in range(4)}  # of sampled requests nothing is known


def states(pool: DraftWorkers) -> list[BreakerState]:
    return [pool.breakers[address].state for address in ("one:1", "two:1", "lookup:1")]


def test_a_request_with_several_drafts_counts_for_no_kind_but_shows_which_failed() -> None:
    recorded: list[tuple[str, AcceptanceCounts]] = []
    pool = drafts(recorded)
    for _ in range(FAILURES):
        pool.record_request(["one:1", "two:1"], stats("one", "two"), greedy=True)
    assert recorded == []
    assert states(pool) == [BreakerState.OPEN, BreakerState.CLOSED, BreakerState.CLOSED]
    assert all(pool.order(greedy=True)[-1] == "one:1" for _ in range(20))


def test_a_draft_that_targets_pass_over_has_failed() -> None:
    """Requests without drafts or statistics blame no draft."""
    pool = drafts()
    for _ in range(FAILURES):
        pool.record_request(pool.order(greedy=True), None, greedy=True)
        pool.record_request(pool.order(greedy=True), stats(), greedy=True)
        pool.record_request([], stats("local"), greedy=True)
        pool.record_request(["gone:1"], stats("gone"), greedy=True)
    assert set(states(pool)) == {BreakerState.CLOSED}
    for _ in range(FAILURES):
        pool.record_request(["one:1", "two:1", "lookup:1"], stats("two"), greedy=True)
    assert states(pool) == [BreakerState.OPEN, BreakerState.CLOSED, BreakerState.CLOSED]


def test_a_draft_s_probe_without_statistics_lets_another_request_probe() -> None:
    pool = drafts()
    breaker = opened(pool.breakers["one:1"])
    breaker._clock = lambda: breaker._until or 0.0
    probe = next(order for order in (pool.order(greedy=True) for _ in range(3)) if order[0] == "one:1")
    assert not breaker.allows
    pool.record_request(["one:1"], None, greedy=True)
    assert not breaker.allows, "of another request"
    pool.record_request(probe, None, greedy=True)
    assert breaker.allows


async def test_a_refresh_without_drafts_does_not_take_redis_for_back() -> None:
    """A past bug: the log said so every two seconds."""

    async def lost() -> None:
        raise StateUnavailableError("away")

    async with open_store(None) as store:
        await store.presence.attempt(lost())
        await DraftAcceptanceRefresh(DraftWorkers(), "m", store).run_once()
        assert store.presence.unavailable

"""The scheduler under random load: no request starves, and nodes take only spare rows and slots."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import EngineConfig
from paceline.core.growth import Growth
from paceline.core.policy.step_cost import RowChoice, RowCost, StepCost
from paceline.core.tree import ROOT
from paceline.engine.draft_schedule import draft_frontier
from paceline.engine.request import Request
from paceline.engine.scheduler import ScheduledRequest, Scheduler
from paceline.engine.slot_pool import SlotPool
from paceline.model.rows import BLOCK_SIZE
from tests.unit.engine.bare_request import bare_request

SLOTS = 256
MAX_NODES = 100
FREE = RowCost([8, 256], [1.0, 1.001])
STEEP = RowCost([8, 16], [1.0, 100.0])


def request(
    key: int, prompt: int, output: int = 10, *, token: int = 0, client: str = "", group: str = "", priority: int = 0
) -> Request:
    """`token`: repeated in the prompt."""
    tokens, whose = [token] * prompt, {"client": client, "group": group}
    return bare_request(tokens, key=key, output=output, limits=(8, 8), priority=priority, **whose)


def scheduler(*, rows: int = 64, seqs: int = 64, caching: bool = True, cost: StepCost | None = None) -> Scheduler:
    config = EngineConfig(slots=SLOTS, max_num_batched_rows=rows, max_num_seqs=seqs)
    return Scheduler(config, SlotPool(SLOTS, caching=caching), cost or StepCost(FREE))


def check(scheduler: Scheduler, batch: Sequence[ScheduledRequest], rows: int) -> None:
    """Invariants of a step."""
    assert sum(each.stop - each.start + len(each.nodes) for each in batch) <= rows
    assert len({each.request.key for each in batch}) == len(batch)
    for each in batch:
        assert each.request in scheduler.running
        assert each.start < each.stop == len(each.request.slot_table) <= len(each.request.tokens)
        assert len(each.nodes) == len(each.slots)
        assert each.draws or not each.nodes, "a node without its root"
        known = {ROOT}
        for node in each.nodes:
            assert each.request.tree.parents[node] in known, "a node without its parent, or before it"
            known.add(node)
    if scheduler.running:
        assert batch[0].request is scheduler.running[0], "the oldest request makes no progress"
    requests = list(scheduler.requests())
    owned = [*(r.own_slots() for r in requests), *(w.slots for w in batch)]
    scheduler.pool.check_integrity(owned, [r.shared_blocks for r in requests])


def commit(scheduler: Scheduler, batch: Sequence[ScheduledRequest]) -> None:
    """Commit one token per drawing request, as if no node was accepted."""
    for each in batch:
        each.request.record_prefill(each.stop)
        scheduler.pool.return_slots(each.slots)
        if each.draws:
            each.request.tokens.append(7)
            each.request.tree.commit([7])
            if each.request.output_tokens >= each.request.max_tokens:
                scheduler.finish(each.request)


def step(scheduler: Scheduler) -> list[ScheduledRequest]:
    batch = scheduler.schedule()
    commit(scheduler, batch)
    return batch


def keys(requests: Iterable[Request]) -> list[int]:
    return [each.key for each in requests]


def test_requests_start_in_order_of_arrival() -> None:
    scheduled, started = scheduler(rows=32), list[int]()
    scheduled.waiting += [request(key, prompt) for key, prompt in enumerate([100, 3, 50, 1], 1)]
    while scheduled.waiting or scheduled.running:
        started += [each.request.key for each in step(scheduled) if each.request.key not in started]
    assert started == [1, 2, 3, 4]


def test_a_long_prompt_does_not_delay_decoding() -> None:
    scheduled = scheduler(rows=16)
    scheduled.waiting += [request(1, 4), request(2, 100)]
    step(scheduled)
    while scheduled.running[0].key == 1:
        batch = scheduled.schedule()
        assert batch[0].request.key == 1
        assert batch[0].draws
        commit(scheduled, batch)


def test_slots_for_a_whole_prompt_are_reserved() -> None:
    """Otherwise both prompts would be half computed, one of them in vain."""
    scheduled = scheduler(rows=32)
    scheduled.waiting += [request(1, 150, token=1), request(2, 150, token=2)]
    for _ in range(5):
        assert [each.request.key for each in scheduled.schedule()] == [1]
    assert scheduled.preemptions == 0


def test_the_youngest_is_preempted_and_restarts_first() -> None:
    scheduled = scheduler(rows=256)
    scheduled.waiting += [request(key, prompt, 50, token=key) for key, prompt in enumerate([100, 100, 50, 200], 1)]
    while not scheduled.preemptions:
        step(scheduled)
    assert keys(scheduled.running) == [1, 2]
    assert keys(scheduled.waiting) == [3, 4]
    victim = scheduled.waiting[0]
    assert len(victim.tokens) > 50, "committed tokens stay"
    assert not victim.own_slots()


def test_the_largest_group_is_preempted_for_slots() -> None:
    scheduled = scheduler()
    scheduled.waiting += [request(key, 40, 60, token=key, group="choices") for key in (1, 2, 3, 4)]
    step(scheduled)
    scheduled.waiting.append(request(5, 40, 60, token=5))
    while not scheduled.preemptions:
        step(scheduled)
    assert keys(scheduled.waiting) == [4]


def test_a_preempted_request_finds_its_own_cached_blocks() -> None:
    """Usage counts only blocks that other requests computed."""
    scheduled = scheduler(rows=256)
    scheduled.waiting += [request(1, 100, 60, token=1), request(2, 140, 60, token=2)]
    while not scheduled.preemptions:
        step(scheduled)
    [victim] = scheduled.waiting
    while scheduled.waiting:
        batch = step(scheduled)
    [again] = [each for each in batch if each.request is victim]
    assert again.start > 0
    assert again.start % BLOCK_SIZE == 0
    assert victim.cached_tokens == 0


@pytest.mark.parametrize(
    ("first", "later", "running"),
    [
        ([("", "choices")] * 10, [("", "small"), ("", "")], [1, 2, 20, 21]),
        ([("busy", "")] * 10, [("other", "choices")] * 3, [1, 2, 20, 21]),  # many choices get no smaller share
        ([("", "a"), ("", "b"), ("", "c"), ("", "d")], [("", "e")], [1, 2, 3, 4]),
        ([("a", ""), ("b", ""), ("c", ""), ("d", "")], [("e", "")], [1, 2, 3, 4]),
    ],
    ids=["choices of one request", "requests of one client", "a group with one more", "a client with one more"],
)
def test_clients_and_groups_share_fairly(
    first: Sequence[tuple[str, str]], later: Sequence[tuple[str, str]], running: list[int]
) -> None:
    """The youngest request of the largest share is preempted. A difference of one does not preempt: two clients would
    preempt each other at every step."""
    scheduled = scheduler(seqs=4)
    scheduled.waiting += [request(key, 5, client=client, group=group) for key, (client, group) in enumerate(first, 1)]
    step(scheduled)
    assert keys(scheduled.running) == [1, 2, 3, 4]
    scheduled.waiting += [request(key, 5, client=client, group=group) for key, (client, group) in enumerate(later, 20)]
    for _ in range(2):
        step(scheduled)
    assert keys(scheduled.running) == running
    preempted = [key for key in (3, 4) if key not in running]
    assert keys(scheduled.waiting)[: len(preempted)] == preempted
    before = scheduled.preemptions
    step(scheduled)
    assert scheduled.preemptions == before == len(preempted), "the shares are equal"


@pytest.mark.parametrize(
    ("waiting", "started"),
    [
        ([("", 0), ("", 5), ("", -1), ("", 5)], [3, 1, 2, 4]),
        ([("a", 9), ("b", 0), ("a", 1), ("b", -7)], [3, 1, 4, 2]),
        ([("b", 0), ("b", 0), ("a", -100)], [1, 2, 3]),
    ],
    ids=["one client", "two clients", "no other client waits longer"],
)
def test_priorities_order_the_requests_of_one_client(waiting: Sequence[tuple[str, int]], started: list[int]) -> None:
    """Each runs alone: a request starts when the one before has ended."""
    scheduled, order = scheduler(seqs=1), list[int]()
    scheduled.waiting += [request(key, 5, 1, client=c, priority=p) for key, (c, p) in enumerate(waiting, 1)]
    while scheduled.waiting:
        order += [each.request.key for each in step(scheduled)]
    assert order == started


def test_the_last_priority_of_a_client_is_preempted_for_slots() -> None:
    scheduled = scheduler(rows=256)
    scheduled.waiting += [
        request(key, 60, 60, token=key, client=client, priority=priority)
        for key, (client, priority) in enumerate([("a", 7), ("a", 0), ("b", 9), ("a", 0)], 1)
    ]
    while not scheduled.preemptions:
        step(scheduled)
    assert keys(scheduled.waiting) == [1]


@pytest.mark.parametrize(
    ("passes", "node_overhead_s", "rows", "requests", "verified"),
    [
        (STEEP, 0.0, 64, 2, [3, 3]),  # rows of the same cost, and the best nodes over all requests
        (FREE, 10.0, 64, 2, [0, 0]),  # nodes with a high overhead
        (FREE, 0.0, 12, 3, [3, 3, 3]),  # the rows left
        (FREE, 0.0, 64, 3, [8, 8, 8]),  # the requests' limits
    ],
)
def test_nodes_within_rows_costs_and_limits_are_verified(
    passes: RowCost, node_overhead_s: float, rows: int, requests: int, verified: list[int]
) -> None:
    """Of requests that draw, each with a chain of eight probable nodes."""
    cost = StepCost(passes)
    cost.node_overhead_s = node_overhead_s
    scheduled = scheduler(rows=rows, cost=cost)
    scheduled.waiting += [request(key, 3, token=key) for key in range(1, requests + 1)]
    step(scheduled)
    for each in scheduled.running:
        node = ROOT
        for token in range(8):
            node = each.tree.add(node, token + 100, -0.1)
    assert [len(each.nodes) for each in scheduled.schedule()] == verified


def test_max_tokens_leaves_room_for_the_bonus_token() -> None:
    assert request(1, 5, output=3).depth_allowed() == 2


def test_no_request_is_expected_to_draw_while_prompts_are_computed() -> None:
    scheduled = scheduler(rows=16, seqs=2)
    scheduled.waiting += [request(1, 30), request(2, 3), request(3, 3)]
    assert not scheduled.expected_to_draw(), "a prompt is waiting"
    while len(scheduled.running) < 2 or any(each.uncomputed_tokens > 1 for each in scheduled.running):
        step(scheduled)
        assert scheduled.expected_to_draw() or len(scheduled.running) < 2
    assert scheduled.expected_to_draw() == tuple(scheduled.running), "the third cannot start yet"


def test_no_request_is_expected_to_draw_with_a_half_computed_prompt() -> None:
    scheduled = scheduler(rows=16, seqs=1)
    scheduled.waiting += [request(1, 30), request(2, 3)]
    step(scheduled)
    assert keys(scheduled.running) == [1]
    assert not scheduled.expected_to_draw()


def choice(*requests: Request) -> RowChoice:
    return RowChoice([(each.tree, each.candidate_nodes()) for each in requests], StepCost(FREE))


def test_forecast() -> None:
    plain, guessed = request(1, 3), request(2, 3)
    guessed.draft = "somebody"
    guessed.tree.graft(Growth(2, 1, [0, 1], [5, 6], [-0.5, -0.5]), MAX_NODES)
    forecast = choice(plain, guessed)
    assert forecast.tokens == pytest.approx(2 + 0.6065 + 0.3679, abs=1e-3)
    assert forecast.nodes() == [[], [1, 2]]
    assert forecast.seconds() == FREE(4)
    assert draft_frontier([plain, guessed]).deepest == pytest.approx(0.3679, abs=1e-3)
    assert draft_frontier([plain]).deepest == 0, "it has no draft"


def test_the_frontier_is_the_deepest_nodes_that_may_grow() -> None:
    root, wide = request(1, 3), request(2, 3)
    root.draft = wide.draft = "somebody"
    wide.tree.graft(Growth(2, 1, [0, 0], [5, 6], [math.log(0.5), math.log(0.3)]), MAX_NODES)
    assert draft_frontier([root]).deepest == 1
    assert draft_frontier([root, wide]).deepest == pytest.approx(1.8)
    wide.tree.graft(Growth(2, 3, [1], [7], [math.log(0.4)]), MAX_NODES)
    assert draft_frontier([wide]).deepest == pytest.approx(0.2)
    wide.max_depth = 3
    assert draft_frontier([wide]).levels_left == 1
    assert draft_frontier([wide, root]).levels_left == root.max_depth > 1
    wide.max_depth = 2
    assert draft_frontier([wide]).deepest == 0, "nothing deeper is verified"
    assert draft_frontier([wide]).levels_left == 0


def test_deeper_lookup_nodes_are_not_the_frontier() -> None:
    """A lookup may have followed an improbable path."""
    both = request(1, 3)
    both.draft = "somebody"
    both.tree.graft(Growth(2, 1, [0, 1, 2], [5, 6, 7], [math.log(0.5)] * 3), MAX_NODES, source=1)
    frontier = draft_frontier([both])
    assert (frontier.own, frontier.deepest) == (0, 1)
    assert frontier.covered_by_lookups == pytest.approx(0.5)
    assert frontier.by_lookups == pytest.approx(0.5 + 0.25 + 0.125)
    both.tree.graft(Growth(2, 1, [0, 0], [5, 8], [math.log(0.6), math.log(0.3)]), MAX_NODES)
    frontier = draft_frontier([both])
    assert frontier.own == frontier.deepest == pytest.approx(0.9), "one node is from both"
    assert frontier.covered_by_lookups == pytest.approx(0.3), "below the common node"
    assert frontier.by_lookups == pytest.approx(0.3 + 0.15)
    assert choice(both).tokens == pytest.approx(1 + 0.9 + 0.3 + 0.15)
    again = request(2, 3)
    again.draft = "somebody"
    again.tree.graft(Growth(2, 1, [0, 1], [5, 6], [math.log(0.5)] * 2), MAX_NODES, source=1)
    assert draft_frontier([both, again]).covered_by_lookups == pytest.approx(0.3 + 0.5)


def grow(request: Request, width: int, rng: random.Random) -> None:
    """Add nodes; none has the token that `commit` commits."""
    for _ in range(width):
        parent, token = rng.randrange(request.tree.size + 1), rng.randrange(100, 200)
        if request.tree.child(parent, token) is None:
            request.tree.add(parent, token, -rng.random())


@dataclass
class Load:
    """Random arrivals, from tiny requests to ones that need all slots."""

    seed: int
    rows: int
    seqs: int
    caching: bool = True
    width: int = 0

    def run(self) -> list[tuple[int, int, int, bool]]:
        """Serve all requests. Returns (request, start, stop, whether the step preempted) of each computation."""
        arrivals, guesses = random.Random(self.seed), random.Random(self.seed + 1)
        scheduled = scheduler(rows=self.rows, seqs=self.seqs, caching=self.caching)
        trace = []
        submitted = 0
        for _ in range(3000):
            while submitted < 15 and arrivals.random() < 0.3:
                output = arrivals.randint(1, 20)
                prompt = arrivals.choice([1, 5, 40, arrivals.randint(1, SLOTS - output)])
                submitted += 1
                client, group = arrivals.choice(["a", "b"]), arrivals.choice(["", "x"])
                token = arrivals.randrange(3)
                scheduled.waiting.append(request(submitted, prompt, output, token=token, client=client, group=group))
            for each in scheduled.running:
                grow(each, self.width, guesses)
            before = scheduled.preemptions
            batch = scheduled.schedule()
            check(scheduled, batch, self.rows)
            assert len(scheduled.running) <= self.seqs
            trace += [(w.request.key, w.start, w.stop, scheduled.preemptions > before) for w in batch]
            commit(scheduled, batch)
            if submitted == 15 and not scheduled.running and not scheduled.waiting:
                assert scheduled.pool.free == SLOTS
                return trace
        raise AssertionError("a request starves")


loads = st.builds(
    Load, st.integers(0, 2**32), st.sampled_from([8, 9, 64, 300]), st.sampled_from([1, 3, 64]), st.booleans()
)


@given(loads)
@settings(max_examples=25, deadline=None)
def test_all_requests_are_served_within_rows_and_slots(load: Load) -> None:
    trace = load.run()
    assert {key for key, *_ in trace} == set(range(1, 16))


@given(loads)
@settings(max_examples=8, deadline=None)
def test_nodes_take_only_spare_rows_and_slots(load: Load) -> None:
    """Prompts, decoding and preemption are the same as without nodes.

    Only without a cache: nodes may take slots from cached blocks.
    """
    load.caching = False
    plain = load.run()
    load.width = 4
    assert load.run() == plain


def test_the_load_does_preempt() -> None:
    """Otherwise the two tests above would prove little."""
    assert any(preempted for *_, preempted in Load(seed=1, rows=64, seqs=64).run())

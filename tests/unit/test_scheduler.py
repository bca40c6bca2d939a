"""The scheduler under random load: no request starves, and nodes take only spare rows and slots."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import EngineConfig
from paceline.core.growth import Growth
from paceline.core.policy.step_cost import RowCost, StepCost
from paceline.core.tree import ROOT
from paceline.engine.draft_schedule import draft_frontier, forecast_step
from paceline.engine.request import Request
from paceline.engine.scheduler import ScheduledRequest, Scheduler
from paceline.engine.slot_pool import BLOCK_SIZE, SlotPool
from tests.helpers.bare_request import bare_request

SLOTS = 256
MAX_NODES = 100
FREE = StepCost(RowCost([8, 256], [1.0, 1.001]))
STEEP = StepCost(RowCost([8, 16], [1.0, 100.0]))


def request(
    key: int,
    prompt: int,
    output: int = 10,
    limits: tuple[int, int] = (4, 8),
    token: int = 0,
    client: str = "",
    group: str = "",
) -> Request:
    """`token`: repeated in the prompt."""
    return bare_request([token] * prompt, key=key, output=output, limits=limits, client=client, group=group)


def scheduler(*, rows: int = 64, seqs: int = 64, caching: bool = True, cost: StepCost = FREE) -> Scheduler:
    config = EngineConfig(slots=SLOTS, max_num_batched_rows=rows, max_num_seqs=seqs)
    return Scheduler(config, SlotPool(SLOTS, caching=caching), cost)


def check(scheduler: Scheduler, batch: Sequence[ScheduledRequest], rows: int) -> None:
    """Invariants of a step."""
    assert sum(w.stop - w.start + len(w.nodes) for w in batch) <= rows
    assert len({w.request.key for w in batch}) == len(batch)
    for scheduled_request in batch:
        assert scheduled_request.request in scheduler.running
        assert (
            scheduled_request.start
            < scheduled_request.stop
            == len(scheduled_request.request.slot_table)
            <= len(scheduled_request.request.tokens)
        )
        assert len(scheduled_request.nodes) == len(scheduled_request.slots)
        assert scheduled_request.samples or not scheduled_request.nodes, "a node without its root"
        known = {ROOT}
        for node in scheduled_request.nodes:
            assert scheduled_request.request.tree.parents[node] in known, "a node without its parent, or before it"
            known.add(node)
    if scheduler.running:
        assert batch[0].request is scheduler.running[0], "the oldest request makes no progress"
    requests = list(scheduler.requests())
    owned = [*(r.own_slots() for r in requests), *(w.slots for w in batch)]
    scheduler.pool.check_integrity(owned, [r.shared_blocks for r in requests])


def commit(scheduler: Scheduler, batch: Sequence[ScheduledRequest], token: int = 7) -> None:
    """Commit one token per drawing request, as if no node was accepted."""
    for scheduled_request in batch:
        scheduled_request.request.record_prefill(scheduled_request.stop)
        scheduler.pool.return_slots(scheduled_request.slots)
        if scheduled_request.samples:
            scheduled_request.request.tokens.append(token)
            scheduled_request.request.tree.commit([token])
            if scheduled_request.request.output_tokens >= scheduled_request.request.max_tokens:
                scheduler.finish(scheduled_request.request)


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


def test_requests_start_in_order_of_arrival() -> None:
    scheduled = scheduler(rows=32)
    for key, prompt in enumerate([100, 3, 50, 1], 1):
        scheduled.waiting.append(request(key, prompt))
    started: list[int] = []
    while scheduled.waiting or scheduled.running:
        batch = scheduled.schedule()
        started += [w.request.key for w in batch if w.request.key not in started]
        commit(scheduled, batch)
    assert started == [1, 2, 3, 4]


def test_a_long_prompt_does_not_delay_decoding() -> None:
    scheduled = scheduler(rows=16)
    scheduled.waiting += [request(1, 4), request(2, 100)]
    commit(scheduled, scheduled.schedule())
    while scheduled.running[0].key == 1:
        batch = scheduled.schedule()
        assert batch[0].request.key == 1
        assert batch[0].samples
        commit(scheduled, batch)


def test_slots_for_a_whole_prompt_are_reserved() -> None:
    """Otherwise both prompts would be half computed, one of them in vain."""
    scheduled = scheduler(rows=32)
    scheduled.waiting += [request(1, 150, token=1), request(2, 150, token=2)]
    for _ in range(5):
        assert [w.request.key for w in scheduled.schedule()] == [1]
    assert scheduled.preemptions == 0


def test_the_youngest_is_preempted_and_restarts_first() -> None:
    scheduled = scheduler(rows=256)
    for key, prompt in enumerate([100, 100, 50, 200], 1):
        scheduled.waiting.append(request(key, prompt, output=50, token=key))
    while not scheduled.preemptions:
        commit(scheduled, scheduled.schedule())
    assert [r.key for r in scheduled.running] == [1, 2]
    assert [r.key for r in scheduled.waiting] == [3, 4]
    victim = scheduled.waiting[0]
    assert len(victim.tokens) > 50, "committed tokens stay"
    assert not victim.own_slots()


def test_many_choices_of_one_request_yield_to_others() -> None:
    """The youngest choice is preempted, and runs again later."""
    scheduled = scheduler(seqs=4)
    scheduled.waiting += [request(key, 5, group="choices") for key in range(1, 11)]
    commit(scheduled, scheduled.schedule())
    assert [each.key for each in scheduled.running] == [1, 2, 3, 4]
    scheduled.waiting += [request(20, 5, output=3, group="small"), request(21, 5, output=3)]
    commit(scheduled, scheduled.schedule())
    batch = scheduled.schedule()
    assert [scheduled_request.request.key for scheduled_request in batch] == [1, 2, 20, 21]
    while any(each.key >= 20 for each in scheduled.running):
        commit(scheduled, batch)
        batch = scheduled.schedule()
    assert [each.key for each in scheduled.running][:2] == [1, 2]
    assert {each.key for each in scheduled.running[2:]} == {3, 4}


def test_clients_share_fairly() -> None:
    """Many requests get no larger share than many choices of one request."""
    scheduled = scheduler(seqs=4)
    scheduled.waiting += [request(key, 5, client="busy") for key in range(1, 11)]
    commit(scheduled, scheduled.schedule())
    scheduled.waiting += [request(key, 5, client="other", group="choices") for key in (20, 21, 22)]
    for _ in range(2):
        commit(scheduled, scheduled.schedule())
    assert [each.key for each in scheduled.running] == [1, 2, 20, 21]
    assert scheduled.waiting[0].key == 3
    before = scheduled.preemptions
    commit(scheduled, scheduled.schedule())
    assert scheduled.preemptions == before, "the shares are equal"


def test_the_largest_group_is_preempted_for_slots() -> None:
    scheduled = scheduler()
    scheduled.waiting += [request(key, 40, output=60, token=key, group="choices") for key in (1, 2, 3, 4)]
    commit(scheduled, scheduled.schedule())
    scheduled.waiting.append(request(5, 40, output=60, token=5))
    while not scheduled.preemptions:
        commit(scheduled, scheduled.schedule())
    assert [each.key for each in scheduled.waiting] == [4]


def test_a_difference_of_one_does_not_preempt() -> None:
    """Otherwise two clients would preempt each other at every step."""
    scheduled = scheduler(seqs=2)
    scheduled.waiting += [request(1, 5, group="a"), request(2, 5, group="b")]
    commit(scheduled, scheduled.schedule())
    scheduled.waiting.append(request(3, 5, group="c"))
    commit(scheduled, scheduled.schedule())
    assert [each.key for each in scheduled.running] == [1, 2]


def test_a_preempted_request_finds_its_own_cached_blocks() -> None:
    """Usage counts only blocks that other requests computed."""
    scheduled = scheduler(rows=256)
    scheduled.waiting += [request(1, 100, output=60, token=1), request(2, 140, output=60, token=2)]
    while not scheduled.preemptions:
        commit(scheduled, scheduled.schedule())
    [victim] = scheduled.waiting
    while scheduled.waiting:
        batch = scheduled.schedule()
        commit(scheduled, batch)
    [again] = [scheduled_request for scheduled_request in batch if scheduled_request.request is victim]
    assert again.start > 0
    assert again.start % BLOCK_SIZE == 0
    assert victim.cached_tokens == 0


def test_prompt_tokens_count_once() -> None:
    each = request(1, 100)
    each.start()
    assert each.record_prefill(40) == 40
    assert each.record_prefill(100) == 60
    assert each.record_prefill(16) == 0  # computed again after preemption
    assert each.record_prefill(101) == 0  # the first token of the output is not one of them


def test_cached_prompt_tokens_do_not_count() -> None:
    pool = SlotPool(SLOTS)
    first, second = request(1, 100), request(2, 100)
    first.slot_table.slots.extend(pool.allocate(100))
    first.release_slots(pool)
    second.attach_prefix(pool)
    second.start()
    assert second.cached_tokens == 6 * BLOCK_SIZE
    assert second.record_prefill(100) == 4
    assert second.usage().cached_tokens == 6 * BLOCK_SIZE


def drawing(scheduled: Scheduler, requests: int, nodes: int) -> list[ScheduledRequest]:
    """A step of requests that draw, each with a chain of probable nodes."""
    for key in range(1, requests + 1):
        scheduled.waiting.append(request(key, 3, limits=(8, nodes), token=key))
    commit(scheduled, scheduled.schedule())
    for each in scheduled.running:
        node = ROOT
        for token in range(nodes):
            node = each.tree.add(node, token + 100, -0.1)
    return scheduled.schedule()


def test_nodes_fill_rows_of_the_same_cost() -> None:
    batch = drawing(scheduler(cost=STEEP), requests=2, nodes=8)
    assert sum(len(w.nodes) for w in batch) == 6
    assert {len(w.nodes) for w in batch} == {3}, "the best over all requests"


def test_nodes_with_a_high_overhead_are_left_out() -> None:
    cost = StepCost(RowCost([8, 256], [1.0, 1.001]))
    cost.node_overhead_s = 10.0
    assert sum(len(w.nodes) for w in drawing(scheduler(cost=cost), requests=2, nodes=8)) == 0


def test_nodes_keep_to_the_rows_left() -> None:
    batch = drawing(scheduler(rows=12), requests=3, nodes=8)
    assert sum(len(w.nodes) for w in batch) == 9


def test_the_best_node_without_a_row_is_recorded() -> None:
    """Also where rows run out, not only where another row does not pay."""
    scarce, ample = scheduler(rows=12), scheduler()
    drawing(scarce, requests=3, nodes=8)
    drawing(ample, requests=3, nodes=8)
    assert scarce.best_unverified == pytest.approx(math.exp(-0.4)), "three guesses of each chain have a row"
    assert ample.best_unverified == 0.0


def test_nodes_keep_to_the_requests_limits() -> None:
    [scheduled_request] = drawing(scheduler(), requests=1, nodes=4)
    assert len(scheduled_request.nodes) == 4
    deep = request(1, 5, output=3, limits=(8, 8))
    assert deep.depth_allowed() == 2, "max_tokens leaves room for the bonus token"


def test_drawing_is_empty_while_prompts_are_computed() -> None:
    scheduled = scheduler(rows=16, seqs=2)
    scheduled.waiting += [request(1, 30), request(2, 3), request(3, 3)]
    assert not scheduled.drawing(), "a prompt is waiting"
    commit(scheduled, scheduled.schedule())
    assert scheduled.running
    assert not scheduled.drawing(), "a prompt is half computed"
    while len(scheduled.running) < 2 or any(r.uncomputed_tokens > 1 for r in scheduled.running):
        commit(scheduled, scheduled.schedule())
    assert scheduled.drawing() == scheduled.running, "the third cannot start yet"


def test_drawing_is_empty_with_a_half_computed_prompt() -> None:
    scheduled = scheduler(rows=16, seqs=1)
    scheduled.waiting += [request(1, 30), request(2, 3)]
    commit(scheduled, scheduled.schedule())
    assert [each.key for each in scheduled.running] == [1]
    assert not scheduled.drawing()


def test_a_waiting_request_that_ends_frees_everything() -> None:
    scheduled = scheduler(rows=16)
    first, second = request(1, 30), request(2, 3)
    scheduled.waiting += [first, second]
    scheduled.schedule()
    scheduled.finish(second)
    scheduled.finish(first)
    assert not list(scheduled.requests())
    assert scheduled.pool.free == SLOTS
    scheduled.pool.check_integrity([], [])


def test_forecast() -> None:
    plain, guessed = request(1, 3), request(2, 3)
    guessed.draft = "somebody"
    guessed.tree.graft(Growth(2, 1, [0, 1], [5, 6], [-0.5, -0.5]), MAX_NODES)
    frontier = forecast_step([plain, guessed], FREE)
    assert frontier.tokens == pytest.approx(2 + 0.6065 + 0.3679, abs=1e-3)
    assert frontier.height == 2
    assert frontier.nodes == 2
    assert frontier.seconds == FREE(4, 2)
    assert draft_frontier([plain, guessed]).deepest == pytest.approx(0.3679, abs=1e-3)
    assert forecast_step([plain], FREE).height == 0
    assert draft_frontier([plain]).deepest == 0, "it has no draft"


def test_the_frontier_is_the_deepest_nodes_that_may_grow() -> None:
    root, wide = request(1, 3), request(2, 3)
    root.draft = wide.draft = "somebody"
    wide.tree.graft(Growth(2, 1, [0, 0], [5, 6], [math.log(0.5), math.log(0.3)]), MAX_NODES)
    assert draft_frontier([root]).deepest == 1
    assert draft_frontier([root, wide]).deepest == pytest.approx(1.8)
    wide.tree.graft(Growth(2, 3, [1], [7], [math.log(0.4)]), MAX_NODES)
    assert draft_frontier([wide]).deepest == pytest.approx(0.2)
    wide.max_depth = 2
    assert draft_frontier([wide]).deepest == 0, "nothing deeper is verified"


def test_deeper_lookup_nodes_are_not_the_frontier() -> None:
    """A lookup may have followed an improbable path."""
    both = request(1, 3)
    both.draft = "somebody"
    both.tree.graft(Growth(2, 1, [0, 1, 2], [5, 6, 7], [math.log(0.5)] * 3), MAX_NODES, source=1)
    frontier = draft_frontier([both])
    assert (forecast_step([both], FREE).height, frontier.own, frontier.deepest) == (3, 0, 1)
    assert frontier.covered_by_lookups == pytest.approx(0.5)
    both.tree.graft(Growth(2, 1, [0, 0], [5, 8], [math.log(0.6), math.log(0.3)]), MAX_NODES)
    frontier = draft_frontier([both])
    assert frontier.own == frontier.deepest == pytest.approx(0.9), "one node is from both"
    assert frontier.covered_by_lookups == pytest.approx(0.3), "below the common node"
    assert forecast_step([both], FREE).tokens == pytest.approx(1 + 0.9 + 0.3 + 0.15)
    again = request(2, 3)
    again.draft = "somebody"
    again.tree.graft(Growth(2, 1, [0, 1], [5, 6], [math.log(0.5)] * 2), MAX_NODES, source=1)
    assert draft_frontier([both, again]).covered_by_lookups == pytest.approx(0.3 + 0.5)

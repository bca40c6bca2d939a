"""The scheduler under random load: rows and slots are kept to, nobody starves, guesses take only what is left."""

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
from paceline.engine.request import Request
from paceline.engine.scheduler import ScheduledRequest, Scheduler, draft_frontier, forecast_step
from paceline.engine.slot_pool import BLOCK_SIZE, SlotPool
from tests.helpers.bare import bare_request

SLOTS = 256
ROOM = 100
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
    """`token`: its prompt is that one over and over."""
    return bare_request([token] * prompt, key=key, output=output, limits=limits, client=client, group=group)


def scheduler(*, rows: int = 64, seqs: int = 64, caching: bool = True, cost: StepCost = FREE) -> Scheduler:
    config = EngineConfig(slots=SLOTS, max_num_batched_rows=rows, max_num_seqs=seqs)
    return Scheduler(config, SlotPool(SLOTS, caching=caching), cost)


def check(scheduler: Scheduler, works: Sequence[ScheduledRequest], rows: int) -> None:
    """What must hold of every step."""
    assert sum(w.stop - w.start + len(w.nodes) for w in works) <= rows
    assert len({w.request.key for w in works}) == len(works)
    for work in works:
        assert work.request in scheduler.running
        assert work.start < work.stop == len(work.request.slot_table) <= len(work.request.tokens)
        assert len(work.nodes) == len(work.slots)
        assert work.samples or not work.nodes, "a guess without its root"
        known = {ROOT}
        for node in work.nodes:
            assert work.request.tree.parents[node] in known, "a guess without its parent, or before it"
            known.add(node)
    if scheduler.running:
        assert works[0].request is scheduler.running[0], "the oldest request stands still"
    everybody = list(scheduler.requests())
    owned = [*(r.own_slots() for r in everybody), *(w.slots for w in works)]
    scheduler.pool.check_integrity(owned, [r.shared_blocks for r in everybody])


def commit(scheduler: Scheduler, works: Sequence[ScheduledRequest], token: int = 7) -> None:
    """What an engine does with the works if no guess is right."""
    for work in works:
        work.request.record_prefill(work.stop)
        scheduler.pool.return_slots(work.slots)
        if work.samples:
            work.request.tokens.append(token)
            work.request.tree.commit([token])
            if work.request.output_tokens >= work.request.max_tokens:
                scheduler.finish(work.request)


def grow(request: Request, width: int, rng: random.Random) -> None:
    """Some guesses; none of them is the token that `commit` commits."""
    for _ in range(width):
        parent, token = rng.randrange(request.tree.size + 1), rng.randrange(100, 200)
        if request.tree.child(parent, token) is None:
            request.tree.add(parent, token, -rng.random())


@dataclass
class Load:
    """Random arrivals, of sizes from tiny to all the slots there are."""

    seed: int
    rows: int
    seqs: int
    caching: bool = True
    width: int = 0

    def run(self) -> list[tuple[int, int, int, bool]]:
        """Serve them all; what was computed, step by step: (request, start, stop, whether one was preempted)."""
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
            works = scheduled.schedule()
            check(scheduled, works, self.rows)
            assert len(scheduled.running) <= self.seqs
            trace += [(w.request.key, w.start, w.stop, scheduled.preemptions > before) for w in works]
            commit(scheduled, works)
            if submitted == 15 and not scheduled.running and not scheduled.waiting:
                assert scheduled.pool.free == SLOTS
                return trace
        raise AssertionError("somebody starves")


loads = st.builds(
    Load, st.integers(0, 2**32), st.sampled_from([8, 9, 64, 300]), st.sampled_from([1, 3, 64]), st.booleans()
)


@given(loads)
@settings(max_examples=25, deadline=None)
def test_everybody_is_served_within_rows_and_slots(load: Load) -> None:
    trace = load.run()
    assert {key for key, *_ in trace} == set(range(1, 16))


@given(loads)
@settings(max_examples=8, deadline=None)
def test_guesses_take_only_what_is_left(load: Load) -> None:
    """Prompts, decoding and preemption go exactly as they do without any guesses.

    Without a cache, that is: slots are there to be used, so guesses may drop what is cached.
    """
    load.caching = False
    plain = load.run()
    load.width = 4
    assert load.run() == plain


def test_some_load_does_preempt() -> None:
    """The two tests above would prove little otherwise."""
    assert any(preempted for *_, preempted in Load(seed=1, rows=64, seqs=64).run())


def test_requests_start_in_the_order_of_their_arrival() -> None:
    scheduled = scheduler(rows=32)
    for key, prompt in enumerate([100, 3, 50, 1], 1):
        scheduled.waiting.append(request(key, prompt))
    started: list[int] = []
    while scheduled.waiting or scheduled.running:
        works = scheduled.schedule()
        started += [w.request.key for w in works if w.request.key not in started]
        commit(scheduled, works)
    assert started == [1, 2, 3, 4]


def test_a_long_prompt_holds_up_nobody_who_decodes() -> None:
    scheduled = scheduler(rows=16)
    scheduled.waiting += [request(1, 4), request(2, 100)]
    commit(scheduled, scheduled.schedule())
    while scheduled.running[0].key == 1:
        works = scheduled.schedule()
        assert works[0].request.key == 1
        assert works[0].samples
        commit(scheduled, works)


def test_slots_that_a_prompt_will_need_are_not_given_away() -> None:
    """Or else both prompts would be computed half, and one of them in vain."""
    scheduled = scheduler(rows=32)
    scheduled.waiting += [request(1, 150, token=1), request(2, 150, token=2)]
    for _ in range(5):
        assert [w.request.key for w in scheduled.schedule()] == [1]
    assert scheduled.preemptions == 0


def test_the_youngest_gives_way_and_is_the_first_to_come_back() -> None:
    scheduled = scheduler(rows=256)
    for key, prompt in enumerate([100, 100, 50, 200], 1):
        scheduled.waiting.append(request(key, prompt, output=50, token=key))
    while not scheduled.preemptions:
        commit(scheduled, scheduled.schedule())
    assert [r.key for r in scheduled.running] == [1, 2]
    assert [r.key for r in scheduled.waiting] == [3, 4]
    victim = scheduled.waiting[0]
    assert len(victim.tokens) > 50, "what was committed stays committed"
    assert not victim.own_slots()


def test_many_choices_of_one_request_leave_places_to_others() -> None:
    """The youngest of them gives way, and has a place again when there is one."""
    scheduled = scheduler(seqs=4)
    scheduled.waiting += [request(key, 5, group="choices") for key in range(1, 11)]
    commit(scheduled, scheduled.schedule())
    assert [each.key for each in scheduled.running] == [1, 2, 3, 4]
    scheduled.waiting += [request(20, 5, output=3, group="small"), request(21, 5, output=3)]
    commit(scheduled, scheduled.schedule())
    works = scheduled.schedule()
    assert [work.request.key for work in works] == [1, 2, 20, 21]
    while any(each.key >= 20 for each in scheduled.running):
        commit(scheduled, works)
        works = scheduled.schedule()
    assert [each.key for each in scheduled.running][:2] == [1, 2]
    assert {each.key for each in scheduled.running[2:]} == {3, 4}


def test_clients_take_turns_whatever_they_ask_for() -> None:
    """Nobody gets two turns for sending many requests instead of many choices."""
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
    assert scheduled.preemptions == before, "they are even"


def test_who_has_few_running_does_not_give_way_for_slots() -> None:
    scheduled = scheduler()
    scheduled.waiting += [request(key, 40, output=60, token=key, group="choices") for key in (1, 2, 3, 4)]
    commit(scheduled, scheduled.schedule())
    scheduled.waiting.append(request(5, 40, output=60, token=5))
    while not scheduled.preemptions:
        commit(scheduled, scheduled.schedule())
    assert [each.key for each in scheduled.waiting] == [4]


def test_room_is_made_only_for_who_has_two_less() -> None:
    """Or else two would take it from each other at every step."""
    scheduled = scheduler(seqs=2)
    scheduled.waiting += [request(1, 5, group="a"), request(2, 5, group="b")]
    commit(scheduled, scheduled.schedule())
    scheduled.waiting.append(request(3, 5, group="c"))
    commit(scheduled, scheduled.schedule())
    assert [each.key for each in scheduled.running] == [1, 2]


def test_whoever_comes_back_finds_what_is_left_of_its_own_work() -> None:
    """But usage counts only what others had computed before."""
    scheduled = scheduler(rows=256)
    scheduled.waiting += [request(1, 100, output=60, token=1), request(2, 140, output=60, token=2)]
    while not scheduled.preemptions:
        commit(scheduled, scheduled.schedule())
    [victim] = scheduled.waiting
    while scheduled.waiting:
        works = scheduled.schedule()
        commit(scheduled, works)
    [again] = [work for work in works if work.request is victim]
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
    """Requests whose roots are next, each with a chain of sure guesses."""
    for key in range(1, requests + 1):
        scheduled.waiting.append(request(key, 3, limits=(8, nodes), token=key))
    commit(scheduled, scheduled.schedule())
    for each in scheduled.running:
        node = ROOT
        for token in range(nodes):
            node = each.tree.add(node, token + 100, -0.1)
    return scheduled.schedule()


def test_guesses_fill_the_bucket_that_is_paid_for() -> None:
    works = drawing(scheduler(cost=STEEP), requests=2, nodes=8)
    assert sum(len(w.nodes) for w in works) == 6
    assert {len(w.nodes) for w in works} == {3}, "the best of all requests, whoever's they are"


def test_guesses_that_cost_more_than_their_rows_are_left_out() -> None:
    cost = StepCost(RowCost([8, 256], [1.0, 1.001]))
    cost.node_overhead_s = 10.0
    assert sum(len(w.nodes) for w in drawing(scheduler(cost=cost), requests=2, nodes=8)) == 0


def test_guesses_keep_to_the_rows_that_are_left() -> None:
    works = drawing(scheduler(rows=12), requests=3, nodes=8)
    assert sum(len(w.nodes) for w in works) == 9


def test_the_likeliest_guess_without_a_row_is_told() -> None:
    """Even where rows run out, and not only where another one does not pay: drafts hear of it as the price of a row."""
    scarce, ample = scheduler(rows=12), scheduler()
    drawing(scarce, requests=3, nodes=8)
    drawing(ample, requests=3, nodes=8)
    assert scarce.best_unverified == pytest.approx(math.exp(-0.4)), "three guesses of each chain have a row"
    assert ample.best_unverified == 0.0


def test_guesses_keep_to_what_a_request_may_have() -> None:
    [work] = drawing(scheduler(), requests=1, nodes=4)
    assert len(work.nodes) == 4
    deep = request(1, 5, output=3, limits=(8, 8))
    assert deep.depth_allowed() == 2, "the bonus token after the last guess must be wanted"


def test_all_draw_or_a_prompt_is_computed() -> None:
    scheduled = scheduler(rows=16, seqs=2)
    scheduled.waiting += [request(1, 30), request(2, 3), request(3, 3)]
    assert not scheduled.drawing(), "a prompt waits"
    commit(scheduled, scheduled.schedule())
    assert scheduled.running
    assert not scheduled.drawing(), "a prompt is half computed"
    while len(scheduled.running) < 2 or any(r.uncomputed_tokens > 1 for r in scheduled.running):
        commit(scheduled, scheduled.schedule())
    assert scheduled.drawing() == scheduled.running, "the third cannot start yet"


def test_a_prompt_that_is_half_computed_draws_nothing_even_if_nobody_else_can_start() -> None:
    scheduled = scheduler(rows=16, seqs=1)
    scheduled.waiting += [request(1, 30), request(2, 3)]
    commit(scheduled, scheduled.schedule())
    assert [each.key for each in scheduled.running] == [1]
    assert not scheduled.drawing()


def test_a_request_that_ends_while_it_waits_leaves_nothing_behind() -> None:
    scheduled = scheduler(rows=16)
    first, second = request(1, 30), request(2, 3)
    scheduled.waiting += [first, second]
    scheduled.schedule()
    scheduled.finish(second)
    scheduled.finish(first)
    assert not list(scheduled.requests())
    assert scheduled.pool.free == SLOTS
    scheduled.pool.check_integrity([], [])


def test_outlook() -> None:
    plain, guessed = request(1, 3), request(2, 3)
    guessed.draft = "somebody"
    guessed.tree.graft(Growth(2, 1, [0, 1], [5, 6], [-0.5, -0.5]), ROOM)
    ahead = forecast_step([plain, guessed], FREE)
    assert ahead.tokens == pytest.approx(2 + 0.6065 + 0.3679, abs=1e-3)
    assert ahead.height == 2
    assert ahead.nodes == 2
    assert ahead.seconds == FREE(4, 2)
    assert draft_frontier([plain, guessed]).deepest == pytest.approx(0.3679, abs=1e-3)
    assert forecast_step([plain], FREE).height == 0
    assert draft_frontier([plain]).deepest == 0, "nobody guesses for it"


def test_the_frontier_is_what_may_still_be_guessed_after() -> None:
    root, wide = request(1, 3), request(2, 3)
    root.draft = wide.draft = "somebody"
    wide.tree.graft(Growth(2, 1, [0, 0], [5, 6], [math.log(0.5), math.log(0.3)]), ROOM)
    assert draft_frontier([root]).deepest == 1
    assert draft_frontier([root, wide]).deepest == pytest.approx(1.8)
    wide.tree.graft(Growth(2, 3, [1], [7], [math.log(0.4)]), ROOM)
    assert draft_frontier([wide]).deepest == pytest.approx(0.2)
    wide.max_depth = 2
    assert draft_frontier([wide]).deepest == 0, "nothing deeper is verified"


def test_a_draft_s_frontier_is_not_what_others_guess_deeper() -> None:
    """Who guesses beside it may have gone far along a path that is unlikely."""
    both = request(1, 3)
    both.draft = "somebody"
    both.tree.graft(Growth(2, 1, [0, 1, 2], [5, 6, 7], [math.log(0.5)] * 3), ROOM, source=1)
    ahead = draft_frontier([both])
    assert (forecast_step([both], FREE).height, ahead.own, ahead.deepest) == (3, 0, 1)
    assert ahead.covered_by_lookups == pytest.approx(0.5)
    both.tree.graft(Growth(2, 1, [0, 0], [5, 8], [math.log(0.6), math.log(0.3)]), ROOM)
    ahead = draft_frontier([both])
    assert ahead.own == ahead.deepest == pytest.approx(0.9), "they agree on one"
    assert ahead.covered_by_lookups == pytest.approx(0.3), "after the guess that both have made"
    assert forecast_step([both], FREE).tokens == pytest.approx(1 + 0.9 + 0.3 + 0.15)
    again = request(2, 3)
    again.draft = "somebody"
    again.tree.graft(Growth(2, 1, [0, 1], [5, 6], [math.log(0.5)] * 2), ROOM, source=1)
    assert draft_frontier([both, again]).covered_by_lookups == pytest.approx(0.3 + 0.5)

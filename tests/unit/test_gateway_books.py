"""What a gateway keeps in mind of its workers: prefixes, sessions, costs, and who is left alone for a while."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.messages import Load, SpeculationStats
from paceline.state.acceptance import Acceptance
from paceline.state.registry import Registered, WorkerRecord
from services.gateway.breaker import FAILURES, FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker, State
from services.gateway.drafts import ENOUGH, Drafts
from services.gateway.prefixes import BLOCK, Prefixes, chain
from services.gateway.sessions import Sessions
from services.gateway.target import Stay, Target, Text
from services.gateway.told import AHEAD_S, WORTH_S, Told
from services.gateway.work import LONGEST_RETRY_S, Cost, Habits, Pace, retry_after_s

TOKENS = st.lists(st.integers(0, 3), max_size=3 * BLOCK)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@settings(deadline=None)
@given(sent=st.lists(TOKENS, max_size=4), cut=st.integers(0, 3 * BLOCK), ends=TOKENS, which=st.integers(0, 3))
def test_the_longest_beginning_that_was_sent_is_known(
    sent: list[list[int]], cut: int, ends: list[int], which: int
) -> None:
    prefixes = Prefixes(10_000)
    for each in sent:
        prefixes.note(chain(each))
    prompt = (sent[which][:cut] if which < len(sent) else []) + ends
    longest = max((common(each, prompt) // BLOCK * BLOCK for each in sent), default=0)
    assert prefixes.tokens_known(chain(prompt)) == longest


@settings(deadline=None)
@given(tokens=TOKENS, cut=st.integers(0, 3 * BLOCK))
def test_a_chain_can_be_continued(tokens: list[int], cut: int) -> None:
    assert chain(tokens, chain(tokens[:cut])) == chain(tokens)


@settings(deadline=None)
@given(tokens=TOKENS, cut=st.integers(0, 3 * BLOCK), salts=st.lists(st.sampled_from(["", "a", "b"]), min_size=2))
def test_texts_with_different_salts_share_nothing(tokens: list[int], cut: int, salts: list[str]) -> None:
    sent, asked = salts[:2]
    prefixes = Prefixes(10_000)
    prefixes.note(chain(tokens, chain(tokens[:cut], salt=sent), sent))
    known = len(tokens) // BLOCK * BLOCK if asked == sent else 0
    assert prefixes.tokens_known(chain(tokens, salt=asked)) == known


def test_the_same_block_after_another_beginning_is_another_one() -> None:
    prefixes = Prefixes(10_000)
    prefixes.note(chain([1] * BLOCK + [2] * BLOCK))
    assert prefixes.tokens_known(chain([2] * BLOCK)) == 0
    assert prefixes.tokens_known(chain([3] * BLOCK + [2] * BLOCK)) == 0


def test_what_was_not_used_for_longest_is_forgotten_ends_before_beginnings() -> None:
    prefixes = Prefixes(4 * BLOCK)
    old, new = chain([1] * 3 * BLOCK), chain([2] * 2 * BLOCK)
    prefixes.note(old)
    prefixes.note(new)
    assert len(prefixes) == 4
    assert prefixes.tokens_known(new) == 2 * BLOCK
    assert prefixes.tokens_known(old) == 2 * BLOCK
    prefixes.note(chain([3] * 4 * BLOCK))
    assert prefixes.tokens_known(old) == prefixes.tokens_known(new) == 0


def test_sessions_that_were_silent_for_longest_are_forgotten() -> None:
    sessions = Sessions(2)
    for session in ("a", "b", "a", "c", ""):
        sessions.note(session, f"at {session}")
    assert [sessions.place(session) for session in "abc"] == ["at a", None, "at c"]
    assert sessions.place("") is None


@settings(deadline=None)
@given(prompt=st.integers(1, 500), output=st.floats(1, 500), arriving=st.lists(st.integers(1, 9), max_size=200))
def test_what_a_request_still_costs_falls_to_one_row_and_never_below(
    prompt: int, output: float, arriving: list[int]
) -> None:
    cost = Cost(prompt, output)
    left = cost.rows
    for count in arriving:
        left -= cost.tokens(count)
        assert cost.rows == pytest.approx(left)
        assert cost.rows >= 1.0


def test_requests_are_expected_to_say_what_others_said_and_never_more_than_they_may() -> None:
    habits = Habits()
    for _ in range(200):
        habits.ended(prompt_rows=100, output_tokens=20)
    assert habits.expected_output(1000) == pytest.approx(20)
    assert habits.expected_output(5) == 5
    assert habits.rows.value == pytest.approx(120)


def test_the_pace_is_measured_while_there_is_work() -> None:
    pace = Pace()
    for tick in range(40):
        pace.tick(float(tick), busy=True)
        pace.add(50.0)
    assert pace.rows_per_s == pytest.approx(50.0)
    for tick in range(40, 400):
        pace.tick(float(tick), busy=False)
    assert pace.rows_per_s == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("rows", "rate", "seconds"),
    [(100, 0, 1), (0, 50, 1), (1, 1000, 1), (101, 50, 3), (10**9, 1, LONGEST_RETRY_S)],
)
def test_who_is_turned_away_is_told_whole_seconds(rows: float, rate: float, seconds: int) -> None:
    assert retry_after_s(rows, rate) == seconds


@dataclass
class Link:
    """What a target's books look at of one."""

    description: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(slots=1024))
    load: Load | None = None
    lost: bool = False
    draining: bool = False


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def linked_target(link: Link, clock: Clock, **heartbeat: float) -> Target:
    record = WorkerRecord("target", "t", "h:1", "m", "", "", 0.0)
    return Target(record, link, heartbeat=heartbeat, told=Told(clock))  # type: ignore[arg-type]


def test_the_gateway_s_own_requests_are_not_taken_for_those_of_others_when_they_are_over(clock: Clock) -> None:
    """Or else all that come next would go to the other target, and from there all back again."""
    link, habits = Link(), Habits()
    target = linked_target(link, clock, running=3.0)
    of_others = 3 * habits.rows.value
    assert target.work(habits) == of_others
    with ExitStack() as stays:
        for _ in range(5):
            stay = stays.enter_context(Stay(target, Text.of([1, 2]), 10, habits, Pace()))
        target.tell({"running": 8.0, "beat": 1})
        assert target.work(habits) == of_others + target.rows
        link.load = Load(running=6, waiting=1, free_slots=0, rows=0, step_s=0.0)
        stay.tokens([1])
        target.tell({"running": 99.0, "beat": 2})
        assert target.work(habits) == 2 * habits.rows.value + target.rows, "deltas are ahead of heartbeats"
    target.hear()
    assert target.work(habits) == 2 * habits.rows.value, "a load is counted when it comes, not when it is looked at"
    target.tell({"running": 99.0, "beat": 3})
    assert target.work(habits) == 2 * habits.rows.value, "this one was sent before all had ended"
    clock.now += AHEAD_S
    target.tell({"running": 99.0, "beat": 3})
    assert target.work(habits) == 2 * habits.rows.value, "an old one read again"
    target.tell({"running": 4.0, "waiting": 1.0, "beat": 4})
    assert target.work(habits) == 5 * habits.rows.value


def test_a_queue_of_which_nobody_tells_any_more_is_not_taken_to_be_there_for_ever(clock: Clock) -> None:
    """Redis is killed while others have filled the queue: a gateway would refuse all that come until it is back."""
    target = linked_target(Link(), clock, running=8.0, waiting=50.0)
    clock.now += WORTH_S - 1.0
    assert target.waiting == 50.0
    target.tell({"running": 8.0, "waiting": 40.0, "beat": 1})
    clock.now += WORTH_S - 1.0
    assert target.waiting == 40.0
    clock.now += 1.0
    assert (target.waiting, target.work(Habits())) == (0.0, 0.0)
    with Stay(target, Text.of([1, 2]), 10, Habits(), Pace()):
        assert target.waiting == 1.0, "its own it knows"


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock)


def opened(breaker: Breaker) -> Breaker:
    for _ in range(FAILURES):
        breaker.failed()
    return breaker


def test_failures_open_only_in_a_row(breaker: Breaker) -> None:
    for _ in range(3):
        for _ in range(FAILURES - 1):
            breaker.failed()
        breaker.succeeded()
    assert breaker.state == State.CLOSED
    assert opened(breaker).state == State.OPEN
    assert not breaker.allows


def test_one_request_probes_while_others_wait(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += FIRST_PAUSE_S
    assert (breaker.state, breaker.allows) == (State.HALF_OPEN, True)
    breaker.sent()
    assert not breaker.allows
    breaker.no_verdict()
    assert breaker.allows
    breaker.sent()
    breaker.answered()
    assert (breaker.state, breaker.allows) == (State.CLOSED, True)


def test_each_failed_probe_doubles_the_pause_up_to_a_limit(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    pauses = []
    for _ in range(9):
        pauses.append(breaker.opens_in_s)
        clock.now += breaker.opens_in_s
        breaker.sent()
        breaker.failed()
    assert pauses == [min(FIRST_PAUSE_S * 2**n, LONGEST_PAUSE_S) for n in range(9)]


def test_an_answer_that_ends_badly_opens_again_for_longer_and_a_good_end_forgives(
    breaker: Breaker, clock: Clock
) -> None:
    opened(breaker)
    clock.now += FIRST_PAUSE_S
    breaker.sent()
    breaker.answered()
    breaker.failed()
    assert breaker.opens_in_s == 2 * FIRST_PAUSE_S
    clock.now += 2 * FIRST_PAUSE_S
    breaker.sent()
    breaker.answered()
    breaker.succeeded()
    breaker.failed()
    assert breaker.state == State.CLOSED
    assert opened(breaker).opens_in_s == FIRST_PAUSE_S


def test_late_news_do_not_prolong_a_pause(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += FIRST_PAUSE_S / 2
    breaker.failed()
    assert breaker.opens_in_s == FIRST_PAUSE_S / 2


def drafts(told: list[tuple[str, Acceptance]] | None = None, model: str = "small") -> Drafts:
    """Three workers: two of one kind, and a lookup."""
    names = {"one": ("draft_model", model), "two": ("draft_model", model), "lookup": ("ngram", "")}
    pool = Drafts(lambda kind, acceptance: (told if told is not None else []).append((kind, acceptance)))
    pool.learn(
        [
            Registered(WorkerRecord("draft", name, f"{name}:1", model_, method, "", 0.0), {"requests": 0.0})
            for name, (method, model_) in names.items()
        ]
    )
    return pool


def stats(*served: str, drafted: int = 10, accepted: int = 5) -> SpeculationStats:
    return SpeculationStats([drafted], [accepted], drafted_tokens=drafted, verifications=drafted, drafts=list(served))


def test_what_requests_tell_of_a_kind_decides_the_order_of_the_next_ones() -> None:
    told: list[tuple[str, Acceptance]] = []
    pool = drafts(told)
    pool.finished(pool.order(greedy=True), stats("one", accepted=8), greedy=True)
    [(kind, acceptance)] = told
    assert kind in pool.kinds()
    assert acceptance.acceptance_length == 0.8
    pool.hear(kind, acceptance * ENOUGH)
    lookup = Acceptance(ENOUGH, [ENOUGH], [0.1 * ENOUGH])
    pool.hear("ngram  greedy", lookup)
    orders = [pool.order(greedy=True) for _ in range(4)]
    assert all(order[2] == "lookup:1" for order in orders)
    assert {order[0] for order in orders} == {"one:1", "two:1"}
    assert "lookup:1" in {pool.order(greedy=False)[0] for _ in range(4)}  # of sampled requests nothing is known


def test_a_request_that_moved_says_nothing_of_a_kind_but_who_failed() -> None:
    told: list[tuple[str, Acceptance]] = []
    pool = drafts(told)
    for _ in range(FAILURES):
        pool.finished(["one:1", "two:1"], stats("one", "two"), greedy=True)
    assert told == []
    assert pool.breakers["one:1"].state == State.OPEN
    assert pool.breakers["two:1"].state == State.CLOSED
    assert all(pool.order(greedy=True)[-1] == "one:1" for _ in range(20))


def test_who_is_passed_over_by_targets_is_not_reached() -> None:
    pool = drafts()
    for _ in range(FAILURES):
        pool.finished(["one:1", "two:1", "lookup:1"], stats("two"), greedy=True)
    states = {address: breaker.state for address, breaker in pool.breakers.items()}
    assert states == {"one:1": State.OPEN, "two:1": State.CLOSED, "lookup:1": State.CLOSED}


def test_requests_without_drafts_or_without_a_report_blame_nobody() -> None:
    pool = drafts()
    for _ in range(FAILURES):
        pool.finished(pool.order(greedy=True), None, greedy=True)
        pool.finished(pool.order(greedy=True), stats(), greedy=True)
        pool.finished([], stats("local"), greedy=True)
        pool.finished(["gone:1"], stats("gone"), greedy=True)
    assert all(breaker.state == State.CLOSED for breaker in pool.breakers.values())

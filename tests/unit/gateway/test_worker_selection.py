"""The choice of target and drafts, from the state of the workers and the prompt alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_services.gateway.generation.request_builder import choice_seed
from paceline_services.gateway.routing.worker_selection import (
    EXPLORE_EVERY,
    PREFIX_TOKENS,
    SESSION_MOVE_COST_ROWS,
    DraftCandidate,
    TargetCandidate,
    best_target,
    draft_order,
    seconds_to_first_token,
    session_home,
)

NAMES = st.text(min_size=1, max_size=3)
CANDIDATES = st.dictionaries(
    NAMES, st.builds(TargetCandidate, st.floats(0, 1e5), st.integers(0, 300)), min_size=1, max_size=6
)
PROMPT = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=100)
LONG = list(range(8192))
IDLE = {name: TargetCandidate() for name in "abc"}


@settings(deadline=None)
@given(candidates=CANDIDATES, prompt=PROMPT)
def test_no_other_target_would_answer_sooner(candidates: dict[str, TargetCandidate], prompt: list[int]) -> None:
    """But for the beginning, which its home is taken to hold."""
    best = best_target(candidates, prompt)
    assert best is not None
    seconds = {name: seconds_to_first_token(each, len(prompt), 1.0) for name, each in candidates.items()}
    assert seconds[best] <= min(seconds.values()) + PREFIX_TOKENS


@settings(deadline=None)
@given(names=st.sets(NAMES, min_size=2, max_size=6), prompt=PROMPT, ends=PROMPT)
def test_prompts_that_begin_alike_agree_and_so_do_gateways(names: set[str], prompt: list[int], ends: list[int]) -> None:
    beginning = (prompt * PREFIX_TOKENS)[:PREFIX_TOKENS]
    here, elsewhere = sorted(names), sorted(names, reverse=True)
    idle = TargetCandidate()
    assert best_target(dict.fromkeys(here, idle), beginning + ends) == best_target(
        dict.fromkeys(elsewhere, idle), beginning
    )
    assert session_home(here, "talk") == session_home(elsewhere, "talk")


def test_different_prompts_spread_and_so_do_salts() -> None:
    chosen = [best_target(IDLE, [number]) for number in range(300)]
    assert all(chosen.count(name) > 60 for name in IDLE)
    assert len({best_target(IDLE, LONG, salt=str(number)) for number in range(50)}) == len(IDLE)
    assert len({best_target(IDLE, LONG[:end], salt="one") for end in (64, 65, 8192)}) == 1


def test_sessions_spread_and_so_do_salts() -> None:
    assert len({session_home("abc", str(number)) for number in range(50)}) == 3
    assert len({session_home("abc", "talk", str(number)) for number in range(50)}) == 3
    assert session_home("abc", "") is None


@pytest.mark.parametrize("sessions", [True, False])
def test_losing_a_target_moves_only_what_was_there(sessions: bool) -> None:
    def homes(targets: Mapping[str, TargetCandidate]) -> dict[int, str | None]:
        if sessions:
            return {number: session_home(list(targets), str(number)) for number in range(100)}
        return {number: best_target(targets, [number]) for number in range(100)}

    before, after = homes(IDLE), homes({name: IDLE[name] for name in "ab"})
    assert all(after[number] == at for number, at in before.items() if at != "c")
    assert len(set(before.values())) == 3


@pytest.mark.parametrize(
    ("a", "b", "tokens", "best"),
    [
        pytest.param({"queued_rows": 4000.0, "cached": 8160}, {"queued_rows": 500.0}, 8192, "a", id="known there"),
        pytest.param({"queued_rows": 9000.0, "cached": 8160}, {"queued_rows": 500.0}, 8192, "b", id="but too busy"),
        pytest.param({"queued_rows": 4000.0, "cached": 96}, {"queued_rows": 500.0}, 100, "b", id="a short prompt"),
        pytest.param(
            {"queued_rows": 1000.0, "rows_per_s": 1000.0},
            {"queued_rows": 3000.0, "rows_per_s": 8000.0},
            100,
            "b",
            id="work counts in seconds",
        ),
        pytest.param({"queued_rows": 1000.0}, {"queued_rows": 3000.0}, 100, "a", id="of unknown speed"),
    ],
)
def test_a_prompt_goes_where_its_first_token_comes_soonest(
    a: dict[str, float], b: dict[str, float], tokens: int, best: str
) -> None:
    candidates = {"a": TargetCandidate(**a), "b": TargetCandidate(**b)}  # type: ignore[arg-type]
    assert best_target(candidates, LONG[:tokens]) == best


@pytest.mark.parametrize(
    ("work", "has_session", "stays"),
    [
        (SESSION_MOVE_COST_ROWS - PREFIX_TOKENS - 1, True, True),
        (SESSION_MOVE_COST_ROWS + PREFIX_TOKENS + 1, True, False),
        (PREFIX_TOKENS + 1, False, False),
    ],
)
def test_a_conversation_keeps_its_target_until_that_is_overloaded(work: float, has_session: bool, stays: bool) -> None:
    candidates = IDLE | {"a": TargetCandidate(queued_rows=work, has_session=has_session)}
    assert (best_target(candidates, LONG[:200]) == "a") is stays


def test_nothing_is_chosen_without_workers() -> None:
    assert best_target({}, [1]) is None
    assert draft_order({}, 3) == []


def draft(requests: float = 0.0, accepted: float | None = None, verifications: float = 0.0) -> DraftCandidate:
    return DraftCandidate(requests, accepted, verifications or (1000.0 if accepted is not None else 0.0))


FAILING = replace(draft(0, 3.0), healthy=False)


@pytest.mark.parametrize(
    ("drafts", "turn", "order"),
    [
        pytest.param({"a": draft(0), "b": draft(1), "c": draft(40)}, 0, "a b c", id="busy ones last"),
        pytest.param({"a": draft(0), "b": draft(1), "c": draft(40)}, 1, "b a c", id="turns"),
        pytest.param({"weak": draft(0, 0.8), "good": draft(0, 2.4)}, 0, "good weak", id="understood better"),
        pytest.param({"weak": draft(0, 0.8), "good": draft(8, 2.4)}, 0, "good weak", id="though busier"),
        pytest.param({"weak": draft(0, 0.8), "good": draft(40, 2.4)}, 0, "weak good", id="until it is too busy"),
        # What is not known is no better than the worst that is.
        pytest.param({"poor": draft(0, 0.2), "new": draft()}, 0, "poor new", id="an unknown one"),
        pytest.param({"poor": draft(0, 0.2), "new": draft()}, 1, "new poor", id="an unknown one's turn"),
        pytest.param({"new": draft(), "good": draft(0, 2.0), "poor": draft(0, 0.2)}, 0, "good new poor", id="third"),
        pytest.param({"failing": FAILING, "weak": draft(30, 0.5)}, 0, "weak failing", id="failing ones last"),
        pytest.param({"failing": FAILING}, EXPLORE_EVERY - 1, "failing", id="but still offered alone"),
    ],
)
def test_drafts_come_in_the_order_of_what_they_would_bring(
    drafts: dict[str, DraftCandidate], turn: int, order: str
) -> None:
    assert draft_order(drafts, turn) == order.split()


def test_what_is_not_known_is_tried_now_and_then() -> None:
    drafts = {"known": draft(0, 2.0), "new": draft(), "useless": draft(0, 0.0)}
    firsts = [draft_order(drafts, turn)[0] for turn in range(4 * EXPLORE_EVERY)]
    assert firsts.count("new") == 4
    assert firsts.count("known") == len(firsts) - 4
    known = drafts | {"new": draft(0, 0.5, 100.0), "useless": draft(0, 0.0, 60.0)}
    assert draft_order(known, EXPLORE_EVERY - 1)[0] == "useless"


@settings(deadline=None)
@given(
    drafts=st.dictionaries(
        NAMES,
        st.builds(DraftCandidate, st.floats(0, 99), st.none() | st.floats(0, 5), st.floats(0, 99), st.booleans()),
        max_size=6,
    ),
    turn=st.integers(0, 100),
)
def test_every_draft_is_offered_once(drafts: dict[str, DraftCandidate], turn: int) -> None:
    assert sorted(draft_order(drafts, turn)) == sorted(drafts)


@settings(deadline=None)
@given(seed=st.integers(0, 2**64 - 1))
def test_the_seeds_of_n_choices_differ_and_begin_with_the_requests_own(seed: int) -> None:
    seeds = [choice_seed(seed, index) for index in range(128)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 128
    assert all(0 <= each < 2**64 for each in seeds)

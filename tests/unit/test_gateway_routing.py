"""Who serves a request, from loads and prompt alone."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.plan import choice_seed
from services.gateway.routing import LOAD_SLACK, PREFIX_TOKENS, best_target, draft_order

LOADS = st.dictionaries(st.text(min_size=1, max_size=3), st.floats(0, 40), min_size=1, max_size=6)
PROMPT = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=100)


@settings(deadline=None)
@given(loads=LOADS, prompt=PROMPT)
def test_the_target_chosen_is_among_the_least_busy(loads: dict[str, float], prompt: list[int]) -> None:
    best = best_target(loads, prompt)
    assert best is not None
    assert loads[best] <= min(loads.values()) + LOAD_SLACK


@settings(deadline=None)
@given(names=st.sets(st.text(min_size=1, max_size=3), min_size=2, max_size=6), prompt=PROMPT, ends=PROMPT)
def test_prompts_that_begin_alike_agree_and_so_do_gateways(names: set[str], prompt: list[int], ends: list[int]) -> None:
    beginning = (prompt * PREFIX_TOKENS)[:PREFIX_TOKENS]
    idle = dict.fromkeys(sorted(names), 0.0)
    elsewhere = dict.fromkeys(sorted(names, reverse=True), 0.0)
    assert best_target(idle, beginning + ends) == best_target(elsewhere, beginning)


def test_different_prompts_spread() -> None:
    idle = {"a": 0.0, "b": 0.0, "c": 0.0}
    chosen = [best_target(idle, [number]) for number in range(300)]
    assert all(chosen.count(name) > 60 for name in idle)


def test_losing_a_target_moves_only_its_own_prompts() -> None:
    idle = {"a": 0.0, "b": 0.0, "c": 0.0}
    before = {number: best_target(idle, [number]) for number in range(100)}
    after = {number: best_target({"a": 0.0, "b": 0.0}, [number]) for number in range(100)}
    assert all(after[number] == home for number, home in before.items() if home != "c")


def test_nobody_is_chosen_from_nobody() -> None:
    assert best_target({}, [1]) is None
    assert draft_order({}, 3) == []


def test_drafts_take_turns_and_busy_ones_come_last() -> None:
    loads = {"a": 0.0, "b": 1.0, "c": 40.0}
    assert [draft_order(loads, turn) for turn in range(2)] == [["a", "b", "c"], ["b", "a", "c"]]


@settings(deadline=None)
@given(seed=st.integers(0, 2**64 - 1))
def test_the_seeds_of_n_choices_differ_and_begin_with_the_requests_own(seed: int) -> None:
    seeds = [choice_seed(seed, index) for index in range(128)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 128
    assert all(0 <= each < 2**64 for each in seeds)

"""Stop strings: the same outcome however the text is cut, and nothing held back without need."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.text import StopStrings

TEXT = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4)


def searched(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the shortest beginning that ends with a stop string; of several, the longest one."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            stop = max(met, key=len)
            return text[: end - len(stop)], stop
    return text, None


def fed(parts: list[str], stops: list[str]) -> tuple[str, str | None]:
    finder = StopStrings(stops)
    shown = ""
    for part in parts:
        shown += finder.feed(part)
        if finder.found is not None:
            return shown, finder.found
    return shown + finder.flush(), None


@settings(deadline=None)
@given(parts=st.lists(TEXT, max_size=8), stops=STOPS)
def test_feeding_in_parts_equals_searching_the_whole(parts: list[str], stops: list[str]) -> None:
    assert fed(parts, stops) == searched("".join(parts), stops)


@settings(deadline=None)
@given(text=TEXT, stops=STOPS)
def test_only_what_may_become_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    finder = StopStrings(stops)
    shown = finder.feed(text)
    if finder.found is None:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("parts", "stops", "expected"),
    [
        (["one tw", "o three"], ["two"], ("one ", "two")),
        (["ab", "cd"], ["abcd", "bc"], ("a", "bc")),
        (["xyz"], ["z", "yz"], ("x", "yz")),
        (["no stop at all"], [], ("no stop at all", None)),
        (["ends with tw"], ["two"], ("ends with tw", None)),
    ],
)
def test_examples(parts: list[str], stops: list[str], expected: tuple[str, str | None]) -> None:
    assert fed(parts, stops) == expected

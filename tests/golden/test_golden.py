"""Requests answer what they answered when their traces were recorded."""

from __future__ import annotations

import json

import pytest

from tests.golden import http, library
from tests.golden.traces import TOLERANCE, differences, read

CALLS = {name: (setup, calls) for name, setup, calls in library.calls()}


@pytest.mark.parametrize("name", CALLS)
def test_the_library(name: str) -> None:
    setup, calls = CALLS[name]
    llm = setup.load()
    now = {f"{name}: {each}": call.run(llm) for each, call in calls.items()}
    assert list(differences({key: read()[key] for key in now}, json.loads(json.dumps(now)))) == []


@pytest.mark.alone
@pytest.mark.timeout(300)
def test_http() -> None:
    now = json.loads(json.dumps(http.recorded()))
    assert list(differences({key: read()[key] for key in now}, now)) == []


def test_every_trace_is_compared() -> None:
    prefixes = ("table: ", "killed: ", "text: ")
    left = {name for name in read() if not name.startswith(prefixes)}
    assert left == {f"{name}: {each}" for name, (_, calls) in CALLS.items() for each in calls}


def test_a_token_more_another_reason_or_a_larger_log_probability_is_a_difference() -> None:
    trace = {"tokens": [1, 2], "reason": "STOP", "log_probs": [[-0.5, [2, -0.5]]]}
    others = [
        trace | {"tokens": [1, 2, 3]},
        trace | {"reason": "LENGTH"},
        trace | {"log_probs": [[-0.5 - 2 * TOLERANCE, [2, -0.5]]]},
        trace | {"log_probs": [[-0.5, [3, -0.5]]]},
        {key: trace[key] for key in ("tokens", "reason")},
    ]
    assert [len(list(differences(trace, other))) for other in (trace, *others)] == [0, 1, 1, 1, 1, 1]

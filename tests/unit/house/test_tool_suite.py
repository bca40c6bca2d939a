"""The neutral suite `canitoolcall`: what passes today keeps passing."""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import fnmatch
from functools import cache

import pytest
from canitoolcall.results import CaseResult, Status

from tests.house.names import ROOT
from tests.tool_suite.replays import by_family, cases, reasons

STREAM_CHECKS = ("stream_equals_nonstream", "split_invariance")
EXPECTED = {
    "deepseek": Counter({"pass": 76, "fail": 9}),
    "gemma4": Counter({"pass": 43, "soft": 1, "fail": 4}),
    "glm": Counter({"pass": 48, "fail": 3}),
    "gpt-oss": Counter({"pass": 48, "fail": 3}),
    "kimi": Counter({"pass": 40, "soft": 5, "fail": 4}),
    "llama": Counter({"pass": 31, "soft": 1, "fail": 2}),
    "mistral": Counter({"pass": 45, "fail": 2}),
    "qwen3-hermes": Counter({"pass": 45, "fail": 5}),
    "qwen3-xml": Counter({"pass": 52, "fail": 2}),
}
"""Families whose formats are known. docs/tools.md says why the rest fails."""


@cache
def replayed(family: str) -> list[CaseResult]:
    return list(cases([family]))


@pytest.mark.parametrize("family", EXPECTED)
def test_as_many_fixtures_pass_as_ever(family: str) -> None:
    results = replayed(family)
    failed = {case.fixture_id: reasons(case) for case in results if case.status is Status.FAIL}
    assert by_family(results) == {family: EXPECTED[family]}, failed


@pytest.mark.parametrize("family", EXPECTED)
def test_streams_equal_whole_parses(family: str) -> None:
    rows = [
        (case.fixture_id, row)
        for case in replayed(family)
        for row in case.checks
        if row.check in STREAM_CHECKS and not row.strategy.startswith("char")
    ]
    assert rows
    assert [row for row in rows if row[1].status is not Status.PASS] == []


def test_the_documentation_says_why_a_fixture_does_not_pass() -> None:
    _, _, section = (ROOT / "docs" / "tools.md").read_text().partition("## The neutral suite")
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    patterns = re.findall("`([^`]+)`", "".join(rows))
    others = (Status.PASS, Status.UNSUPPORTED)
    failed = [case.fixture_id for family in EXPECTED for case in replayed(family) if case.status not in others]
    names = [name.partition("/")[2] for name in failed]
    assert [name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in names)] == []

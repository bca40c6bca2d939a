"""The fixtures of `canitoolcall`, each replayed in this process and judged by the checks of the suite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from canitoolcall.adapters.worker import replay
from canitoolcall.chunking import DEFAULT_STRATEGIES, ChunkStrategy
from canitoolcall.results import CaseResult, Status
from canitoolcall.runner import RunConfig, evaluate, family_for, select_fixtures

from tests.tool_suite.adapter import PacelineAdapter

STRATEGIES = (*DEFAULT_STRATEGIES, ChunkStrategy("char"))
"""Character by character, too: the suite reports such streams without counting them."""
OUTCOMES = {
    Status.PASS: "pass",
    Status.SOFT_PASS: "soft",
    Status.FAIL: "fail",
    Status.ERROR: "error",
    Status.UNSUPPORTED: "unsupported",
}
"""The words of our report for those of the suite. Soft: equal but for white space at the ends of a text."""


def cases(families: Sequence[str] = ()) -> Iterator[CaseResult]:
    """The verdict on each fixture of these families, or of all."""
    adapter = PacelineAdapter()
    for fixture in select_fixtures(RunConfig("paceline", families=families)):
        family = family_for(fixture)
        yield evaluate(fixture, family, replay(adapter, fixture, family, STRATEGIES))


def by_family(results: Iterable[CaseResult]) -> dict[str, Counter[str]]:
    """How many fixtures of each family had which outcome."""
    counts: dict[str, Counter[str]] = {}
    for case in results:
        counts.setdefault(case.family, Counter())[OUTCOMES[case.status]] += 1
    return counts


def reasons(case: CaseResult) -> list[str]:
    """Why a fixture did not pass. Several streams with one reason are one line."""
    rows = {f"{row.check}: {row.detail}": None for row in case.checks if row.status is not Status.PASS}
    return [*rows] or [case.harness_error or case.reason or ""]

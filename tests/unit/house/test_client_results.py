"""What `make clients` makes of a client's report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.__main__ import ClientResult, read_report

GOOD = '<testcase name="a"/>'


@pytest.mark.parametrize(
    ("cases", "expected", "good"),
    [
        (GOOD, ClientResult(1, []), True),
        (GOOD + '<testcase name="b"><failure/></testcase>', ClientResult(2, ["b"]), False),
        ('<testcase name="b"><error/></testcase>', ClientResult(1, ["b"]), False),
        ('<testcase name="b"><skipped/></testcase>', ClientResult(1, ["b"]), False),
        ("", ClientResult(0, []), False),
    ],
)
def test_every_call_has_to_pass(tmp_path: Path, cases: str, expected: ClientResult, *, good: bool) -> None:
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert read_report(report) == expected
    assert expected.good == good


def test_a_client_without_a_report_has_failed(tmp_path: Path) -> None:
    assert not read_report(tmp_path / "none.xml").good

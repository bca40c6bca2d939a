"""A periodic task continues after an error, and logs it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from paceline.state.periodic_task import PeriodicTask


class Turns(PeriodicTask):
    """Raises the planned errors in turn; None is a turn without one. `through` is set after the last."""

    interval_s = 0.001

    def __init__(self, plan: Sequence[Exception | None]) -> None:
        self._plan = iter(plan)
        self.through = asyncio.Event()

    async def run_once(self) -> None:
        try:
            error = next(self._plan)
        except StopIteration:
            self.through.set()
            return
        if error is not None:
            raise error


async def test_an_error_does_not_end_the_task_and_is_logged_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    first, second = ValueError("first"), ValueError("second")
    plan = [None, first, first, first, second, second, None, second]
    async with asyncio.timeout(20.0), Turns(plan) as turns:
        await turns.through.wait()
    assert {record.getMessage() for record in caplog.records} == {"Turns failed and is tried again"}
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["first", "second", "second"]
    assert "Traceback" in caplog.text


async def test_an_error_on_entry_is_raised() -> None:
    with pytest.raises(ValueError, match="at once"):
        async with Turns([ValueError("at once")]):
            pytest.fail("it was entered")

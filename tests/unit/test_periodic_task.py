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


async def logged(plan: Sequence[Exception | None], caplog: pytest.LogCaptureFixture) -> list[str]:
    async with asyncio.timeout(20.0), Turns([None, *plan]) as turns:
        await turns.through.wait()
    assert all(record.getMessage() == "Turns failed and is tried again" for record in caplog.records)
    return [str(record.exc_info[1]) for record in caplog.records if record.exc_info]


async def test_an_error_does_not_end_the_task(caplog: pytest.LogCaptureFixture) -> None:
    assert await logged([ValueError("a bug")], caplog) == ["a bug"]
    assert "Traceback" in caplog.text


async def test_a_repeated_error_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    first, second = ValueError("first"), ValueError("second")
    plan = [first, first, first, second, second, None, second]
    assert await logged(plan, caplog) == ["first", "second", "second"]


async def test_an_error_on_entry_is_raised() -> None:
    with pytest.raises(ValueError, match="at once"):
        async with Turns([ValueError("at once")]):
            pytest.fail("it was entered")

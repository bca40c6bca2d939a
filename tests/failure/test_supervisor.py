"""The supervisor with real programs: they restart when they die, are killed when they hang, and end with it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.supervised_process import Backoff, Program
from paceline.cli.supervisor import Supervisor
from paceline.launcher import StartError

AT_ONCE = lambda: Backoff(shortest_s=0.01, longest_s=0.05)  # noqa: E731

SERVE = (
    "import signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); print('up', flush=True); "
    "signal.sigwait([signal.SIGTERM]); print('bye', flush=True)"
)
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"
)


def program(name: str, code: str, stop_s: float = 10.0) -> Program:
    """A child program: it runs `code`, with its own name in `argv[1]`."""
    return Program(name, (sys.executable, "-S", "-c", code, name), stop_s)


class Log:
    """Lines that the programs wrote."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._changed = asyncio.Condition()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self._notifying = asyncio.ensure_future(self._notify())

    async def count(self, line: str, times: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.lines.count(line) >= times)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def test_a_killed_program_is_started_again() -> None:
    log = Log()
    async with Supervisor([[program("worker", SERVE)]], log, AT_ONCE) as supervisor:
        await supervisor.until(log.count("up", 1))
        first = supervisor.children["worker"].pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await log.count("up", 2)
        assert supervisor.children["worker"].pid not in (None, first)
    assert log.lines[-1] == "bye"


async def test_a_program_that_was_ready_is_always_restarted() -> None:
    """Exit code 2 is a user error only at the start."""
    log = Log()
    async with Supervisor([[program("worker", SERVE + "; sys.exit(2)")]], log, AT_ONCE) as supervisor:
        await supervisor.until(log.count("up", 1))
        for times in (2, 3, 4, 5):
            pid = supervisor.children["worker"].pid
            assert pid is not None
            os.kill(pid, signal.SIGTERM)
            await log.count("up", times)


async def test_groups_stop_one_after_the_other() -> None:
    log = Log()
    names = SERVE.replace("'bye'", "sys.argv[1]")
    groups = [[program("gateway", names)], [program("target", names)], [program("draft", names)]]
    async with Supervisor(groups, log) as supervisor:
        await supervisor.until(log.count("up", 3))
    assert log.lines[3:] == ["gateway", "target", "draft"]


async def test_a_program_that_ignores_sigterm_is_killed() -> None:
    log = Log()
    async with Supervisor([[program("stubborn", STUBBORN, stop_s=0.05)]], log) as supervisor:
        await supervisor.until(log.count("up", 1))
        pid = supervisor.children["stubborn"].pid
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_kill_cuts_the_stopping_short() -> None:
    log = Log()
    async with Supervisor([[program("stubborn", STUBBORN, stop_s=3600.0)]], log) as supervisor:
        await supervisor.until(log.count("up", 1))
        supervisor.kill()


async def test_a_user_error_ends_the_start_with_the_programs_message() -> None:
    wrong = "import sys; print('no model at /nowhere: name another one'); sys.exit(2)"
    log = Log()
    async with Supervisor([[program("target", wrong), program("other", SERVE)]], log, AT_ONCE) as supervisor:
        with pytest.raises(StartError, match="target could not start: no model at /nowhere: name another one"):
            await supervisor.until(asyncio.Event().wait())
    assert log.lines.count("no model at /nowhere: name another one") == 1


async def test_a_program_that_never_comes_up_ends_the_start() -> None:
    async with Supervisor([[program("target", "raise SystemExit('broken')")]], Log(), AT_ONCE) as supervisor:
        with pytest.raises(StartError, match="gave up after 3 starts: target ended with exit code 1: broken"):
            await supervisor.until(asyncio.Event().wait())


async def test_processes_left_by_a_dead_program_are_killed() -> None:
    """They hold the pipe open; half a line is read only once it is closed."""
    leave = "import subprocess; subprocess.Popen(['sleep', '3600']); print('half a line', end='')"
    log = Log()
    async with Supervisor([[program("parent", leave)]], log, lambda: Backoff(3600.0)) as supervisor:
        await asyncio.wait_for(supervisor.until(log.count("half a line", 1)), 10)


def test_programs_end_with_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "supervise.py"
    script.write_text(
        "import asyncio, sys\n"
        "from paceline.cli.supervised_process import Program\n"
        "from paceline.cli.supervisor import Supervisor\n"
        "async def main():\n"
        "    program = Program('stubborn', (sys.executable, '-S', '-c', sys.argv[1]))\n"
        "    async with Supervisor([[program]], print) as supervisor:\n"
        "        while supervisor.children['stubborn'].pid is None: await asyncio.sleep(0.01)\n"
        "        print(supervisor.children['stubborn'].pid, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    supervisor = subprocess.Popen([sys.executable, script, STUBBORN], stdout=subprocess.PIPE, text=True)
    with supervisor:
        assert supervisor.stdout is not None
        pidfd = os.pidfd_open(int(supervisor.stdout.readline()))
        supervisor.kill()
    os.close(pidfd)


def test_backoff_doubles_and_is_reset() -> None:
    backoff = Backoff()
    assert [backoff.after(0.0) for _ in range(8)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert backoff.after(30.0) == 0.2
    assert backoff.after(0.0) == 0.4

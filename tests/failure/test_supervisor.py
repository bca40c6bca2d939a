"""The supervisor with real programs: they restart when they die, are killed when they hang, and end with it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.supervised_process import Program
from paceline.cli.supervisor import Supervisor
from paceline.launcher import Backoff, StartError
from tests.helpers.waiting import until

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


async def up(log: list[str], times: int = 1) -> None:
    await until(lambda: log.count("up") >= times)


async def test_a_program_is_always_restarted_once_it_was_ready() -> None:
    """Exit code 2 is a user error only at the start."""
    log: list[str] = []
    code = SERVE + "; sys.exit(2)"
    async with Supervisor([[program("worker", code)]], log.append, AT_ONCE) as supervisor:
        await supervisor.until(up(log))
        for times, number in enumerate([signal.SIGKILL, *[signal.SIGTERM] * 4], 2):
            pid = supervisor.children["worker"].pid
            assert pid is not None
            os.kill(pid, number)
            await up(log, times)
            assert supervisor.children["worker"].pid not in (None, pid)
    assert log[-1] == "bye"


async def test_groups_stop_one_after_the_other() -> None:
    log: list[str] = []
    names = SERVE.replace("'bye'", "sys.argv[1]")
    groups = [[program("gateway", names)], [program("target", names)], [program("draft", names)]]
    async with Supervisor(groups, log.append) as supervisor:
        await supervisor.until(up(log, 3))
    assert log[3:] == ["gateway", "target", "draft"]


@pytest.mark.parametrize("killed", [False, True])
async def test_a_program_that_ignores_sigterm_is_killed(killed: bool) -> None:
    """After its time, or at once if the supervisor is asked to."""
    log: list[str] = []
    stop_s = 3600.0 if killed else 0.05
    async with Supervisor([[program("stubborn", STUBBORN, stop_s)]], log.append) as supervisor:
        await supervisor.until(up(log))
        pid = supervisor.children["stubborn"].pid
        if killed:
            supervisor.kill()
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('no model: name another one'); raise SystemExit(2)", "target could not start: no model: name another"),
        ("raise SystemExit('broken')", "gave up after 3 starts: target ended with exit code 1: broken"),
    ],
)
async def test_a_program_that_never_comes_up_ends_the_start(code: str, reason: str) -> None:
    """At once if it exits with the code of a user error."""
    log: list[str] = []
    programs = [program("target", code), program("other", SERVE)]
    async with Supervisor([programs], log.append, AT_ONCE) as supervisor:
        with pytest.raises(StartError, match=reason):
            await supervisor.until(asyncio.Event().wait())
    assert log.count("no model: name another one") <= 1


async def test_processes_left_by_a_dead_program_are_killed() -> None:
    """They hold the pipe open; half a line is read only once it is closed."""
    leave = "import subprocess; subprocess.Popen(['sleep', '3600']); print('half a line', end='')"
    log: list[str] = []
    async with Supervisor([[program("parent", leave)]], log.append, lambda: Backoff(3600.0)) as supervisor:
        await supervisor.until(until(lambda: "half a line" in log))


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

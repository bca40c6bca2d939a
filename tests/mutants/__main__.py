"""`make mutants`: changes the code in one wrong way after another, and counts the changes that tests notice.

Works on temporary copies of the checkout, two at a time. First the tests are run on code without any change: they have
to pass, or their failures would say nothing. The last line of output is JSON: how many mutants there are, how many were
caught, which ones survived.

A mutant whose old text is not in its file exactly once is stale, which a unit test finds, too. Stale mutants are
listed, nothing is run, and the exit code is 2. It is 1 if a mutant survives.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.table import CHECKOUT, MUTANTS, Mutant

AT_ONCE = 2
LONGEST_S = 900
SLOWER, GRACE_S = 3, 60
"""A mutant may go round in circles: its tests count as failed if they take this many times as long as without it, and
this much longer."""
PASSED, FAILED, NONE_SELECTED = 0, 1, 5  # exit codes of pytest
CRASHES = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGILL, -signal.SIGFPE}
"""Ends of native mutants, which are as good as a test that fails."""


def main() -> int:
    options = _options()
    mutants = [each for each in MUTANTS if options.only in each.name]
    stale = [each.name for each in mutants if each.occurrences() != 1]
    if stale:
        print("Stale mutants, to be written anew in tests/mutants/table.py:", *stale, sep="\n  ", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as threads:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(AT_ONCE):
            copies.put(_copy(Path(folder, str(number))))
        files = sorted({file for each in mutants for file in each.tests})
        seconds = dict(zip(files, threads.map(lambda file: _seconds(file, copies, options.select), files), strict=True))
        if None in seconds.values():
            return 2

        def caught_in_time(mutant: Mutant) -> bool:
            usual = sum(seconds[file] or 0.0 for file in mutant.tests)
            return _caught(mutant, copies, options.select, SLOWER * usual + GRACE_S)

        caught = list(threads.map(caught_in_time, mutants))
    survived = [each.name for each, seen in zip(mutants, caught, strict=True) if not seen]
    print(json.dumps({"mutants": len(mutants), "caught": sum(caught), "survived": survived}))
    return int(bool(survived))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--select", default="not slow", help="pytest's -m: which tests look (%(default)s)")
    parser.add_argument("--only", default="", help="only the mutants with this in their names")
    return parser.parse_args()


def _copy(folder: Path) -> Path:
    """The checkout as it is, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=CHECKOUT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (CHECKOUT / name).exists():  # one that git knows may have been removed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, folder / name, follow_symlinks=False)  # `paceline_services` is a link
    return folder


def _seconds(file: str, copies: queue.SimpleQueue[Path], select: str) -> float | None:
    """How long the tests of a file take without any mutant; None if they fail."""
    start = time.monotonic()
    with _borrowed(copies) as copy:
        status, output = _tested(copy, [file], select, LONGEST_S)
    if status in (PASSED, NONE_SELECTED):
        return time.monotonic() - start
    print(f"tests/{file} fails without any mutant: pytest ended with {status}\n{output}", flush=True)
    return None


def _caught(mutant: Mutant, copies: queue.SimpleQueue[Path], select: str, limit_s: float) -> bool:
    """Raises RuntimeError if the tests could not be run: then nothing is known of the mutant."""
    start = time.monotonic()
    with _borrowed(copies) as copy:
        changed = copy / mutant.file
        original = changed.read_text()
        changed.write_text(original.replace(mutant.old, mutant.new))
        try:
            status, output = _tested(copy, mutant.tests, select, limit_s)
        finally:
            changed.write_text(original)
    if status not in (PASSED, FAILED, *CRASHES):
        raise RuntimeError(f"{mutant.name}: pytest ended with {status}\n{output}")
    by = next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    by = by or (f"it crashed by signal {-status}" if status in CRASHES else "")
    verdict = "SURVIVED" if status == PASSED else f"caught: {by}"
    print(f"{mutant.name} ({time.monotonic() - start:.0f} s)\n    {verdict}", flush=True)
    return status != PASSED


@contextlib.contextmanager
def _borrowed(copies: queue.SimpleQueue[Path]) -> Iterator[Path]:
    copy = copies.get()
    try:
        yield copy
    finally:
        copies.put(copy)


def _tested(copy: Path, tests: Sequence[str], select: str, limit_s: float) -> tuple[int, str]:
    """Exit code and output of pytest, which stops at the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-m", select]
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),  # before the checkout, which is installed
        "PYTHONDONTWRITEBYTECODE": "1",  # a mutant of the same length, written in the same second, would not be seen
        "OMP_NUM_THREADS": "1",
    }
    try:
        run = subprocess.run(
            [*command, *(f"tests/{file}" for file in tests)],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return FAILED, f"FAILED after {limit_s:.0f} s"
    return run.returncode, run.stdout + run.stderr


if __name__ == "__main__":
    sys.exit(main())

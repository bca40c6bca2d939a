"""One run of Locust against a gateway, in a process of its own, with what everybody used meanwhile."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtests.load_run import LoadRun
from loadtests.resource_usage import MINUTE_S, ResourceWatch, cores, memory

FLAT = 0.05
"""Memory may grow by this share from the first minute to the last."""
LOCUST = ("-m", "locust", "-f", str(Path(__file__).with_name("locustfile.py")), "--headless", "--only-summary")
ROOT = Path(__file__).parent.parent


class LocustError(Exception):
    """Locust ended without a result."""


async def run_locust(run: LoadRun, services: Mapping[str, int]) -> dict[str, Any]:
    """What came of it. `services`: processes to tell apart, by name. Raises `LocustError`."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "run.json"
        run.write(told)
        locust = await asyncio.create_subprocess_exec(
            *(sys.executable, *LOCUST, "--run", str(told)), stdout=asyncio.subprocess.PIPE, cwd=ROOT
        )
        watch = ResourceWatch({**services, "clients": locust.pid})
        watching = asyncio.create_task(watch.run())
        try:
            said, _ = await locust.communicate()
        finally:
            watching.cancel()
            with suppress(ProcessLookupError):
                locust.kill()
    return checked_summary(summary(said, locust.returncode), watch, run)


def summary(said: bytes, code: int | None) -> dict[str, Any]:
    last = said.decode(errors="replace").strip().rpartition("\n")[2]
    try:
        told: dict[str, Any] = json.loads(last)
    except ValueError:
        raise LocustError(f"locust ended with exit code {code} and said: {last!r}") from None
    return told


def checked_summary(told: dict[str, Any], watch: ResourceWatch, run: LoadRun) -> dict[str, Any]:
    begins, ends = told.pop("window")
    used = memory(watch.memory_mb, begins, ends)
    flat = used.growth <= FLAT if used and run.seconds >= 2 * MINUTE_S else None
    clean = not (told["errors"] or told["lost_tokens"] or told["changed_tokens"]) and flat is not False
    drafted = told["figures"]["acceptance_length"] > 0
    return {
        "good": clean and told["figures"]["answers"] > 0 and drafted == run.speculative,
        **told,
        "goal": asdict(run.goal),
        "memory": used and asdict(used),
        "memory_flat": flat,
        "cores": cores(watch.cpu, begins, ends),
    }

"""One run of Locust against a gateway, in a process of its own, with the resource usage meanwhile."""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtests.load_profiles import LoadRun
from loadtests.resource_usage import MINUTE_S, ResourceWatch, cores, memory

FLAT = 0.05
"""Memory may grow by this share from the first minute to the last."""
LOCUST = ("-m", "locust", "-f", str(Path(__file__).with_name("locustfile.py")), "--headless", "--only-summary")
ROOT = Path(__file__).parent.parent


class LocustError(Exception):
    """Locust ended without a result."""


async def run_locust(run: LoadRun, services: Mapping[str, int]) -> dict[str, Any]:
    """The result of one run. `services`: process ids of the services, by name. Raises `LocustError`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.pickle"
        file.write_bytes(pickle.dumps(run))
        locust = await asyncio.create_subprocess_exec(
            *(sys.executable, *LOCUST, "--run", str(file)), stdout=asyncio.subprocess.PIPE, cwd=ROOT
        )
        watch = ResourceWatch({**services, "clients": locust.pid})
        watching = asyncio.create_task(watch.run())
        try:
            output, _ = await locust.communicate()
        finally:
            watching.cancel()
            with suppress(ProcessLookupError):
                locust.kill()
    return checked_summary(summary(output, locust.returncode), watch, run)


def summary(output: bytes, code: int | None) -> dict[str, Any]:
    """The JSON document in the last line of Locust's output. Raises `LocustError`."""
    last = output.decode(errors="replace").strip().rpartition("\n")[2]
    try:
        return dict(json.loads(last))
    except ValueError:
        raise LocustError(f"locust ended with exit code {code}, and its last line is {last!r}") from None


def checked_summary(summary: dict[str, Any], watch: ResourceWatch, run: LoadRun) -> dict[str, Any]:
    """The summary with resource usage, and whether the run was `good`."""
    begins, ends = summary.pop("window")
    used = memory(watch.memory_mb, begins, ends)
    flat = used.growth <= FLAT if used and run.profile.seconds >= 2 * MINUTE_S else None
    clean = not (summary["errors"] or summary["lost_tokens"] or summary["changed_tokens"]) and flat is not False
    drafted = summary["figures"]["acceptance_length"] > 0
    return {
        "good": clean and summary["figures"]["answers"] > 0 and drafted == run.speculative,
        **summary,
        "goal": asdict(run.profile.goal),
        "memory": used and asdict(used),
        "memory_flat": flat,
        "cores": cores(watch.cpu, begins, ends),
    }

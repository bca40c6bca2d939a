"""The file of golden traces: names and answers, as JSON."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "traces.json.gz"
TOLERANCE = 2e-3
"""Of log-probabilities: machines round in other ways."""


def read() -> dict[str, Any]:
    traces: dict[str, Any] = json.loads(gzip.decompress(PATH.read_bytes()))
    return traces


def write(traces: Mapping[str, Any]) -> None:
    text = json.dumps(traces, separators=(",", ":"), sort_keys=True)
    PATH.write_bytes(gzip.compress(text.encode(), mtime=0))


def differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """Every place where two traces say something else; numbers with a fraction are log-probabilities."""
    if isinstance(before, float) and isinstance(now, float) and abs(before - now) <= TOLERANCE:
        return
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            if key not in before or key not in now:
                yield f"{where}/{key}: {'new' if key in now else 'gone'}"
            else:
                yield from differences(before[key], now[key], f"{where}/{key}")
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for i, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from differences(one, other, f"{where}/{i}")
    elif before != now:
        yield f"{where}: {str(before)[:200]} was recorded, now it is {str(now)[:200]}"

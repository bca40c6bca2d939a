"""What the seconds before a model's first token are spent on: one log line for each phase."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


@contextmanager
def load_phase(name: str) -> Iterator[None]:
    """Log the phase and its seconds when the body ends; nothing if it raises."""
    began = time.perf_counter()
    yield
    log.info(name, extra={"seconds": round(time.perf_counter() - began, 2)})

"""Log lines: time, level, service, message, then key=value pairs.

Code uses the standard library and puts values into `extra`:

    logger = logging.getLogger(__name__)
    logger.info("model loaded", extra={"seconds": 1.2, "slots": 16384})

    10:45:11.123 INFO    target/a1b2 model loaded seconds=1.2 slots=16384
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TextIO

# Attributes of every record. Python 3.12 adds `taskName`; uvicorn repeats its message in `color_message`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
LEVELS = ("debug", "info", "warning", "error")
_COLOURS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[1;31m"}
_PLAIN = "\x1b[0m"


def configure(service: str, worker_id: str = "", level: int | str = "INFO") -> None:
    """Make this process log to stderr. Call it once, at the beginning of `main`."""
    handler = make_handler(service, worker_id, sys.stderr)
    logging.basicConfig(handlers=[handler], level=level, force=True)


def make_handler(service: str, worker_id: str, stream: TextIO) -> logging.Handler:
    """A handler that writes lines, in colour on a terminal."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter(service, worker_id, colour=stream.isatty()))
    return handler


class LineFormatter(logging.Formatter):
    """Formats a record as text."""

    def __init__(self, service: str, worker_id: str, *, colour: bool) -> None:
        super().__init__()
        self._source = "/".join(filter(None, (service, worker_id)))
        self._colours = _COLOURS if colour else {}

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        pairs = "".join(f" {key}={_quoted(value)}" for key, value in _extra(record).items())
        line = f"{clock} {record.levelname:<7} {self._source} {record.getMessage()}{pairs}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        colour = self._colours.get(record.levelno)
        return f"{colour}{line}{_PLAIN}" if colour else line


def _extra(record: logging.LogRecord) -> Mapping[str, Any]:
    """The values of `extra`. Names with an underscore belong to libraries, such as Ray."""
    return {key: value for key, value in vars(record).items() if key not in _STANDARD and not key.startswith("_")}


def _quoted(value: object) -> str:
    """A value as text, in quotes if it is empty or has spaces or special characters."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)


log = logging.getLogger(__name__)


@contextmanager
def load_phase(name: str) -> Iterator[None]:
    """Log the phase and its seconds when the body ends; nothing if it raises."""
    began = time.perf_counter()
    yield
    log.info(name, extra={"seconds": round(time.perf_counter() - began, 2)})

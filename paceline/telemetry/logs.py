"""Log lines: time, level, service, message, then key=value pairs; or the same as JSON, one object per line.

Code uses the standard library and puts values into `extra`:

    logger = logging.getLogger(__name__)
    logger.info("model loaded", extra={"seconds": 1.2, "slots": 16384})

    10:45:11.123 INFO    target/a1b2 model loaded seconds=1.2 slots=16384
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

# Attributes of every record. Python 3.12 adds `taskName`; uvicorn repeats its message in `color_message`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
LEVELS = ("debug", "info", "warning", "error")
_COLOURS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[1;31m"}
_PLAIN = "\x1b[0m"


def configure(service: str, worker_id: str = "", level: int | str = "INFO", *, json: bool = False) -> None:
    """Make this process log to stderr. Call it once, at the beginning of `main`."""
    handler = make_handler(service, worker_id, sys.stderr, json=json)
    logging.basicConfig(handlers=[handler], level=level, force=True)


def make_handler(service: str, worker_id: str, stream: TextIO, *, json: bool = False) -> logging.Handler:
    """A handler that writes lines, in colour on a terminal; with `json`, JSON objects."""
    handler = logging.StreamHandler(stream)
    if json:
        handler.setFormatter(JsonFormatter(service, worker_id))
    else:
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


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON. Values that JSON does not have are written as text."""

    def __init__(self, service: str, worker_id: str) -> None:
        super().__init__()
        self._source = {"service": service, "worker": worker_id}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **self._source,
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _extra(record: logging.LogRecord) -> Mapping[str, Any]:
    """The values of `extra`. Names with an underscore belong to libraries, such as Ray."""
    return {key: value for key, value in vars(record).items() if key not in _STANDARD and not key.startswith("_")}


def _quoted(value: object) -> str:
    """A value as text, in quotes if it is empty or has spaces or special characters."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)

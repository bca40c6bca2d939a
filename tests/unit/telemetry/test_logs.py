"""Log lines, among them the one about acceptance."""

import io
import logging
import re
import subprocess
import sys

import pytest

from paceline.state import AcceptanceCounts
from paceline.telemetry.acceptance_log import AcceptanceLog, acceptance_line
from paceline.telemetry.logs import make_handler

NOTHING = AcceptanceCounts()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def logger_to(stream: io.StringIO) -> logging.Logger:
    logger = logging.Logger("paceline.test")
    logger.addHandler(make_handler("target", "a1b2", stream))
    return logger


def log_a_failure(logger: logging.Logger) -> None:
    try:
        raise ValueError("bad frame")
    except ValueError:
        logger.exception("link closed")


def test_a_line_has_time_level_service_message_and_pairs() -> None:
    """A newline in a value does not break the line; an exception follows with its traceback."""
    stream = io.StringIO()
    extra = {"seconds": 1.23456789, "slots": 16384, "path": "a b", "why": "", "model": "a\nforged"}
    logger_to(stream).info("model %s loaded", "m", extra=extra)
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d\.\d{3} INFO    target/a1b2 model m loaded "
        r'seconds=1.23457 slots=16384 path="a b" why="" model="a\\nforged"\n',
        stream.getvalue(),
    )
    log_a_failure(logger_to(stream))
    assert "link closed\nTraceback" in stream.getvalue()
    assert stream.getvalue().endswith("ValueError: bad frame\n")


def test_the_process_logs_to_stderr_from_its_level_up() -> None:
    code = (
        "import logging; from paceline.telemetry.logs import configure; configure('gateway', level='WARNING');"
        "log = logging.getLogger('paceline.anything'); log.info('not this'); log.warning('this')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr.endswith("WARNING gateway this\n")
    assert "not this" not in done.stderr


@pytest.mark.parametrize(("stream", "coloured"), [(Terminal(), True), (io.StringIO(), False)])
def test_lines_are_coloured_on_a_terminal_only(stream: io.StringIO, coloured: bool) -> None:
    logger_to(stream).warning("careful")
    assert ("\x1b[33m" in stream.getvalue()) is coloured


def test_the_acceptance_line_has_all_figures() -> None:
    assert acceptance_line(AcceptanceCounts(160, (80, 80), (76, 69)), 225, 0.277) == (
        "Draft tokens: 145/160 (90.62%) accepted | acceptance length 1.81/2 without bonus"
        " | per position [95%, 91%] | efficiency 94% | 812 tokens/s, 578 guesses/s"
    )
    assert acceptance_line(NOTHING, 200, 2.0) == "Draft tokens: none verified | 100 tokens/s"


def test_each_acceptance_line_is_about_its_own_interval(caplog: pytest.LogCaptureFixture) -> None:
    """An interval without tokens has no line."""
    caplog.set_level(logging.INFO, "paceline.telemetry")
    clock = iter((10.0, 10.0, 15.0, 19.9, 20.0, 26.0))
    log = AcceptanceLog(lambda: next(clock))
    log.add(AcceptanceCounts(3, (2, 1), (1, 1)), 4)
    log.add(AcceptanceCounts(2, (1, 1), (1, 0)), 2)
    log.add(AcceptanceCounts(1, (1,), (1,)), 10)
    log.add(NOTHING, 0)
    log.add(NOTHING, 0)
    assert caplog.messages == [
        acceptance_line(AcceptanceCounts(5, (3, 2), (2, 1)), 6, 5.0),
        acceptance_line(AcceptanceCounts(1, (1,), (1,)), 10, 5.0),
    ]

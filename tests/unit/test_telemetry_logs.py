"""Log lines, among them the one about acceptance."""

import io
import json
import logging
import re
import subprocess
import sys

import pytest

from paceline.core.messages import SpeculationStats
from paceline.state import AcceptanceCounts
from paceline.telemetry.acceptance_log import AcceptanceLog, acceptance_line
from paceline.telemetry.logs import make_handler

LOG_TWO_LINES = """
import logging
from paceline.telemetry.logs import configure
configure("gateway", level="WARNING")
logging.getLogger("paceline.anything").info("not this")
logging.getLogger("paceline.anything").warning("this")
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def logger_to(stream: io.StringIO, *, json: bool = False) -> logging.Logger:
    logger = logging.Logger("paceline.test")
    logger.addHandler(make_handler("target", "a1b2", stream, json=json))
    return logger


def log_a_failure(logger: logging.Logger) -> None:
    try:
        raise ValueError("bad frame")
    except ValueError:
        logger.exception("link closed")


class TestLines:
    def test_time_level_service_message_and_pairs(self) -> None:
        stream = io.StringIO()
        extra = {"seconds": 1.23456789, "slots": 16384, "path": "a b", "why": ""}
        logger_to(stream).info("model %s loaded", "m", extra=extra)
        assert re.fullmatch(
            r"\d\d:\d\d:\d\d\.\d{3} INFO    target/a1b2 model m loaded "
            r'seconds=1.23457 slots=16384 path="a b" why=""\n',
            stream.getvalue(),
        )

    def test_the_process_logs_to_stderr_from_its_level_up(self) -> None:
        done = subprocess.run([sys.executable, "-c", LOG_TWO_LINES], capture_output=True, text=True, check=True)
        assert done.stdout == ""
        assert done.stderr.endswith("WARNING gateway this\n")
        assert "not this" not in done.stderr

    @pytest.mark.parametrize(("stream", "coloured"), [(Terminal(), True), (io.StringIO(), False)])
    def test_colour_on_a_terminal_only(self, stream: io.StringIO, coloured: bool) -> None:
        logger_to(stream).warning("careful")
        assert ("\x1b[33m" in stream.getvalue()) is coloured

    def test_exceptions_come_with_their_traceback(self) -> None:
        stream = io.StringIO()
        log_a_failure(logger_to(stream))
        assert "link closed\nTraceback" in stream.getvalue()
        assert stream.getvalue().endswith("ValueError: bad frame\n")

    def test_a_newline_in_a_value_does_not_break_the_line(self) -> None:
        stream = io.StringIO()
        logger_to(stream).info("refused", extra={"model": "a\nforged"})
        assert stream.getvalue().count("\n") == 1

    def test_json_is_one_object_per_line(self) -> None:
        stream = io.StringIO()
        logger = logger_to(stream, json=True)
        logger.info("model loaded", extra={"slots": 16384, "shape": {1, 2}.__class__})
        log_a_failure(logger)
        loaded, failed = map(json.loads, stream.getvalue().splitlines())
        assert (loaded["service"], loaded["worker"], loaded["level"]) == ("target", "a1b2", "info")
        assert (loaded["message"], loaded["slots"]) == ("model loaded", 16384)
        assert "ValueError: bad frame" in failed["exception"]


class TestAcceptanceLine:
    def test_all_figures_of_the_line(self) -> None:
        stats = AcceptanceCounts(160, (80, 80), (76, 69))
        assert acceptance_line(stats, 225, 0.277) == (
            "Draft tokens: 145/160 (90.62%) accepted | acceptance length 1.81/2 without bonus"
            " | per position [95%, 91%] | efficiency 94% | 812 tokens/s, 578 guesses/s"
        )

    def test_plain_decoding(self) -> None:
        assert acceptance_line(AcceptanceCounts(), 200, 2.0) == "Draft tokens: none verified | 100 tokens/s"


def verified(*steps: tuple[list[int], int]) -> AcceptanceCounts:
    """Of one step per (depths of its nodes, accepted tokens)."""
    stats = SpeculationStats()
    for depths, accepted in steps:
        stats.record(len(depths), max(depths, default=0), accepted)
    return AcceptanceCounts.of(stats)


class TestAcceptanceLog:
    def test_each_line_is_about_its_own_interval(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "paceline.telemetry")
        now = 10.0
        log = AcceptanceLog(lambda: now)
        log.add(verified(([1, 2], 2), ([1], 0)), tokens=4)
        now = 15.0
        log.add(verified(([1, 2], 1)), tokens=2)
        now = 19.9
        log.add(verified(([1], 1)), tokens=10)
        now = 20.0
        log.add(verified(), tokens=0)
        assert caplog.messages == [
            "Draft tokens: 3/5 (60.00%) accepted | acceptance length 1.00/2 without bonus"
            " | per position [67%, 50%] | efficiency 75% | 1 tokens/s, 1 guesses/s",
            "Draft tokens: 1/1 (100.00%) accepted | acceptance length 1.00/1 without bonus"
            " | per position [100%] | efficiency 100% | 2 tokens/s, 0 guesses/s",
        ]

    def test_logs_nothing_without_traffic(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "paceline.telemetry")
        now = 10.0
        log = AcceptanceLog(lambda: now)
        now = 16.0
        log.add(verified(), tokens=0)
        assert caplog.messages == []

"""`paceline bench overlap`, shrunk: every part runs on the real stack, and the last line is checked."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from paceline.cli.app import main
from paceline_lab.bench import overlap

SHRUNK: dict[str, object] = {
    "TARGET": "timed:vocabulary=1024,step_ms=2,knee_rows=128",
    "ROUND_TRIPS_MS": (0.0, 10.0),
    "CONCURRENCY": (1, 4),
    "CHAINS": (3,),
    "FIXED": (4,),
    "USELESS_CASES": ((10.0, 4),),
    "ALONE": 1,
    "TURNS": 1,
}


@pytest.mark.alone
@pytest.mark.slow
def test_the_whole_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SHRUNK.items():
        monkeypatch.setattr(overlap, name, value)
    ran = CliRunner().invoke(main, ["bench", "overlap"], catch_exceptions=False)
    assert ran.exit_code == 0
    result = json.loads(ran.stdout.splitlines()[-1])
    assert [line["rtt_ms"] for line in result["rtt"]] == [0.0, 10.0]
    assert [line["requests"] for line in result["concurrency"]] == [1, 4]
    for line in (*result["rtt"], *result["concurrency"]):
        assert min(line["plain"], line["lockstep"], line["streamed"]) > 0
    slow = result["rtt"][1]
    assert slow["lockstep"] < 1 / 0.010 * 4, "the network is as slow as asked: K + 1 tokens per round trip at most"
    assert result["wire_bytes_per_token"] == max(line["wire_bytes_per_token"] for line in result["rtt"]) > 0
    errors = [abs(line["forecast"] / line["streamed"] - 1) for line in result["rtt"]]
    assert result["plan_error"] == pytest.approx(max(errors), abs=1e-3)
    assert result["useless_draft_ratio"] > 0
    assert min(result["killed"].values()) > 0


def test_other_tokens_end_the_benchmark() -> None:
    bench = overlap.OverlapBench(stack=None, client=None, link=None, tokens={})  # type: ignore[arg-type]
    bench.check("a", [1, 2])
    bench.check("a", [1, 2, 3])
    bench.check("a", [1])
    with pytest.raises(overlap.OverlapOutputDiffersError):
        bench.check("a", [1, 2, 4])

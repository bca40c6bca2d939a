"""`paceline serve` with a target that several processes share: they end together, and come back together."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from paceline.model.rows import Lane
from paceline.tensor_parallel import meeting
from paceline.tensor_parallel.ranks import RankLostError
from tests.checkpoints import save_checkpoint
from tests.failure.test_supervisor_stack import Served, serving
from tests.ranks import Followers

BODY = {"prompt": "1 2 3", "max_tokens": 120, "temperature": 0.8, "seed": 7}
PATIENCE_S = 120.0
NGRAM = '{"method": "ngram", "prompt_lookup_min": 1}'


def test_a_replica_that_loses_a_rank_ends_and_starts_as_one(tmp_path: Path) -> None:
    """SIGKILL in the middle of a stream; what is asked for then, and again, has the same tokens."""
    arguments = (str(save_checkpoint(tmp_path)), "--port", "0", "--speculative-config", NGRAM)
    with serving(*arguments, "--tensor-parallel-size", "2") as served:
        url = served.wait_for(r"Serving \S+ at (\S+)/v1")[1]
        before = _text(url)
        for victim in (1, 0):
            first = _ranks(served)
            with httpx.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}, **CLIENT) as response:
                next(response.iter_lines())
                os.kill(first[1] if victim == 1 else _computing(first[0]), signal.SIGKILL)
                served.wait_for(rf"rank {victim} is gone: the replica ends as a whole")
                served.wait_for(r"target ready on")
            _healthy(url)
            assert not set(_ranks(served)) & set(first)
            assert _text(url) == before
        served.process.send_signal(signal.SIGINT)
        served.wait_for(r"serve stopped")
        assert served.process.wait() == 0
        assert not [line for line in served.log if "did not stop" in line]


def test_a_rank_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "PASS_S", 1.0)
    followers = Followers(1)
    try:
        with followers.led(save_checkpoint(tmp_path), 2) as model:
            lane = Lane()
            lane.slots = [1]
            model.run([lane.row(5, 0)], [0])
            os.kill(followers.pid(1), signal.SIGSTOP)
            with pytest.raises(RankLostError, match="rank 0 lost its replica"):
                model.run([lane.row(5, 0)], [0])
    finally:
        followers.kill()


def _ranks(served: Served) -> list[int]:
    """Process ids, by rank."""
    return [pid for kind in ("services.target", "services.rank") for pid in served.children(kind).values()]


CLIENT = {"trust_env": False, "timeout": PATIENCE_S}


def _text(url: str) -> str:
    return str(httpx.post(f"{url}/v1/completions", json=BODY, **CLIENT).raise_for_status().json()["choices"][0]["text"])


def _healthy(url: str) -> None:
    """Wait until the gateway has heard of the target."""
    deadline = time.monotonic() + PATIENCE_S
    while not httpx.get(f"{url}/health", **CLIENT).is_success:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _computing(service: int) -> int:
    """The process that computes for a target."""
    [child] = Path(f"/proc/{service}/task/{service}/children").read_text().split()
    return int(child)

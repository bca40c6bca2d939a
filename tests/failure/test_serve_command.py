"""`paceline serve` with real services and fake models: it restarts services, and stops them in order."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess

import httpx
import pytest
from typer.testing import CliRunner

from paceline.cli import main
from tests.helpers.served import PACELINE, serving

pytestmark = pytest.mark.alone

PAIR = '{"method": "draft_model", "model": "table:256:0.3"}'
BODY = {"prompt": "1 2 3", "max_tokens": 64, "temperature": 0, "speculation_stats": True}
LONG = {"prompt": "1 2 3", "max_tokens": 2000, "temperature": 0, "stream": True}


def test_serves_restarts_and_stops() -> None:
    with serving("table:256", "--port", "0", "--speculative-config", PAIR) as served:
        url = served.wait_for(r"Serving table:256 at (\S+)/v1")[1]
        before = _completion(url)

        [(arguments, draft)] = served.children("paceline_services.draft").items()
        os.kill(draft, signal.SIGKILL)
        assert _completion(url) == before
        served.wait_for(r"draft-1-\w+ was ended by SIGKILL")
        served.wait_for(r"draft ready on")
        [(restarted, again)] = served.children("paceline_services.draft").items()
        assert again != draft
        assert _port(restarted) == _port(arguments)
        assert _completion(url) == before

        [redis] = served.children("redis-server").values()
        os.kill(redis, signal.SIGKILL)
        served.wait_for("the embedded Redis died and is started again")
        assert _completion(url) == before

        pids = [pid for kind in ("services.", "redis-server") for pid in served.children(kind).values()]
        assert len(pids) == 4
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, trust_env=False, timeout=30.0) as response:
            chunks = response.iter_lines()
            next(chunks)
            served.process.send_signal(signal.SIGINT)
            finished = [line for line in chunks if '"finish_reason":"length"' in line]
        assert len(finished) == 1
        order = [served.wait_for(r"(gateway) stops|(target|draft) stopped|(serve) stopped") for _ in range(4)]
        assert [next(filter(None, found.groups())) for found in order] == ["gateway", "target", "draft", "serve"]
        assert served.process.wait() == 0
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("/nowhere",), "no model at /nowhere"),
        (("table:256", "--speculative-config", '{"method": "draft_model", "model": "table:128"}'), "vocabularies of"),
        (("table:256", "--speculative-config", '{"method": "eagle3"}'), "method eagle3 needs `model`"),
        (("table:256", "--engine-config", '{"slot": 5}'), "slot: is not known here"),
    ],
)
def test_an_impossible_deployment_starts_nothing(arguments: tuple[str, ...], complaint: str) -> None:
    result = CliRunner().invoke(main, ["serve", "--port", "0", *arguments])
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.replace("│", " ").split())


def test_an_unreachable_redis_starts_nothing() -> None:
    command = [*PACELINE, "serve", "--port", "0", "table:256", "--redis-url", "redis://127.0.0.1:1/0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Redis at redis://127.0.0.1:1/0 does not answer" in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


def test_a_taken_port_starts_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [*PACELINE, "serve", "table:256", "--port", port], capture_output=True, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr.startswith(f"cannot listen on 127.0.0.1:{port}")


def test_an_error_found_by_a_service_is_shown() -> None:
    """More positions than the model has: only the target, once it has read the checkpoint, knows."""
    done = subprocess.run(
        [*PACELINE, "serve", "--port", "0", "--engine-config", '{"max_model_len": 1000000}'],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "could not start: " in done.stderr.splitlines()[-1]
    assert "max_model_len 1000000 exceeds" in done.stderr.splitlines()[-1]


def _completion(url: str) -> str:
    answer = httpx.post(f"{url}/v1/completions", json=BODY, trust_env=False, timeout=30.0).raise_for_status().json()
    return str(answer["choices"][0]["text"])


def _port(arguments: str) -> str:
    found = re.search(r"--port (\d+)", arguments)
    assert found is not None
    return found[1]

"""`python -m paceline_services.gateway` as a supervisor sees it: ready line, exit codes, errors with advice."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest

from paceline.model_names import resolve_model
from paceline.state.embedded_redis import EmbeddedRedis

DEAD_REDIS = "redis://127.0.0.1:1/0"


@pytest.fixture(scope="module")
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paceline_services.gateway", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_it_logs_when_it_is_ready_and_stops_in_order(redis: EmbeddedRedis) -> None:
    with start("--model", "pydoc", "--port", "0", "--redis-url", redis.url) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "gateway ready on http://127.0.0.1:" in line
        url = line.split("ready on ")[1].split()[0]
        with pytest.raises(HTTPError) as answer, urllib.request.urlopen(f"{url}/health"):
            pass
        with answer.value as response:
            assert response.code == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert "Traceback" not in process.stderr.read()


def test_a_port_in_use_is_an_error_of_one_line(redis: EmbeddedRedis) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert_refused("--port", "--model", "pydoc", "--port", port, "--redis-url", redis.url)


def test_a_missing_model_is_an_error_of_one_line(redis: EmbeddedRedis) -> None:
    assert_refused("no model at", "--model", "/no/such/model", "--port", "0", "--redis-url", redis.url)


def test_a_broken_chat_template_is_an_error_of_one_line(tmp_path: Path, redis: EmbeddedRedis) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(resolve_model("pydoc")) / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    assert_refused("chat template", "--model", str(tmp_path), "--port", "0", "--redis-url", redis.url)


def test_an_unreachable_redis_is_an_error_of_one_line() -> None:
    assert_refused("Redis", "--model", "pydoc", "--port", "0", "--redis-url", DEAD_REDIS)


def assert_refused(named: str, *arguments: str) -> None:
    with start(*arguments) as process:
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 2
    assert len(stderr.splitlines()) == 1, stderr
    assert named in stderr

"""`python -m paceline_services.gateway`: its options, ready line and exit codes, and errors with advice."""

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
from paceline_services.gateway.__main__ import gateway_settings, parse
from paceline_services.gateway.settings import GatewaySettings
from tests.helpers.service_processes import service_process


@pytest.fixture(scope="module")
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


def settings(*arguments: str) -> GatewaySettings:
    return gateway_settings(parse(["--redis-url", "redis://x", *arguments]))


def test_options_become_settings() -> None:
    """Models are served by their own name or another."""
    given = settings("--model", "pydoc", "--port", "7", "--drain-s", "3", "--max-queue", "9", "--resume-s", "2")
    assert given.models == {"pydoc": "pydoc"}
    assert (given.port, given.drain_s, given.limits.max_queue, given.limits.resume_s) == (7, 3.0, 9, 2.0)
    assert (given.tool_call_parser, given.reasoning_parser) == ("auto", "auto")
    named = settings("--model", "pydoc", "--tool-call-parser", "hermes", "--reasoning-parser", "none")
    assert (named.tool_call_parser, named.reasoning_parser) == ("hermes", "none")
    assert given.otlp_traces_endpoint is None
    assert settings("--model", "a", "--otlp-traces-endpoint", "http://c:4318").otlp_traces_endpoint == (
        "http://c:4318/v1/traces"
    )
    named = "https://c/any/path"
    assert settings("--model", "a", "--otlp-traces-endpoint", named).otlp_traces_endpoint == named
    names = ("--served-model-name", "docs", "--served-model-name", "numbers")
    both = settings("--model", "pydoc", "--model", "table:512", *names, "--alias", "d=docs", "--alias", "n=numbers")
    assert both.models == {"docs": "pydoc", "numbers": "table:512"}
    assert both.aliases == {"d": "docs", "n": "numbers"}


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("--model", "a", "--model", "b", "--served-model-name", "x"), "--served-model-name"),
        (("--model", "a", "--model", "a"), "--served-model-name"),
        (("--model", "a", "--alias", "b"), "--alias b"),
        (("--model", "a", "--alias", "b=c"), "--alias b=c"),
        (("--model", "a", "--alias", "a=a"), "--alias a=a"),
        (("--model", "a", "--alias", "b=a", "--alias", "b=a"), "--alias b=a"),
        (("--model", "timed:step_ms=1", "--served-model-name", "llama"), "timed"),
        (("--model", "a", "--max-queue", "0"), "--max-queue"),
        (("--model", "a", "--max-queue", "-1"), "--max-queue"),
        (("--model", "a", "--max-queue", "many"), "--max-queue"),
        (("--model", "a", "--tool-call-parser", "herms"), "--tool-call-parser"),
        (("--model", "a", "--reasoning-parser", "qwen"), "--reasoning-parser"),
        (("--model", "a", "--otlp-traces-endpoint", "collector:4317"), "--otlp-traces-endpoint"),
    ],
)
def test_wrong_options_are_refused_by_name(
    arguments: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        settings(*arguments)
    assert option in capsys.readouterr().err


def test_it_logs_when_it_is_ready_and_stops_in_order(redis: EmbeddedRedis) -> None:
    with service_process("gateway", "--model", "pydoc", "--port", "0", "--redis-url", redis.url) as gateway:
        assert gateway.address.startswith("http://127.0.0.1:")
        with pytest.raises(HTTPError) as answer, urllib.request.urlopen(f"{gateway.address}/health"):
            pass
        with answer.value as response:
            assert response.code == 503
        gateway.process.send_signal(signal.SIGTERM)
        _, log = gateway.process.communicate(timeout=20)
    assert gateway.process.returncode == 0
    assert "Traceback" not in log


@pytest.mark.parametrize("wrong", ["--port", "no model at", "chat template", "Redis"])
def test_a_gateway_that_cannot_start_says_why_in_one_line(wrong: str, redis: EmbeddedRedis, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(resolve_model("pydoc")) / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    model = {"no model at": "/no/such/model", "chat template": str(tmp_path)}.get(wrong, "pydoc")
    url = "redis://127.0.0.1:1/0" if wrong == "Redis" else redis.url
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1] if wrong == "--port" else 0)
        command = [sys.executable, "-m", "paceline_services.gateway", "--model", model, "--port", port]
        ran = subprocess.run([*command, "--redis-url", url], stderr=subprocess.PIPE, text=True, timeout=30)
    assert ran.returncode == 2
    assert len(ran.stderr.splitlines()) == 1, ran.stderr
    assert wrong in ran.stderr

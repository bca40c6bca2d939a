"""`paceline serve` with real services and fake models: it restarts services, and stops them in order."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator, Sequence

import httpx
import pytest
from typer.testing import CliRunner

from paceline.cli import main
from tests.helpers.served import serving

PAIR = '{"method": "draft_model", "model": "table:256:0.3"}'
BODY = {"prompt": "1 2 3", "max_tokens": 64, "temperature": 0, "speculation_stats": True}
LONG = BODY | {"max_tokens": 2000, "stream": True}


def test_serves_restarts_and_stops() -> None:
    with serving("table:256", "--port", "0", "--speculative-config", PAIR) as served:
        url = served.wait_for(r"Serving table:256 at (\S+)")[1] + "/completions"

        def completion() -> str:
            answer = httpx.post(url, json=BODY, trust_env=False, timeout=30.0).raise_for_status().json()
            return str(answer["choices"][0]["text"])

        before = completion()
        [(arguments, draft)] = served.children("paceline_services.draft").items()
        os.kill(draft, signal.SIGKILL)
        assert completion() == before
        served.wait_for(r"draft-1-\w+ was ended by SIGKILL")
        served.wait_for(r"draft ready on")
        [(restarted, again)] = served.children("paceline_services.draft").items()
        assert again != draft
        assert re.findall(r"--port \d+", restarted) == re.findall(r"--port \d+", arguments) != []
        assert completion() == before

        [redis] = served.children("redis-server").values()
        os.kill(redis, signal.SIGKILL)
        served.wait_for("the embedded Redis died and is started again")
        assert completion() == before

        pids = [pid for kind in ("services.", "redis-server") for pid in served.children(kind).values()]
        assert len(pids) == 4
        with httpx.stream("POST", url, json=LONG, trust_env=False, timeout=30.0) as response:
            chunks = response.iter_lines()
            next(chunks)
            served.process.send_signal(signal.SIGINT)
            assert len([line for line in chunks if '"finish_reason":"length"' in line]) == 1
        order = [served.wait_for(r"(gateway) stops|(target|draft) stopped|(serve) stopped") for _ in range(4)]
        assert [next(filter(None, found.groups())) for found in order] == ["gateway", "target", "draft", "serve"]
        assert served.process.wait() == 0
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


@pytest.fixture
def taken_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield str(listening.getsockname()[1])


TABLE = ("table:256", "--port", "0")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("/nowhere", "--port", "0"), "no model at /nowhere"),
        ((*TABLE, "--speculative-config", '{"method": "draft_model", "model": "table:128"}'), "vocabularies of"),
        ((*TABLE, "--speculative-config", '{"method": "eagle3"}'), "method eagle3 needs `model`"),
        ((*TABLE, "--engine-config", '{"slot": 5}'), "slot: is not known here"),
        ((*TABLE, "--redis-url", "redis://127.0.0.1:1/0"), "Redis at redis://127.0.0.1:1/0 does not answer"),
        (("table:256", "--port", "TAKEN"), "cannot listen on 127.0.0.1:TAKEN"),
        # Only a service finds it, once its model process has started.
        (
            (
                *TABLE,
                "--speculative-config",
                '{"method": "custom", "speculator": "no.such", "draft_placement": "target"}',
            ),
            "speculator 'no.such' cannot be imported",
        ),
    ],
)
def test_an_impossible_deployment_ends_with_its_reason(
    arguments: Sequence[str], complaint: str, taken_port: str
) -> None:
    arguments = [each.replace("TAKEN", taken_port) for each in arguments]
    result = CliRunner().invoke(main, ["serve", *arguments])
    assert result.exit_code == 2
    assert complaint.replace("TAKEN", taken_port) in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output

"""The debug log of a real gateway holds no key, salt, prompt or password, and every response."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest

from paceline.api_keys import ApiKey, KeyFile, digest, new_key, write
from paceline.state.embedded_redis import EmbeddedRedis
from paceline.v1 import inference_pb2 as pb
from paceline.v1.inference_pb2_grpc import InferenceServiceStub

PROMPT, SALT, WRONG = "a-secret-prompt", "a-secret-salt", "pl-a-wrong-key"
OPTIONS = ("--model", "pydoc", "--port", "0", "--log-level", "debug")


def ask(url: str, key: str) -> int:
    body = json.dumps({"prompt": PROMPT, "cache_salt": SALT}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"authorization": f"Bearer {key}"})
    with pytest.raises(urllib.error.HTTPError) as answer, urllib.request.urlopen(request):
        pass
    with answer.value as response:
        return int(response.code)


def test_nothing_secret_is_logged(tmp_path: Path) -> None:
    key = new_key()
    write(tmp_path / "keys.json", KeyFile(keys=(ApiKey(name="alice", sha256=digest(key)),)))
    with EmbeddedRedis() as redis:
        arguments = ("--api-keys", str(tmp_path / "keys.json"), "--redis-url", redis.url)
        command = [sys.executable, "-m", "paceline_services.gateway", *OPTIONS, *arguments]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            lines = []
            while "gateway ready on " not in (line := process.stderr.readline()):
                assert line, "the gateway did not start"
                lines.append(line)
            url = line.split("ready on ")[1].split()[0]
            assert ask(url, key) == 503, "accepted, but there is no target"
            assert ask(url, WRONG) == 401
            with grpc.insecure_channel(line.split("grpc=")[1].strip()) as channel:
                for each in (key, WRONG):
                    call = InferenceServiceStub(channel).Generate(
                        pb.GenerateRequest(text=PROMPT, cache_salt=SALT), metadata=[("authorization", f"Bearer {each}")]
                    )
                    with pytest.raises(grpc.RpcError):
                        next(call)
            process.terminate()
            log = "".join(lines) + process.stderr.read()
            assert process.wait(20) == 0
    assert "DEBUG" in log
    assert "key=alice path=/v1/completions status=503" in log
    for secret in (key, digest(key), PROMPT, SALT, WRONG):
        assert secret not in log

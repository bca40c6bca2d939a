"""How target and draft workers start, refuse to start, and stop; and what a gateway's log must not tell."""

import argparse
import asyncio
import json
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from paceline.api_keys import ApiKey, KeyFile, digest, new_key, write
from paceline.ipc.model_process import ModelProcessDiedError
from paceline.ipc.pipe import Pipe
from paceline.launcher import StartError
from paceline.messages import FinishReason
from paceline.model_names import ModelNotFoundError
from paceline.state import open_store
from paceline.state.embedded_redis import EmbeddedRedis
from paceline.v1 import draft_pb2, draft_pb2_grpc
from paceline.v1 import inference_pb2 as pb
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from paceline.wire.channels import SUBMIT_FRAME_BYTES, server_options
from paceline.wire.link_errors import TargetEngineDied, TargetLost
from paceline_services import model_entrypoint
from paceline_services.draft import __main__ as draft
from paceline_services.draft import speculator_process
from paceline_services.gateway import __main__ as gateway
from paceline_services.target import __main__ as target
from paceline_services.target import engine_process
from tests.helpers.head_checkpoints import eagle3_tensors, llama_config, save_head, save_target
from tests.helpers.service_processes import ServiceProcess, model_process_of, service_process
from tests.helpers.targets import NEVER_ENDS, collect, generation_request, link_to
from tests.helpers.workers import target as drafting_target
from tests.helpers.workers import until

MAINS = {"target": target.main, "draft": draft.main, "gateway": gateway.main}
PARSERS = {"target": target.parse_options, "draft": draft.parse_options}
MODEL_PROCESSES = {"target": engine_process.serve_engine, "draft": speculator_process.serve_speculator}
TABLE = ("--model", "table:1000")
LONG = 1000
SPECULATIVE = "--speculative-config"
NGRAM = (SPECULATIVE, '{"method": "ngram"}')
RECORDING = '{"method": "custom", "speculator": "tests.helpers.workers.recording_speculator"}'


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A service configures the root logger of its process, which here is the test's."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """A pipe whose other end is not read."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Pipe(ours)


def start_error(service: str, arguments: Sequence[str], pipe: Pipe) -> str:
    """Return why this service's model process does not start with these arguments; it runs in this process."""
    with pytest.raises((StartError, ModelNotFoundError)) as error:
        MODEL_PROCESSES[service](pipe, PARSERS[service](arguments))
    return str(error.value)


def draft_model(name: str, **more: str) -> str:
    return json.dumps({"method": "draft_model", "model": name, **more})


@pytest.mark.parametrize(
    ("service", "arguments", "advice"),
    [
        ("target", ("--model", "/no/such/folder"), "no model at /no/such/folder: a model is a GGUF file"),
        ("target", ("--model", "table:none"), "'table:none'"),
        (
            "target",
            (*TABLE, SPECULATIVE, draft_model("table:999", draft_placement="target")),
            "table:999 and table:1000 have different vocabularies",
        ),
        (
            "draft",
            (SPECULATIVE, draft_model("table:9", vocabulary_mapping="intersection")),
            "--target-model is needed for a vocabulary_mapping",
        ),
        (
            "draft",
            ("--target-model", "table:1000", SPECULATIVE, draft_model("table:5", vocabulary_mapping="intersection")),
            "the vocabularies of table:1000 and its draft table:5 have only 5 tokens in common: choose another draft",
        ),
        (
            "draft",
            (SPECULATIVE, '{"method": "pool"}'),
            "method pool is for targets: give this draft worker a method or a model",
        ),
        (
            "draft",
            (SPECULATIVE, '{"method": "custom", "speculator": "no.such.factory"}'),
            "speculator 'no.such.factory' cannot be imported",
        ),
    ],
)
def test_a_model_process_that_cannot_start_reports_what_to_do(
    service: str, arguments: Sequence[str], advice: str, pipe: Pipe
) -> None:
    assert advice in start_error(service, arguments, pipe)


@pytest.mark.parametrize(
    ("service", "named", "complaint"),
    [
        ("draft", {"method": "eagle3"}, "the eagle3 speculator cannot be built: "),
        ("draft", {}, "the speculator cannot be built: "),
        ("target", {}, "the speculator cannot be built: "),
    ],
    ids=["named", "detected", "detected by the target"],
)
def test_a_head_that_cannot_be_read(
    service: str, named: dict[str, str], complaint: str, tmp_path: Path, pipe: Pipe
) -> None:
    """The error is one line that names the head."""
    target = save_target(tmp_path / "target")
    head = save_head(tmp_path / "head", eagle3_tensors(), llama_config(eagle_aux_hidden_state_layer_ids=[2, 16, 29]))
    if not named:
        (head / "model.safetensors").write_bytes(b"short")
    option = "--model" if service == "target" else "--target-model"
    speculation = json.dumps({"model": str(head), **named})
    [line] = start_error(service, (option, str(target), SPECULATIVE, speculation), pipe).splitlines()
    assert str(head) in line
    assert complaint in line
    assert (
        "needs the states of layers [2, 16, 29], target has 8" if named else "model.safetensors cannot be read"
    ) in line


@pytest.mark.parametrize(
    ("service", "arguments", "complaint"),
    [
        ("draft", (SPECULATIVE, '{"method": "nope"}'), "method: must be one of"),
        ("draft", (SPECULATIVE, '{"metod": "ngram"}'), "metod: is not known here"),
        ("draft", (SPECULATIVE, "{"), "is not valid JSON"),
        ("gateway", ("--model", "pydoc", "--redis-url", "redis://x", "--max-queue", "0"), "must be 1 or more"),
        ("target", (*TABLE, "--tls-cert", "a.crt", "--tls-key", "a.key"), "--tls-ca must be given, too"),
        ("target", (*TABLE, "--redis-url", "redis://127.0.0.1:9"), "127.0.0.1:9"),
        ("target", (*TABLE, "--port", "TAKEN"), "TAKEN"),
        ("draft", (*NGRAM, "--metrics-port", "TAKEN"), "TAKEN"),
    ],
)
def test_a_service_that_cannot_start_reports_what_to_do(
    service: str,
    arguments: Sequence[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        taken = str(listening.getsockname()[1])
        monkeypatch.setattr(sys, "argv", [service, *(each.replace("TAKEN", taken) for each in arguments)])
        with pytest.raises(SystemExit, match="2"):
            sys.exit(MAINS[service]())
    log = capsys.readouterr().err
    assert complaint.replace("TAKEN", taken) in log
    assert "Traceback" not in log


async def test_sigterm_lets_a_running_request_finish() -> None:
    """The target announces on its links, in the registry and by its health that it drains. Both workers exit with 0."""
    with (
        EmbeddedRedis() as redis,
        service_process("draft", *NGRAM) as drafting,
        service_process("target", *TABLE, *NGRAM, "--redis-url", redis.url, "--metrics-port", "0") as decoding,
    ):
        health = f"{decoding.metrics_url.removesuffix('metrics')}health"
        async with open_store(redis.url) as store, link_to(decoding.address) as link, httpx.AsyncClient() as http:
            [registered] = await store.registry.workers("target")
            assert registered.load["draining"] == 0.0
            assert registered.load["rows_per_s"] > 0.0
            assert (await http.get(health)).status_code == 200
            deltas = link.submit(generation_request(max_tokens=2000, draft_addresses=[drafting.address]))
            first = await anext(deltas)
            for service in (decoding, drafting):
                service.process.send_signal(signal.SIGTERM)
            await until(lambda: link.draining)
            assert (await http.get(health)).status_code == 503
            while not registered.load["draining"]:  # one heartbeat, sent at once
                [registered] = await store.registry.workers("target")
            rest = [delta async for delta in deltas]
            assert len(first.tokens) + sum(len(delta.tokens) for delta in rest) == 2000
            assert rest[-1].finish_reason is FinishReason.LENGTH
            for service in (decoding, drafting):
                assert await asyncio.to_thread(service.process.wait, 60) == 0
            await link.wait_lost()
            assert await store.registry.workers("target") == []


@pytest.mark.parametrize(("number", "lost"), [(signal.SIGABRT, TargetEngineDied), (signal.SIGKILL, TargetLost)])
async def test_requests_are_lost_with_the_engine(
    number: signal.Signals, lost: type[TargetLost], caplog: pytest.LogCaptureFixture
) -> None:
    """At once, not after --drain-s. The service fails too, so that it is restarted; gateways replay the requests.

    An engine that was killed did not die of a request.
    """
    stop = asyncio.Event()
    options = target.parse_options([*TABLE, "--drain-s", "3600"])
    async with served(target.serve(options, stop), caplog) as (service, address), link_to(address) as link:
        deltas = link.submit(generation_request(max_tokens=NEVER_ENDS))
        await anext(deltas)
        engine = model_process_of("target")
        os.kill(engine, signal.SIGSTOP)
        stop.set()
        await until(lambda: link.draining)
        os.kill(engine, number)
        os.kill(engine, signal.SIGCONT)
        with pytest.raises(TargetLost) as error:
            async for _ in deltas:
                pass
        assert error.type is lost
        with pytest.raises(ModelProcessDiedError, match=f"ended with exit code {-number}"):
            await service


async def test_an_engine_that_hangs_ends_its_target() -> None:
    """The service still answers pings, so no peer could detect it. A dead target is replaced.

    Only the engine is bound to its cores.
    """
    before = os.sched_getaffinity(0)
    bound = ("--engine-config", f'{{"cpus": [{min(before)}]}}')
    with service_process("target", *TABLE, *bound, "--hang-s", "1") as running:
        engine = model_process_of("target", running.process.pid)
        assert os.sched_getaffinity(engine) == {min(before)}
        assert os.sched_getaffinity(running.process.pid) == before
        async with asyncio.timeout(120), link_to(running.address) as link:
            deltas = link.submit(generation_request(max_tokens=NEVER_ENDS))
            await anext(deltas)
            os.kill(engine, signal.SIGSTOP)
            with pytest.raises(TargetEngineDied):
                async for _ in deltas:
                    pass
        assert await asyncio.to_thread(running.process.wait, 60) == 1


async def test_a_draft_worker_fails_with_its_speculator(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        served(draft.serve(draft.parse_options(NGRAM), asyncio.Event()), caplog) as (service, address),
        drafting_target() as here,
    ):
        assert await answer_to_a_large_frame(address) is grpc.StatusCode.RESOURCE_EXHAUSTED
        await here.open(1, address)
        os.kill(model_process_of("draft"), signal.SIGKILL)
        assert await here.lost() == [1]
        with pytest.raises(ModelProcessDiedError, match="ended with exit code -9"):
            await service


def test_a_model_process_that_fails_logs_its_traceback(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Pipe(ours).send(draft.parse_options(NGRAM))
        monkeypatch.setattr(sys, "argv", ["speculator_process", str(theirs.detach())])
        monkeypatch.setattr(signal, "signal", lambda *arguments: None)  # this process keeps its handlers

        def broken(pipe: Pipe, options: argparse.Namespace) -> None:
            raise ZeroDivisionError

        assert model_entrypoint.run_model_process("draft", broken) == 1
    assert "ZeroDivisionError" in capfd.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_a_model_process_ends_with_its_service(number: signal.Signals, code: int) -> None:
    """Also while the model loads, when it does not read its pipe."""
    slow = '{"method": "custom", "speculator": "tests.helpers.workers.endless_loading"}'
    service = ServiceProcess("draft", SPECULATIVE, slow)
    assert service.process.stderr is not None
    try:
        assert "loading for ever" in service.process.stderr.readline()
        service.process.send_signal(number)
        assert "Traceback" not in service.process.stderr.read()  # returns when no process can write to it
        assert service.process.wait(60) == code
    finally:
        service.stop()


@pytest.mark.parametrize(
    "method", ['{"method": "pool"}', pytest.param(RECORDING, marks=pytest.mark.slow)], ids=["pool", "the same settings"]
)
async def test_a_speculator_that_asks_for_hidden_states_gets_them(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The target learns from the draft worker what to send, whatever its own settings."""
    stop = asyncio.Event()
    draft_options = draft.parse_options([SPECULATIVE, RECORDING, "--metrics-port", "0"])
    target_options = target.parse_options([*TABLE, SPECULATIVE, method])
    async with (
        served(draft.serve(draft_options, stop), caplog) as (drafting, draft_address),
        served(target.serve(target_options, stop), caplog) as (decoding, target_address),
        link_to(target_address) as link,
    ):
        assert await answer_to_a_large_frame(draft_address) is grpc.StatusCode.INVALID_ARGUMENT
        plain, _ = await collect(link, generation_request("plain", plain=True, max_tokens=LONG))
        await collect(link, generation_request("connects to the draft", draft_addresses=[draft_address]))
        await until(lambda: f"at {draft_address} is up" in caplog.text)
        tokens, last = await collect(
            link, generation_request("drafted", draft_addresses=[draft_address], max_tokens=LONG)
        )
        assert tokens == plain
        assert last.speculation is not None
        assert len(last.speculation.drafts) == 1, "the draft drops a request with a gap in its hidden states"
        [url] = [line.split()[-1] for line in caplog.messages if "metrics on" in line]
        metrics = (await asyncio.to_thread(httpx.get, url)).text
        [nodes] = [line.split()[-1] for line in metrics.splitlines() if line.startswith("paceline_draft_nodes_total")]
        assert float(nodes) > 0, "it drafts only for requests with all hidden states"
        stop.set()
        await asyncio.gather(drafting, decoding)


PROMPT, SALT, WRONG = "a-secret-prompt", "a-secret-salt", "pl-a-wrong-key"


def test_a_gateways_debug_log_has_every_response_and_nothing_secret(tmp_path: Path) -> None:
    key = new_key()
    write(tmp_path / "keys.json", KeyFile(keys=(ApiKey(name="alice", sha256=digest(key)),)))
    options = ("--model", "pydoc", "--port", "0", "--log-level", "debug", "--api-keys", str(tmp_path / "keys.json"))
    with EmbeddedRedis() as redis, service_process("gateway", *options, "--redis-url", redis.url) as running:
        [address] = re.findall(r"grpc=(\S+)", running.log)
        request = pb.GenerateRequest(text=PROMPT, cache_salt=SALT)
        with grpc.insecure_channel(address) as channel:
            for each, status in ((key, 503), (WRONG, 401)):  # the first is accepted, but there is no target
                headers = {"authorization": f"Bearer {each}"}
                body = {"prompt": PROMPT, "cache_salt": SALT}
                answer = httpx.post(f"{running.address}/v1/completions", json=body, headers=headers, trust_env=False)
                assert answer.status_code == status
                with pytest.raises(grpc.RpcError):
                    next(InferenceServiceStub(channel).Generate(request, metadata=list(headers.items())))
        running.process.terminate()
        assert running.process.stderr is not None
        log = running.log + running.process.stderr.read()
        assert running.process.wait(20) == 0
    assert "DEBUG" in log
    assert "key=alice path=/v1/completions status=503" in log
    for secret in (key, digest(key), PROMPT, SALT, WRONG):
        assert secret not in log


async def answer_to_a_large_frame(address: str) -> grpc.StatusCode:
    """A draft that needs no hidden states refuses it by its size. Another complains about the id, which is 0."""
    large = draft_pb2.DraftFrame.Open(token_ids=[2**31] * (SUBMIT_FRAME_BYTES // 4))
    async with grpc.aio.insecure_channel(address, options=server_options()) as channel:
        call = draft_pb2_grpc.DraftServiceStub(channel).Grow(iter([draft_pb2.DraftFrame(opens=[large])]))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        return error.value.code()


@asynccontextmanager
async def served(
    serving: Coroutine[Any, Any, None], caplog: pytest.LogCaptureFixture
) -> AsyncIterator[tuple[asyncio.Task[None], str]]:
    """A service in this process, and its address."""
    caplog.set_level(logging.INFO)
    logged = len(caplog.messages)
    service = asyncio.create_task(serving)
    try:
        await until(lambda: service.done() or any("ready on" in line for line in caplog.messages[logged:]))
        yield service, next(line.split()[-1] for line in caplog.messages[logged:] if "ready on" in line)
    finally:
        service.cancel()
        await asyncio.wait([service])

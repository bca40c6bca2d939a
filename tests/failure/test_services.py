"""How target and draft workers start, refuse to start, and stop."""

import argparse
import asyncio
import json
import logging
import os
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

from paceline.core.messages import FinishReason
from paceline.ipc.model_process import ModelProcessDiedError
from paceline.ipc.pipe import Pipe
from paceline.launcher import StartError
from paceline.model_names import ModelNotFoundError
from paceline.state import open_store
from paceline.state.embedded_redis import EmbeddedRedis
from paceline.v1 import draft_pb2, draft_pb2_grpc
from paceline.wire.channels import SUBMIT_FRAME_BYTES, server_options
from paceline.wire.link_errors import TargetEngineDied
from paceline_services import model_entrypoint
from paceline_services.draft import __main__ as draft
from paceline_services.draft import speculator_process
from paceline_services.gateway import __main__ as gateway
from paceline_services.target import __main__ as target
from paceline_services.target import engine_process
from tests.helpers.head_checkpoints import eagle3_tensors, llama_config, save_head, save_target
from tests.helpers.service_processes import ServiceProcess, model_process_of, service_process
from tests.helpers.targets import NEVER_ENDS, collect, link_to, submission
from tests.helpers.workers import target as drafting_target
from tests.helpers.workers import until

MAINS = {"target": target.main, "draft": draft.main, "gateway": gateway.main}
PARSERS = {"target": target.parse_options, "draft": draft.parse_options}
MODEL_PROCESSES = {"target": engine_process.serve_engine, "draft": speculator_process.serve_speculator}
TABLE = ("--model", "table:1000")
LONG = 1000
NGRAM = ("--speculative-config", '{"method": "ngram"}')
RECORDING = '{"method": "custom", "speculator": "tests.helpers.workers.recording_speculator"}'
REQUIRED = {"target": TABLE, "draft": NGRAM}


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A service configures the root logger of its process, which here is the test's."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def start(monkeypatch: pytest.MonkeyPatch, service: str, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [service, *arguments])
    return MAINS[service]()


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


NO_MODEL = ("target", ("--model", "/no/such/folder"), "no model at /no/such/folder: a model is a folder")


@pytest.mark.parametrize(
    ("service", "arguments", "advice"),
    [
        NO_MODEL,
        ("target", ("--model", "table:none"), "'table:none'"),
        (
            "target",
            (
                *TABLE,
                "--speculative-config",
                '{"method": "draft_model", "model": "table:999", "draft_placement": "target"}',
            ),
            "table:999 and table:1000 have different vocabularies",
        ),
        (
            "draft",
            (
                "--speculative-config",
                '{"method": "draft_model", "model": "table:9", "vocabulary_mapping": "intersection"}',
            ),
            "--target-model is needed for a vocabulary_mapping",
        ),
        (
            "draft",
            (
                *("--target-model", "table:1000", "--speculative-config"),
                '{"method": "draft_model", "model": "table:5", "vocabulary_mapping": "intersection"}',
            ),
            "the vocabularies of table:1000 and its draft table:5 have only 5 tokens in common: choose another draft",
        ),
        (
            "draft",
            ("--speculative-config", '{"method": "pool"}'),
            "method pool is for targets: give this draft worker a method or a model",
        ),
        (
            "draft",
            ("--speculative-config", '{"method": "custom", "speculator": "no.such.factory"}'),
            "speculator 'no.such.factory' cannot be imported",
        ),
    ],
)
def test_a_model_process_that_cannot_start_reports_what_to_do(
    service: str, arguments: Sequence[str], advice: str, pipe: Pipe
) -> None:
    assert advice in start_error(service, arguments, pipe)


@pytest.mark.parametrize(
    ("service", "arguments", "advice"),
    [NO_MODEL, ("target", (*TABLE, "--redis-url", "redis://127.0.0.1:9"), "127.0.0.1:9")],
)
def test_a_service_that_cannot_start_reports_what_to_do(
    service: str,
    arguments: Sequence[str],
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The reason comes from its model process, or from the service itself."""
    assert start(monkeypatch, service, *arguments) == 2
    log = capsys.readouterr().err
    assert advice in log
    assert "Traceback" not in log


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
    speculation = json.dumps({"model": str(head), **named})
    option = "--model" if service == "target" else "--target-model"
    [line] = start_error(service, (option, str(target), "--speculative-config", speculation), pipe).splitlines()
    assert str(head) in line
    assert complaint in line
    assert (
        "needs the states of layers [2, 16, 29], target has 8" if named else "model.safetensors cannot be read"
    ) in line


@pytest.mark.parametrize(
    ("service", "option"),
    [
        ("target", "--port"),
        ("draft", "--metrics-port"),
        pytest.param("target", "--metrics-port", marks=pytest.mark.slow),
        pytest.param("draft", "--port", marks=pytest.mark.slow),
    ],
)
def test_a_port_that_is_taken(
    service: str,
    option: str,
    taken_port: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert start(monkeypatch, service, *REQUIRED[service], option, str(taken_port)) == 2
    assert f"{taken_port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("service", "arguments", "complaint"),
    [
        ("draft", ("--speculative-config", '{"method": "nope"}'), "method: must be one of"),
        ("draft", ("--speculative-config", '{"metod": "ngram"}'), "metod: is not known here"),
        ("draft", ("--speculative-config", "{"), "is not valid JSON"),
        *(
            ("gateway", ("--model", "pydoc", "--redis-url", "redis://x", "--max-queue", count), "must be 1 or more")
            for count in ("0", "-1")
        ),
    ],
)
def test_an_invalid_option_is_named(
    service: str,
    arguments: Sequence[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        start(monkeypatch, service, *arguments)
    assert complaint in capsys.readouterr().err


async def test_sigterm_lets_a_running_request_finish() -> None:
    """Real processes without a registry: the target connects to the draft that the request names. Both exit with 0."""
    with service_process("target", *TABLE, *NGRAM) as decoding, service_process("draft", *NGRAM) as drafting:
        async with link_to(decoding.address) as link:
            deltas = link.submit(submission(max_tokens=2000, drafts=[drafting.address]))
            first = await anext(deltas)
            for service in (decoding, drafting):
                service.process.send_signal(signal.SIGTERM)
            await until(lambda: link.draining)
            rest = [delta async for delta in deltas]
            assert len(first.tokens) + sum(len(delta.tokens) for delta in rest) == 2000
            assert rest[-1].finish_reason is FinishReason.LENGTH
            for service in (decoding, drafting):
                assert await asyncio.to_thread(service.process.wait, 60) == 0
            await link.wait_lost()


async def test_a_draining_target_announces_it(caplog: pytest.LogCaptureFixture) -> None:
    """On its links, in the registry and by its health, until its requests have finished."""
    stop = asyncio.Event()
    with EmbeddedRedis() as redis:
        options = target.parse_options([*TABLE, "--redis-url", redis.url, "--metrics-port", "0"])
        async with (
            open_store(redis.url) as store,
            served(target.serve(options, stop), caplog) as (service, address),
            link_to(address) as link,
        ):
            health = f"{metrics_url(caplog).removesuffix('metrics')}health"
            [registered] = await store.registry.workers("target")
            assert registered.load["draining"] == 0.0
            assert registered.load["rows_per_s"] > 0.0
            deltas = link.submit(submission(max_tokens=2000))
            await anext(deltas)
            assert (await asyncio.to_thread(httpx.get, health)).status_code == 200
            stop.set()
            await until(lambda: link.draining)
            assert (await asyncio.to_thread(httpx.get, health)).status_code == 503
            while not registered.load["draining"]:  # one heartbeat, sent at once
                [registered] = await store.registry.workers("target")
            assert sum([len(delta.tokens) async for delta in deltas]) > 1900
            await service
            assert await store.registry.workers("target") == []


@pytest.mark.parametrize("draining", [False, True], ids=["serving", "draining"])
async def test_requests_are_lost_with_the_engine(draining: bool, caplog: pytest.LogCaptureFixture) -> None:
    """At once, not after --drain-s. The service fails too, so that it is restarted; gateways replay the requests."""
    stop = asyncio.Event()
    options = target.parse_options([*TABLE, "--drain-s", "3600"])
    async with served(target.serve(options, stop), caplog) as (service, address), link_to(address) as link:
        deltas = link.submit(submission(max_tokens=NEVER_ENDS))
        await anext(deltas)
        engine = model_process_of("target")
        if draining:
            os.kill(engine, signal.SIGSTOP)
            stop.set()
            await until(lambda: link.draining)
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(TargetEngineDied):
            async for _ in deltas:
                pass
        with pytest.raises(ModelProcessDiedError, match="ended with exit code -9"):
            await service


async def test_a_draft_worker_fails_with_its_speculator(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        served(draft.serve(draft.parse_options(NGRAM), asyncio.Event()), caplog) as (service, address),
        drafting_target() as here,
    ):
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


async def test_only_the_engine_is_bound_to_its_cores(caplog: pytest.LogCaptureFixture) -> None:
    before = os.sched_getaffinity(0)
    bound = ("--engine-config", f'{{"cpus": [{min(before)}]}}')
    async with served(target.serve(target.parse_options([*TABLE, *bound]), asyncio.Event()), caplog):
        assert os.sched_getaffinity(model_process_of("target")) == {min(before)}
        assert os.sched_getaffinity(0) == before


def test_sigterm_while_the_model_loads() -> None:
    slow = '{"method": "custom", "speculator": "tests.helpers.workers.endless_loading"}'
    process = ServiceProcess("draft", "--speculative-config", slow).process
    assert process.stderr is not None
    try:
        assert "loading for ever" in process.stderr.readline()
        process.terminate()
        assert process.wait(60) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("service", PARSERS)
def test_a_model_process_ends_with_its_service(service: str) -> None:
    """Also if the service is killed."""
    with service_process(service, *REQUIRED[service]) as running:
        assert model_process_of(service, running.process.pid)
        running.process.kill()
        assert running.process.stderr is not None
        running.process.stderr.read()  # returns when no process can write to it


async def test_an_engine_that_hangs_ends_its_target() -> None:
    """The service still answers pings, so no peer could detect it. A dead target is replaced."""
    with service_process("target", *TABLE, "--hang-s", "1") as running:
        async with asyncio.timeout(120), link_to(running.address) as link:
            deltas = link.submit(submission(max_tokens=NEVER_ENDS))
            await anext(deltas)
            os.kill(model_process_of("target", running.process.pid), signal.SIGSTOP)
            with pytest.raises(TargetEngineDied):
                async for _ in deltas:
                    pass
        assert await asyncio.to_thread(running.process.wait, 60) == 1


@pytest.mark.parametrize("method", [RECORDING, '{"method": "pool"}'], ids=["the same settings", "pool"])
async def test_a_speculator_that_asks_for_hidden_states_gets_them(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The target learns from the draft worker what to send, whatever its own settings."""
    stop = asyncio.Event()
    draft_options = draft.parse_options(["--speculative-config", RECORDING, "--metrics-port", "0"])
    target_options = target.parse_options([*TABLE, "--speculative-config", method])
    async with (
        served(draft.serve(draft_options, stop), caplog) as (drafting, draft_address),
        served(target.serve(target_options, stop), caplog) as (decoding, target_address),
        link_to(target_address) as link,
    ):
        plain, _ = await collect(link, submission("plain", plain=True, max_tokens=LONG))
        await collect(link, submission("connects to the draft", drafts=[draft_address]))
        await until(lambda: f"at {draft_address} is up" in caplog.text)
        tokens, last = await collect(link, submission("drafted", drafts=[draft_address], max_tokens=LONG))
        assert tokens == plain
        assert last.speculation is not None
        assert len(last.speculation.drafts) == 1, "the draft drops a request with a gap in its hidden states"
        metrics = (await asyncio.to_thread(httpx.get, metrics_url(caplog))).text
        [nodes] = [line.split()[-1] for line in metrics.splitlines() if line.startswith("paceline_draft_nodes_total")]
        assert float(nodes) > 0, "it drafts only for requests with all hidden states"
        stop.set()
        await asyncio.gather(drafting, decoding)


@pytest.mark.parametrize(
    ("method", "code"),
    [('{"method": "ngram"}', grpc.StatusCode.RESOURCE_EXHAUSTED), (RECORDING, grpc.StatusCode.INVALID_ARGUMENT)],
    ids=["token ids only", "hidden states"],
)
async def test_only_a_draft_that_needs_hidden_states_accepts_large_frames(
    method: str, code: grpc.StatusCode, caplog: pytest.LogCaptureFixture
) -> None:
    """Others refuse the frame by its size. A draft that accepts it complains about the request id, which is 0."""
    stop = asyncio.Event()
    large = draft_pb2.DraftFrame.Open(token_ids=[2**31] * (SUBMIT_FRAME_BYTES // 4))
    async with (
        served(draft.serve(draft.parse_options(["--speculative-config", method]), stop), caplog) as (drafting, address),
        grpc.aio.insecure_channel(address, options=server_options()) as channel,
    ):
        call = draft_pb2_grpc.DraftServiceStub(channel).Grow(iter([draft_pb2.DraftFrame(opens=[large])]))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert error.value.code() is code
        stop.set()
        await drafting


def metrics_url(caplog: pytest.LogCaptureFixture) -> str:
    """Return the URL of the one service that has a metrics port."""
    [url] = [line.split()[-1] for line in caplog.messages if "metrics on" in line]
    return url


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

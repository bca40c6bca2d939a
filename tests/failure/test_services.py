"""How the target and draft services start, refuse to start, and stop."""

import argparse
import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from paceline.core.messages import FinishReason
from paceline.ipc.model_process import ModelProcessDiedError
from paceline.ipc.pipe import Pipe
from paceline.model_names import ModelNotFoundError
from paceline.state import open_store
from paceline.state.embedded_redis import EmbeddedRedis
from paceline.v1 import draft_pb2, draft_pb2_grpc
from paceline.wire.channels import SUBMIT_FRAME_BYTES, server_options
from paceline.wire.link_errors import TargetEngineDied
from paceline.wire.target_link import TargetLink
from paceline_services import model_entrypoint
from paceline_services.draft import __main__ as draft
from paceline_services.draft import speculator_process as draft_compute
from paceline_services.gateway import __main__ as gateway
from paceline_services.service_entrypoint import ServiceStartError
from paceline_services.target import __main__ as target
from paceline_services.target import engine_process as target_compute
from tests.helpers.head_checkpoints import eagle3_tensors, llama_config, save_head, save_target
from tests.helpers.targets import NEVER_ENDS, collect, submission
from tests.helpers.workers import opening, until
from tests.helpers.workers import target as drafted

MAINS = {"target": target.main, "draft": draft.main}
PARSERS = {"target": target.parse_options, "draft": draft.parse_options}
COMPUTES = {"target": target_compute.serve_engine, "draft": draft_compute.serve_speculator}
TABLE = ("--model", "table:1000")
LONG = 1000
NGRAM = ("--speculative-config", '{"method": "ngram"}')


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A service takes over the root logger of its process, which here is the test's."""
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
    """Nobody is at its other end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Pipe(ours)


def refusal(service: str, arguments: Sequence[str], pipe: Pipe) -> str:
    """Why this service's compute does not begin with these arguments, in this process."""
    with pytest.raises((ServiceStartError, ModelNotFoundError)) as refused:
        COMPUTES[service](pipe, PARSERS[service](arguments))
    return str(refused.value)


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
            "method pool is for targets; say with which method or model this one drafts",
        ),
        (
            "draft",
            ("--speculative-config", '{"method": "custom", "speculator": "no.such.factory"}'),
            "speculator 'no.such.factory' cannot be imported",
        ),
    ],
)
def test_a_compute_that_cannot_begin_says_what_to_do(
    service: str, arguments: Sequence[str], advice: str, pipe: Pipe
) -> None:
    assert advice in refusal(service, arguments, pipe)


@pytest.mark.parametrize(
    ("service", "arguments", "advice"),
    [NO_MODEL, ("target", (*TABLE, "--redis-url", "redis://127.0.0.1:9"), "127.0.0.1:9")],
)
def test_a_service_that_cannot_start_says_what_to_do(
    service: str,
    arguments: Sequence[str],
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What its compute says, which is a process of its own, and what it finds out itself."""
    assert start(monkeypatch, service, *arguments) == 2
    said = capsys.readouterr().err
    assert advice in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("service", "said", "complaint"),
    [
        ("draft", {"method": "eagle3"}, "the eagle3 speculator cannot be built: "),
        ("draft", {}, "the speculator cannot be built: "),
        ("target", {}, "the speculator cannot be built: "),
    ],
    ids=["named", "found out", "found out by the target"],
)
def test_a_head_that_cannot_be_read(
    service: str, said: dict[str, str], complaint: str, tmp_path: Path, pipe: Pipe
) -> None:
    """One line."""
    target = save_target(tmp_path / "target")
    head = save_head(tmp_path / "head", eagle3_tensors(), llama_config(eagle_aux_hidden_state_layer_ids=[2, 16, 29]))
    if not said:
        (head / "model.safetensors").write_bytes(b"short")
    speculation = json.dumps({"model": str(head), **said})
    place = ("--model", str(target)) if service == "target" else ("--target-model", str(target))
    [line] = refusal(service, (*place, "--speculative-config", speculation), pipe).splitlines()
    assert str(head) in line
    assert complaint in line
    assert (
        "wants the states of layers [2, 16, 29], target has 8" if said else "model.safetensors cannot be read"
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
    arguments = TABLE if service == "target" else NGRAM
    assert start(monkeypatch, service, *arguments, option, str(taken_port)) == 2
    assert f"{taken_port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("json", "complaint"),
    [
        ('{"method": "nope"}', "method: must be one of"),
        ('{"metod": "ngram"}', "metod: is not known here"),
        ("{", "is not valid JSON"),
    ],
)
def test_settings_are_refused_by_name(
    json: str, complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        start(monkeypatch, "draft", "--speculative-config", json)
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("count", ["0", "-1"])
def test_a_limit_that_lets_nothing_in_is_refused(
    count: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", "pydoc", "--redis-url", "redis://nowhere", "--max-queue", count)
    monkeypatch.setattr(sys, "argv", ["gateway", *arguments])
    with pytest.raises(SystemExit, match="2"):
        gateway.main()
    assert "--max-queue: must be 1 or more" in capsys.readouterr().err


async def test_sigterm_lets_a_running_request_finish() -> None:
    """Real processes without a registry: the target reaches the draft that the request names. Both exit with 0."""
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"paceline_services.{service}", *arguments), stderr=asyncio.subprocess.PIPE
        )
        for service, arguments in (("target", (*TABLE, *NGRAM)), ("draft", NGRAM))
    ]
    try:
        async with asyncio.timeout(120):
            target_at, draft_at = [await ready(process) for process in processes]
        link = TargetLink(target_at)
        await link.connect()
        deltas = link.submit(submission(max_tokens=2000, drafts=[draft_at]))
        first = await anext(deltas)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        await until(lambda: link.draining)
        rest = [delta async for delta in deltas]
        assert len(first.tokens) + sum(len(delta.tokens) for delta in rest) == 2000
        assert rest[-1].finish_reason is FinishReason.LENGTH
        assert [await process.wait() for process in processes] == [0, 0]
        await link.wait_lost()
        await link.close()
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_everybody_is_told_that_a_target_drains_for_as_long_as_it_does(caplog: pytest.LogCaptureFixture) -> None:
    stop = asyncio.Event()
    with EmbeddedRedis() as redis:
        options = target.parse_options([*TABLE, "--redis-url", redis.url, "--metrics-port", "0"])
        async with (
            open_store(redis.url) as store,
            served(target.serve(options, stop), caplog) as (service, address),
            linked_to(address) as link,
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


async def test_requests_are_lost_with_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    """The service ends with it, so that both are started again; gateways replay elsewhere."""
    async with served(target.serve(target.parse_options(TABLE), asyncio.Event()), caplog) as (service, address):
        async with linked_to(address) as link:
            deltas = link.submit(submission(max_tokens=4000))
            await anext(deltas)
            os.kill(compute_of("paceline_services.target"), signal.SIGKILL)
            with pytest.raises(TargetEngineDied):
                async for _ in deltas:
                    pass
        with pytest.raises(ModelProcessDiedError, match="ended with exit code -9"):
            await service


async def test_an_engine_that_dies_while_it_drains(caplog: pytest.LogCaptureFixture) -> None:
    """What still ran is lost at once, not when the time for draining is up."""
    stop = asyncio.Event()
    patient = target.parse_options([*TABLE, "--drain-s", "3600"])
    async with served(target.serve(patient, stop), caplog) as (service, address), linked_to(address) as link:
        deltas = link.submit(submission(max_tokens=4000))
        await anext(deltas)
        engine = compute_of("paceline_services.target")
        os.kill(engine, signal.SIGSTOP)
        stop.set()
        await until(lambda: link.draining)
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(TargetEngineDied):
            async for _ in deltas:
                pass
        with pytest.raises(ModelProcessDiedError):
            await service


async def test_a_speculator_that_dies_ends_its_worker(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        served(draft.serve(draft.parse_options(NGRAM), asyncio.Event()), caplog) as (service, address),
        drafted() as here,
    ):
        await here.reach(address)
        here.drafting.open(opening(1), [address])
        here.drafting.flush()
        os.kill(compute_of("paceline_services.draft"), signal.SIGKILL)
        assert (await here.poll(lambda news: bool(news.lost))).lost == [1]
        with pytest.raises(ModelProcessDiedError, match="ended with exit code -9"):
            await service


def test_compute_that_fails_says_why(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that speaks only learns that the other one is gone; the traceback is in that one's log."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Pipe(ours).send(draft.parse_options(NGRAM))
        monkeypatch.setattr(sys, "argv", ["compute", str(theirs.detach())])
        monkeypatch.setattr(signal, "signal", lambda *arguments: None)  # this process keeps its own

        def broken(pipe: Pipe, options: argparse.Namespace) -> None:
            raise ZeroDivisionError

        assert model_entrypoint.run_model_process("draft", broken) == 1
    assert "ZeroDivisionError" in capfd.readouterr().err


async def test_a_target_is_bound_to_its_cores(caplog: pytest.LogCaptureFixture) -> None:
    before = os.sched_getaffinity(0)
    bound = ("--engine-config", f'{{"cpus": [{min(before)}]}}')
    async with served(target.serve(target.parse_options([*TABLE, *bound]), asyncio.Event()), caplog):
        assert os.sched_getaffinity(compute_of("paceline_services.target")) == {min(before)}
        assert os.sched_getaffinity(0) == before, "the process that speaks is not"


async def test_sigterm_while_the_model_loads() -> None:
    """Whoever changes their mind does not have to wait for a model that nobody wants."""
    slow = ("--speculative-config", '{"method": "custom", "speculator": "tests.helpers.workers.slow"}')
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "paceline_services.draft", *slow), stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(120):
            assert b"loading for ever" in await process.stderr.readline()
            process.terminate()
            assert await process.wait() == 0
            assert b"Traceback" not in await process.stderr.read()
    finally:
        if process.returncode is None:
            process.kill()


@pytest.mark.parametrize("service", MAINS)
async def test_compute_does_not_outlive_its_service(service: str) -> None:
    """Killed, the service can tell nobody; its compute notices by itself."""
    arguments = TABLE if service == "target" else NGRAM
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"paceline_services.{service}", *arguments), stderr=asyncio.subprocess.PIPE
    )
    await ready(process)
    assert compute_of(f"paceline_services.{service}", process.pid)
    process.kill()
    assert process.stderr is not None
    async with asyncio.timeout(120):
        await process.stderr.read()  # which ends when nobody is left who could write
    await process.wait()


async def test_an_engine_that_hangs_ends_its_target() -> None:
    """Its service answers every ping, so nobody else could know; as a dead target it is replaced."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "paceline_services.target", *TABLE, "--hang-s", "1"), stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(120), linked_to(await ready(process)) as link:
            engine = compute_of("target", process.pid)
            deltas = link.submit(submission(max_tokens=NEVER_ENDS))
            await anext(deltas)
            os.kill(engine, signal.SIGSTOP)
            with pytest.raises(TargetEngineDied):
                async for _ in deltas:
                    pass
            assert await process.wait() == 1
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("knows", [True, False], ids=["the same settings", "pool"])
async def test_a_speculator_that_asks_for_hidden_states_gets_them(
    knows: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The target learns from it what to send, whether or not it was told how it drafts."""
    stop = asyncio.Event()
    custom = ("--speculative-config", '{"method": "custom", "speculator": "tests.helpers.workers.witness"}')
    pool = custom if knows else ("--speculative-config", '{"method": "pool"}')
    async with (
        served(draft.serve(draft.parse_options([*custom, "--metrics-port", "0"]), stop), caplog) as (
            drafting,
            draft_at,
        ),
        served(target.serve(target.parse_options([*TABLE, *pool]), stop), caplog) as (decoding, target_at),
        linked_to(target_at) as link,
    ):
        plain, _ = await collect(link, submission("plain", plain=True, max_tokens=LONG))
        await collect(link, submission("so that the draft is reached", drafts=[draft_at]))
        await until(lambda: f"at {draft_at} is up" in caplog.text)
        tokens, last = await collect(link, submission("drafted", drafts=[draft_at], max_tokens=LONG))
        assert tokens == plain
        assert last.speculation is not None
        assert len(last.speculation.drafts) == 1, "a gap would have moved the request away"
        counted = (await asyncio.to_thread(httpx.get, metrics_url(caplog))).text
        [nodes] = [line.split()[-1] for line in counted.splitlines() if line.startswith("paceline_draft_nodes_total")]
        assert float(nodes) > 0, "it drafts only for requests of which it got every one"
        stop.set()
        await asyncio.gather(drafting, decoding)


@pytest.mark.parametrize(
    ("method", "code"),
    [
        ('{"method": "ngram"}', grpc.StatusCode.RESOURCE_EXHAUSTED),
        ('{"method": "custom", "speculator": "tests.helpers.workers.witness"}', grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=["token ids only", "hidden states"],
)
async def test_a_draft_takes_large_frames_only_if_it_is_fed_with_hidden_states(
    method: str, code: grpc.StatusCode, caplog: pytest.LogCaptureFixture
) -> None:
    """Else they are refused by their size; what is wrong with this one then is a request id of 0."""
    stop = asyncio.Event()
    large = draft_pb2.DraftFrame.Open(token_ids=[2**31] * (SUBMIT_FRAME_BYTES // 4))
    async with (
        served(draft.serve(draft.parse_options(["--speculative-config", method]), stop), caplog) as (drafting, address),
        grpc.aio.insecure_channel(address, options=server_options()) as channel,
    ):
        call = draft_pb2_grpc.DraftServiceStub(channel).Grow(iter([draft_pb2.DraftFrame(opens=[large])]))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is code
        stop.set()
        await drafting


def metrics_url(caplog: pytest.LogCaptureFixture) -> str:
    """Of the one service that has a metrics port."""
    [url] = [line.split()[-1] for line in caplog.messages if "metrics on" in line]
    return url


def compute_of(service: str, parent: int | None = None) -> int:
    """The process id of a service's compute."""
    lines = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(parent or os.getpid())],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    [line] = [line for line in lines if re.search(rf"{service}\.(engine|speculator)_process", line)]
    return int(line.split()[0])


@asynccontextmanager
async def served(
    serving: Coroutine[Any, Any, None], caplog: pytest.LogCaptureFixture
) -> AsyncIterator[tuple[asyncio.Task[None], str]]:
    """A service in this process, and its address."""
    caplog.set_level(logging.INFO)
    said = len(caplog.messages)
    service = asyncio.create_task(serving)
    try:
        await until(lambda: service.done() or any("ready on" in line for line in caplog.messages[said:]))
        yield service, next(line.split()[-1] for line in caplog.messages[said:] if "ready on" in line)
    finally:
        service.cancel()
        await asyncio.wait([service])


@asynccontextmanager
async def linked_to(address: str) -> AsyncIterator[TargetLink]:
    link = TargetLink(address)
    await link.connect()
    try:
        yield link
    finally:
        await link.close()


async def ready(process: asyncio.subprocess.Process) -> str:
    """The address of a service, once it is there."""
    assert process.stderr is not None
    while b"ready on" not in (line := await process.stderr.readline()):
        assert line, "the service ended before it was ready"
    return line.decode().split("ready on ")[1].split()[0]

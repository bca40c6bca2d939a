"""TLS over real sockets: who gets in, who does not, and certificates that are replaced while a stream runs."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import grpc
import httpx
import openai
import pytest

from paceline.launcher import StartError
from paceline.state.embedded_redis import EmbeddedRedis
from paceline.state.state_errors import StateError
from paceline.state.state_store import open_store
from paceline.state.worker_registry import WorkerRecord
from paceline.tls import Certificates
from paceline.v1 import inference_pb2 as pb
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from paceline.v1.target_pb2_grpc import TargetServiceStub
from paceline.wire.channels import DRAFT, GATEWAY, TARGET, open_channel
from paceline.wire.link_errors import TargetLost
from paceline_services.service_entrypoint import load_certificates
from tests.contract.proxies import Streams, proxy
from tests.helpers.certificates import Authority
from tests.helpers.openai_stack import RunningTarget, counts, open_stack, start_target
from tests.helpers.targets import generation_request, link_to

HELLO = {"model": "pydoc", "prompt": "hello", "max_tokens": 30}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    """Another authority, that nobody was told of."""
    (tmp_path / "stranger").mkdir()
    return Authority(tmp_path / "stranger")


@asynccontextmanager
async def served(tls: Certificates | None) -> AsyncIterator[RunningTarget]:
    running = await start_target(counts, 1, "t", tls=tls)
    try:
        yield running
    finally:
        await running.die()


async def reaches(running: RunningTarget, tls: Certificates | None) -> bool:
    """Whether a gateway with these is let in, and lets itself in with this target."""
    try:
        async with link_to(running.record.address, tls):
            return True
    except TargetLost:
        return False


Files = Callable[[Authority, Authority], Certificates | None]


WELCOME: dict[str, tuple[Files, Files]] = {
    "as it should be": (lambda a, s: a.issue(GATEWAY), lambda a, s: a.issue(TARGET)),
    "further names": (lambda a, s: a.issue("10.0.0.7", GATEWAY), lambda a, s: a.issue(TARGET, "pod.example")),
    "in the clear": (lambda a, s: None, lambda a, s: None),
}
REFUSED: dict[str, tuple[Files, Files]] = {
    "a client in the clear": (lambda a, s: None, lambda a, s: a.issue(TARGET)),
    "a server in the clear": (lambda a, s: a.issue(GATEWAY), lambda a, s: None),
    "an expired client": (lambda a, s: a.issue(GATEWAY, expired=True), lambda a, s: a.issue(TARGET)),
    "an expired server": (lambda a, s: a.issue(GATEWAY), lambda a, s: a.issue(TARGET, expired=True)),
    "another authority": (lambda a, s: s.issue(GATEWAY), lambda a, s: a.issue(TARGET)),
    "a draft that plays gateway": (lambda a, s: a.issue(DRAFT), lambda a, s: a.issue(TARGET)),
    "a target that plays gateway": (lambda a, s: a.issue(TARGET), lambda a, s: a.issue(TARGET, file="other")),
    "a draft that plays target": (lambda a, s: a.issue(GATEWAY), lambda a, s: a.issue(DRAFT)),
}


@pytest.mark.parametrize("case", WELCOME | REFUSED)
async def test_who_gets_in(case: str, authority: Authority, stranger: Authority) -> None:
    ours, theirs = (WELCOME | REFUSED)[case]
    async with served(theirs(authority, stranger)) as running:
        assert await reaches(running, ours(authority, stranger)) == (case in WELCOME)


@pytest.mark.parametrize("believed", ["ours", "theirs"])
async def test_each_side_looks_for_itself(believed: str, authority: Authority, stranger: Authority) -> None:
    """One of the two believes both authorities; that does not help if the other one does not."""
    client, server = stranger.replace(GATEWAY), authority.replace(TARGET)
    (client if believed == "ours" else server)[2].write_bytes(authority.pem + stranger.pem)
    async with served(Certificates(*server)) as running:
        assert not await reaches(running, Certificates(*client))
        (server if believed == "ours" else client)[2].write_bytes(authority.pem + stranger.pem)
        assert await reaches(running, Certificates(*client))


async def test_a_client_without_a_certificate(authority: Authority) -> None:
    """It believes the server, but shows nothing."""
    async with served(authority.issue(TARGET)) as running:
        credentials = grpc.ssl_channel_credentials(authority.pem)
        options = [("grpc.ssl_target_name_override", TARGET)]
        async with grpc.aio.secure_channel(running.record.address, credentials, options=options) as channel:
            call = channel.unary_unary("/paceline.v1.TargetService/Describe")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(b"", timeout=20.0)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_client_that_may_not_call_may_not_stream(authority: Authority) -> None:
    """A draft's certificate is good for being called, and for nothing else."""
    tls = authority.issue(DRAFT)
    async with served(authority.issue(TARGET)) as running:
        async with open_channel(running.record.address, tls=tls, peer=TARGET) as channel:
            call = TargetServiceStub(channel).Serve()
            with pytest.raises(grpc.aio.AioRpcError, match=GATEWAY) as refused:
                await call.read()
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_rotation_while_a_stream_runs(authority: Authority, stranger: Authority) -> None:
    """The stream goes on; whoever comes then meets the new certificate, and needs one of the new authority."""
    theirs, ours = authority.issue(TARGET), authority.issue(GATEWAY)
    async with served(theirs) as running, link_to(running.record.address, ours) as link:
        running.decoder.hold_after = 5
        async with aclosing(link.submit(generation_request(max_tokens=40))) as deltas:
            tokens = [token for _ in range(5) for token in (await anext(deltas)).tokens]
            stranger.replace(TARGET, folder=authority.folder)
            assert await reaches(running, stranger.issue(GATEWAY))
            assert not await reaches(running, ours)
            running.decoder.gate.set()
            async for delta in deltas:
                tokens += delta.tokens
        assert tokens == list(counts(generation_request(max_tokens=40))[:40])


async def test_files_that_do_not_belong_together_change_nothing(authority: Authority, stranger: Authority) -> None:
    """Between the new certificate and its key the old ones serve."""
    theirs, ours = authority.issue(TARGET), authority.issue(GATEWAY)
    certificate, key, _ = stranger.replace(TARGET)
    async with served(theirs) as running:
        theirs.certificate.write_bytes(certificate.read_bytes())
        assert await reaches(running, ours)
        theirs.key.unlink()
        assert await reaches(running, ours)
        theirs.key.write_bytes(key.read_bytes())
        assert not await reaches(running, ours)


async def test_a_gateway_reaches_its_targets_through_tls(authority: Authority) -> None:
    async with open_stack(tls=authority.issue(GATEWAY)) as stack, served(authority.issue(TARGET)) as running:
        await stack.store.registry.register(running.record)
        assert await stack.model.fleet.wait_for_target(20.0)
        await stack.text()


async def test_the_edge_rotates_while_a_stream_runs(authority: Authority, stranger: Authority) -> None:
    edge = authority.issue("127.0.0.1", edge=True)
    async with open_stack(counts, burst=1, edge_tls=edge) as stack:
        stack.decoder.hold_after = 3
        url = f"https://{stack.addresses.http}"

        async def models(believed: Authority) -> int:
            async with httpx.AsyncClient(verify=believed.context()) as client:
                return (await client.get(f"{url}/v1/models")).status_code

        asked = HELLO | {"stream": True, "seed": 3, "return_token_ids": True}
        async with (
            httpx.AsyncClient(verify=authority.context(), timeout=20.0) as client,
            client.stream("POST", f"{url}/v1/completions", json=asked) as answer,
        ):
            events = (json.loads(line[6:]) async for line in answer.aiter_lines() if line.startswith("data: {"))
            tokens = (await anext(events))["choices"][0].get("token_ids", [])
            assert await models(authority) == 200
            stranger.replace("127.0.0.1", folder=authority.folder)
            assert await models(stranger) == 200
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await models(authority)
            stack.decoder.gate.set()
            async for event in events:
                tokens += event["choices"][0].get("token_ids", [])
        assert tokens == list(counts(stack.decoder.requests[0])[:30])


async def test_grpc_and_the_official_client_at_the_edge(authority: Authority) -> None:
    async with open_stack(counts, edge_tls=authority.issue("127.0.0.1", edge=True)) as stack:
        credentials = grpc.ssl_channel_credentials(authority.pem)
        async with grpc.aio.secure_channel(stack.addresses.grpc, credentials) as channel:
            models = await InferenceServiceStub(channel).ListModels(pb.ListModelsRequest())
        assert [model.id for model in models.models] == ["pydoc"]
        async with httpx.AsyncClient(verify=authority.context()) as http:
            client = openai.AsyncOpenAI(base_url=f"https://{stack.addresses.http}/v1", api_key="any", http_client=http)
            assert [model.id async for model in client.models.list()] == ["pydoc"]


def test_old_protocols_are_not_spoken(authority: Authority) -> None:
    context = authority.issue("127.0.0.1", edge=True).server_context()
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


async def test_redis_behind_tls(authority: Authority, stranger: Authority) -> None:
    """A `rediss://` URL uses the service's own files; Redis asks for a certificate, as it does by default."""
    context = authority.issue("127.0.0.1", file="redis").server_context()
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority.pem.decode())
    with EmbeddedRedis() as redis:
        async with behind(redis.url, context) as url:
            async with open_store(url, tls=authority.issue(TARGET)) as store:
                await store.registry.register(WorkerRecord("target", "w", "1.2.3.4:5", "m", "", "f", 1.0))
                assert [each.record.worker_id for each in await store.registry.workers("target")] == ["w"]
            for tls in (None, stranger.issue(TARGET)):
                with pytest.raises(StateError, match="does not answer"):
                    async with open_store(url, tls=tls):
                        pass


@asynccontextmanager
async def behind(url: str, context: ssl.SSLContext) -> AsyncIterator[str]:
    """Terminates TLS in front of a Redis."""
    path = url.removeprefix("unix://").partition("?")[0] if url.startswith("unix://") else None
    host, _, port = url.removeprefix("redis://").partition("/")[0].rpartition(":")

    def connect() -> Awaitable[Streams]:
        return asyncio.open_connection(host, int(port)) if path is None else asyncio.open_unix_connection(path)

    async with proxy(connect, tls=context) as front:
        yield f"rediss://127.0.0.1:{front}"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"tls_key": None, "tls_ca": None}, "--tls-key and --tls-ca must be given, too"),
        ({"tls_key": Path("target.ca")}, "target.ca"),
        ({"tls_ca": Path("no-such")}, "no-such"),
    ],
)
def test_options_come_together_or_not_at_all(
    options: dict[str, Path | None], complaint: str, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(authority.folder)
    certificate, key, ca = authority.replace(TARGET, file="target")
    given = {"tls_cert": certificate, "tls_key": key, "tls_ca": ca}
    assert load_certificates(dict.fromkeys(given)) is None
    assert load_certificates(given) is not None
    with pytest.raises(StartError, match=complaint):
        load_certificates(given | options)

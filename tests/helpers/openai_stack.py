"""A gateway with scripted targets behind it, all over real sockets, in the test's own event loop.

The targets are the real service, `paceline_services.target.target_servicer`, with a script instead of an
engine: the output of each request, how many tokens come at once, and when.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import openai
import pytest

from paceline.engine.engine_loop import CancelRequest
from paceline.messages import (
    Delta,
    EngineLoad,
    FinishReason,
    GenerationRequest,
    LogProbs,
    PromptLogProbs,
    SpeculationStats,
    TargetDescription,
    Timings,
    Usage,
    VerifiedTree,
)
from paceline.state import StateStore, WorkerRecord, open_store
from paceline.target_features import all_features
from paceline.telemetry.tracing import NO_TRACING, Tracing
from paceline.text import Tokenizer
from paceline.tls import Certificates
from paceline.v1 import inference_pb2_grpc, target_pb2, target_pb2_grpc
from paceline.wire.channels import GATEWAY
from paceline.wire.grpc_server import GrpcServer
from paceline_services.gateway.generation.admission import AdmissionLimits
from paceline_services.gateway.generation.model_directory import ModelDirectory
from paceline_services.gateway.generation.served_model import ServedModel
from paceline_services.gateway.server import Addresses, running
from paceline_services.gateway.settings import GatewaySettings
from paceline_services.target.target_servicer import TargetServicer
from tests.helpers.memory_state import open_state
from tests.helpers.waiting import until

MODEL = "pydoc"
TOKENIZER = Tokenizer.load(MODEL)
EOS = 2
CONTEXT = 128

Script = Callable[[GenerationRequest], Sequence[int]]


class FailsAfter(RuntimeError):
    """A script raises it to send this output, and then the error."""

    def __init__(self, message: str, output: Sequence[int]) -> None:
        super().__init__(message)
        self.output = output


class KillsEngines(RuntimeError):
    """A script raises it to let the engine die."""


def log_probs(token: int, top: int) -> LogProbs:
    return LogProbs(-0.5, [((token + rank) % 4096, -0.5 - rank) for rank in range(top)])


class ScriptedDecoder:
    """A fake engine: the output of a request is `script(request)`, in deltas of `burst` tokens.

    While `gate` is clear the target hangs. The gate clears itself after `hold_after` deltas.
    """

    hold_after: int | None = None
    running_stats: SpeculationStats | None = None
    """What deltas before a request's last one carry."""
    first_after_s = 0.0
    """The time to a request's first token."""
    log_probs_of = staticmethod(log_probs)

    def __init__(self, script: Script, burst: int) -> None:
        self.servicer: TargetServicer
        self.gate = asyncio.Event()
        self.gate.set()
        self.requests: list[GenerationRequest] = []
        self.cancelled: asyncio.Queue[str] = asyncio.Queue()
        self.sent: dict[str, int] = {}
        """How many tokens each running request got."""
        self._script = script
        self._burst = burst
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def send(self, message: GenerationRequest | CancelRequest) -> None:
        if isinstance(message, GenerationRequest):
            self.requests.append(message)
            self.sent[message.request_id] = 0
            self._tasks[message.request_id] = asyncio.create_task(self._decode(message))
            return
        task = self._tasks.pop(message.request_id, None)
        self.sent.pop(message.request_id, None)
        if task is not None and task.cancel():
            self._deliver(self._last(Delta(message.request_id), FinishReason.CANCELLED, 0, 0))
            self.cancelled.put_nowait(message.request_id)

    async def die(self) -> None:
        """End as an engine does that dies, while its service lives on."""
        ended = asyncio.get_running_loop().create_future()
        ended.set_result(None)
        await self.servicer.drain(0.0, ended)

    async def hand_over(self) -> None:
        """End as an engine does that drains and has no time left."""
        await self.servicer.drain(0.0, asyncio.get_running_loop().create_future())

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _decode(self, request: GenerationRequest) -> None:
        params, error = request.sampling, ""
        try:
            output = list(self._script(request))[: params.max_tokens]
        except KillsEngines:
            await self.die()
            return
        except RuntimeError as failure:
            output, error = list(failure.output) if isinstance(failure, FailsAfter) else [], str(failure)
        stops = [index for index, token in enumerate(output) if token in params.stop_token_ids]
        output = output[: stops[0] + 1] if stops else output
        start = len(request.committed)
        await asyncio.sleep(self.first_after_s)
        if params.prompt_logprobs is not None:
            await self._score(request, params.prompt_logprobs)
        for at in range(start, max(len(output), start + 1), self._burst):
            await self.gate.wait()
            tokens = output[at : at + self._burst]
            delta = Delta(request.request_id, tokens, [index > 0 for index in range(len(tokens))])
            if request.return_tree:
                delta.trees = [guessed_tree(tokens)]
            if params.logprobs is not None:
                delta.log_probs = [self.log_probs_of(token, params.logprobs) for token in tokens]
            if at + self._burst >= len(output):
                reason = FinishReason.ERROR if error else FinishReason.STOP if stops else FinishReason.LENGTH
                delta.error = error
                delta.stop_token = output[-1] if stops else None
                delta = self._last(delta, reason, len(request.prompt), len(output))
                self._tasks.pop(request.request_id)
                self.sent.pop(request.request_id)
            else:
                self.sent[request.request_id] += len(tokens)
                delta.speculation = self.running_stats
            await self._send(delta)

    async def _score(self, request: GenerationRequest, top: int) -> None:
        """Deltas with the log-probabilities of `burst` tokens of the prompt each."""
        for start in range(1, len(request.prompt), self._burst):
            await self.gate.wait()
            stop = min(start + self._burst, len(request.prompt))
            entries = [prompt_score(at, request.prompt[at], top) for at in range(start, stop)]
            await self._send(Delta(request.request_id, prompt_log_probs=[PromptLogProbs(start, entries)]))

    async def _send(self, delta: Delta) -> None:
        self._deliver(delta)
        if self.hold_after is not None:
            self.hold_after -= 1
            if not self.hold_after:
                self.hold_after = None
                self.gate.clear()
        await asyncio.sleep(0)

    def _last(self, delta: Delta, reason: FinishReason, prompt: int, output: int) -> Delta:
        delta.finish_reason = reason
        delta.usage = Usage(prompt, output, cached_tokens=1)
        delta.timings = Timings(0.25, 0.5, 1.0, prefill_s=0.125)
        delta.speculation = SpeculationStats([4, 3], [3, 1], drafted_tokens=9, verifications=4, steps=5, drafts=["d"])
        return delta

    def _deliver(self, delta: Delta) -> None:
        load = EngineLoad(len(self._tasks), 0, 1000, 8, 0.001)
        asyncio.get_running_loop().call_soon(self.servicer.send_deltas, [delta], load)  # an engine answers later


def prompt_score(position: int, token: int, top: int) -> LogProbs:
    """What a scripted target says of a prompt's token: it depends on the position, and the token is not the best."""
    best = [((token + rank) % 4096, -0.125 * rank) for rank in range(1, top + 1)]
    return LogProbs(-4.0 - position, best, 10 + position)


def guessed_tree(tokens: Sequence[int]) -> VerifiedTree:
    """The tree of a step that committed these tokens, all but the first guessed: and a refused guess below the root."""
    guesses = len(tokens) - 1
    return VerifiedTree(
        parents=[*range(guesses), 0],
        tokens=[*tokens[1:], 17],
        accepted=[True] * guesses + [False],
        methods=["draft_model"] * guesses + ["ngram"],
    )


class Bookkeeper:
    """An observer that keeps nothing."""

    def submitted(self, engine_id: str, request: GenerationRequest) -> None: ...

    def committed(self, delta: Delta) -> None: ...

    def finished(self, engine_id: str) -> None: ...


@dataclass(slots=True)
class RunningTarget:
    record: WorkerRecord
    decoder: ScriptedDecoder
    server: GrpcServer
    servicer: TargetServicer

    @property
    def linked(self) -> bool:
        """Whether a gateway has a link to it."""
        return bool(self.servicer._links)

    async def die(self) -> None:
        """As after SIGKILL: every stream breaks, in whatever state it is."""
        await self.server.stop(0.0)
        await self.decoder.close()


@dataclass(slots=True)
class Stack:
    """A running gateway with its clients and targets."""

    store: StateStore
    models: ModelDirectory
    addresses: Addresses
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI
    targets: list[RunningTarget] = field(default_factory=list)
    _exits: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def model(self) -> ServedModel:
        """The first model."""
        return self.models.first

    @property
    def decoder(self) -> ScriptedDecoder:
        return self.targets[0].decoder

    @property
    def served(self) -> list[int]:
        """How many requests each target got."""
        return [len(target.decoder.requests) for target in self.targets]

    async def add_target(
        self,
        script: Script,
        *,
        burst: int = 3,
        worker_id: str | None = None,
        model: str = MODEL,
        numerics: str = "",
        labels: Sequence[str] = (),
        features: Sequence[str] | None = None,
        context: int = CONTEXT,
    ) -> RunningTarget:
        """Start a target, and wait until the gateway uses it. `features`: None: those of this build."""
        worker_id = worker_id or f"target-{len(self.targets)}"
        target = await start_target(
            script,
            burst,
            worker_id,
            model=model,
            numerics=numerics,
            labels=labels,
            features=features,
            context=context,
        )
        self._exits.push_async_callback(target.die)
        self.targets.append(target)
        await self.store.registry.register(target.record)
        fleet = self.models.model(model).fleet
        await until(lambda: worker_id in [known.record.worker_id for known in fleet.targets.values()])
        return target

    async def complete(
        self, prompt: Any = "x", headers: Mapping[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        """Post a completion."""
        return await self.http.post("/v1/completions", json={"prompt": prompt, **fields}, headers=headers)

    async def text(self, prompt: Any = "x", headers: Mapping[str, str] | None = None, **fields: Any) -> str:
        """The text of a completion, which has to succeed."""
        answer = await self.complete(prompt, headers, **fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    async def begin(self, prompt: Any = "x", **fields: Any) -> asyncio.Task[httpx.Response]:
        """Post a completion, and return when its choices have reached targets."""
        wanted = sum(self.served) + fields.get("n", 1)
        asking = asyncio.create_task(self.complete(prompt, **fields))
        await until(lambda: asking.done() or sum(self.served) >= wanted)
        return asking

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All events of a stream, parsed. The last must be [DONE], and is left out."""
        async with self.http.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            raw = (await response.aread()).decode()
        assert raw.endswith("\n\ndata: [DONE]\n\n")
        *parts, _, _ = raw.split("\n\n")
        found = [re.fullmatch(r"id: \w{32}:(\d+)\ndata: (.*)", part) for part in parts]
        assert [each and int(each[1]) for each in found] == list(range(1, len(parts) + 1))
        return [json.loads(each[2]) for each in found if each]

    @asynccontextmanager
    async def streaming(self, **fields: Any) -> AsyncIterator[AsyncIterator[Any]]:
        """The events of a completion's stream as they come."""
        body = {"prompt": "x", "stream": True, **fields}
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async with aclosing(response.aiter_lines()) as lines:
                yield (json.loads(line.removeprefix("data: ")) async for line in lines if line.startswith("data: {"))

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A TCP connection to the HTTP port."""
        host, port = self.addresses.http.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            yield reader, writer
        finally:
            writer.close()

    @asynccontextmanager
    async def inference(self, options: Sequence[tuple[str, int]] = ()) -> AsyncIterator[Any]:
        """A stub of `InferenceService`."""
        async with grpc.aio.insecure_channel(self.addresses.grpc, options=options) as channel:
            yield inference_pb2_grpc.InferenceServiceStub(channel)

    async def metrics(self) -> str:
        return (await self.http.get("/metrics")).text

    async def all_received(self) -> None:
        """Wait until the gateway has every token that was sent of requests that run, and one of each at least."""

        def received() -> list[int]:
            targets = self.model.fleet.targets.values()
            return sorted(len(request.output) for target in targets for request in target.requests)

        def sent() -> list[int]:
            return sorted(tokens for target in self.targets for tokens in target.decoder.sent.values())

        await until(lambda: received() == sent() and 0 not in received())

    async def idle(self) -> None:
        """Wait until no completion is under way."""
        await until(lambda: not (self.model.queue.in_flight or self.model.fleet.in_flight))


async def generated(stub: Any, request: Any, headers: Mapping[str, str] | None = None) -> list[Any]:
    """All responses to a call of `Generate`."""
    return [response async for response in stub.Generate(request, metadata=tuple((headers or {}).items()))]


async def refusal(stub: Any, request: Any, headers: Mapping[str, str] | None = None) -> grpc.aio.AioRpcError:
    """The error of a call of `Generate`, which has to fail."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await generated(stub, request, headers)
    return error.value


async def start_target(
    script: Script,
    burst: int,
    worker_id: str,
    fingerprint: str = TOKENIZER.fingerprint,
    model: str = MODEL,
    tls: Certificates | None = None,
    port: int = 0,
    numerics: str = "",
    labels: Sequence[str] = (),
    vocabulary_size: int = 4096,
    context: int = CONTEXT,
    features: Sequence[str] | None = None,
) -> RunningTarget:
    eos, can = (EOS,), all_features() if features is None else features
    description = TargetDescription(
        worker_id, model, fingerprint, vocabulary_size, context, 1000, True, eos, "ngram", numerics, labels, can
    )
    decoder = ScriptedDecoder(script, burst)
    servicer = decoder.servicer = TargetServicer(description, Bookkeeper(), decoder.send)
    server = GrpcServer("127.0.0.1", port, tls=tls, peer=GATEWAY)
    service = target_pb2.DESCRIPTOR.services_by_name["TargetService"]
    server.add(target_pb2_grpc.add_TargetServiceServicer_to_server, servicer, service)
    address = await server.start()
    record = WorkerRecord("target", worker_id, address, model, "ngram", fingerprint, time.time(), numerics)
    return RunningTarget(record, decoder, server, servicer)


@asynccontextmanager
async def open_stack(
    *scripts: Script,
    burst: int = 3,
    limits: AdmissionLimits | None = None,
    redis_url: str | None = None,
    more_models: Sequence[str] = (),
    folder: str = MODEL,
    context: int = CONTEXT,
    features: Sequence[str] | None = None,
    tracing: Tracing = NO_TRACING,
    **settings_: Any,
) -> AsyncIterator[Stack]:
    """A gateway with one target per script. Without `redis_url` the registry is this process's memory.

    `more_models`: names by which the same model is served once more, by targets of its own. `folder`: the model that is
    served as MODEL. `features`: of the targets; None: those of this build. `settings_`: more of `GatewaySettings`. With
    TLS at the edge, its own clients do not look at the certificate.
    """
    settings = GatewaySettings(
        {MODEL: folder, **dict.fromkeys(more_models, MODEL)},
        port=0,
        drain_s=5.0,
        limits=limits or AdmissionLimits(resume_s=5.0),
        **settings_,
    )
    async with open_state(redis_url, ttl_s=3600.0, records=settings.records) as store, AsyncExitStack() as service:
        tokenizer = TOKENIZER if folder == MODEL else Tokenizer.load(folder)
        vocabulary = {"fingerprint": tokenizer.fingerprint, "vocabulary_size": len(tokenizer.pieces)}
        targets = [
            await start_target(script, burst, f"target-{index}", context=context, features=features, **vocabulary)
            for index, script in enumerate(scripts)
        ]
        for target in targets:
            await store.registry.register(target.record)
        models, addresses = await service.enter_async_context(running(settings, store, tracing))
        url = f"{'https' if settings.edge_tls else 'http'}://{addresses.http}"
        async with (
            AsyncExitStack() as exits,
            httpx.AsyncClient(base_url=url, timeout=20.0, verify=False) as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, http_client=None) as client,
        ):
            for target in targets:
                exits.push_async_callback(target.die)
            await until(lambda: len(models.first.fleet.targets) == len(targets))
            yield Stack(store, models, addresses, http, client, targets, exits)


@asynccontextmanager
async def another_gateway(stack: Stack, redis_url: str, **settings_: Any) -> AsyncIterator[Stack]:
    """One more gateway for the targets of a stack that has the same Redis. `settings_`: as for `open_stack`."""
    settings_ = {"drain_s": 5.0, "limits": AdmissionLimits(resume_s=5.0), **settings_}
    settings = GatewaySettings({MODEL: MODEL}, port=0, **settings_)
    async with (
        open_store(redis_url, ttl_s=3600.0, records=settings.records) as store,
        running(settings, store) as (models, addresses),
        httpx.AsyncClient(base_url=f"http://{addresses.http}", timeout=20.0) as http,
        openai.AsyncOpenAI(base_url=f"http://{addresses.http}/v1", api_key="any", max_retries=0) as client,
    ):
        await until(lambda: len(models.first.fleet.targets) == len(stack.targets))
        yield Stack(store, models, addresses, http, client, stack.targets)


def text_script(text: str, tokenizer: Tokenizer = TOKENIZER) -> Script:
    """A script whose output is this text and the end of text."""
    tokens = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    return lambda request: tokens


def counts(request: GenerationRequest) -> Sequence[int]:
    """An endless output that depends on the seed and the prompt, as a real one does."""
    first = (request.sampling.seed + sum(request.prompt)) % 1000
    return [300 + (first + 7 * index) % 3000 for index in range(CONTEXT)]

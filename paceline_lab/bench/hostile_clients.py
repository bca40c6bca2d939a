"""`paceline bench hostile`: what one client can do to the others.

Starts the whole stack over the shipped model, as `paceline serve` does, and sends it what a hostile or careless client
sends, while another client keeps sending small requests:

- `costly grammars`: ten schemas of sixty bytes that take seconds to compile; the other client sends a new grammar.
- `prompts of 8 MB`: six at once, far longer than the context; the other client tokenizes a word.
- `texts of 8 MB to tokenize`: six at once, which are accepted; the other client tokenizes a word.
- `128 choices`: one request with `n: 128`; the other client waits for the first token of a stream.
- `no messages`: bytes that are no protobuf, to target and draft, and to their health and reflection services.
- `other sites`: text posted by a page of another site.

A second stack serves the same model with a vocabulary of 262,144 tokens, and rows beyond them that its draft does not
have. Its other client reads 20 streams at once, and waits for the longest gap in any of them:

- `first grammar`: the first request with a grammar, a second after the streams began.
- `ids`, `padded ids`: twenty prompts of token ids, which are tokens, or stand for none.

Each row of the table has the responses, the time they took, the peak of additional memory of all processes, and the
other client's waiting time: alone (median), and during the attack (median and longest). The last line is one JSON
document: `attacks`, the same, times in seconds and memory in MB (10^6 bytes, proportional set size); and `tracebacks`,
the number of tracebacks that the services logged.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import httpx
from rich.console import Console
from rich.table import Table

from paceline.cli.deployment import DeploymentOptions, plan_deployment
from paceline.cli.http_client import HttpClient, HttpCompletion, open_client
from paceline.cli.local_stack import LocalStack, running_stack
from paceline.cli.progress import progress
from paceline.config import SpeculativeConfig
from paceline_lab.bench.bench_measurement import results_kept_on_interrupt
from paceline_lab.bench.large_vocabulary import TOKENS, write_large_family
from paceline_lab.bench.measured_stack import tree_pss_mb

ALONE = 9
"""Requests of the other client without an attack."""
ATTACKS = 9
STREAMS, STREAM_TOKENS = 20, 64
"""Of the other client of the large vocabulary."""
POLL_S = 0.2
SIZE = 8_000_000
METHODS = {
    "targets": ("/paceline.v1.TargetService/Describe", "/paceline.v1.TargetService/Serve"),
    "drafts": ("/paceline.v1.DraftService/Describe", "/paceline.v1.DraftService/Grow"),
}
EVERY_SERVER = (
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)

Send = Callable[[], Awaitable[Any]]
Waited = Callable[[], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class Attack:
    """One row of the table. Units are in the module's docstring. `memory_mb` is None on systems without the figure;
    times are None for an attack without another client."""

    name: str
    sent: int
    answers: dict[str, int]
    """Number of responses by status."""
    seconds: float
    memory_mb: float | None
    alone_s: float | None = None
    beside_s: float | None = None
    longest_s: float | None = None


@dataclass(slots=True)
class HostileResult:
    attacks: list[Attack] = field(default_factory=list)
    tracebacks: int = 0
    """In the logs of the services."""


@dataclass(slots=True)
class HostileBench:
    """One stack and its clients."""

    stack: LocalStack
    client: HttpClient
    attacks: list[Attack]
    _numbers: count[int] = field(default_factory=count)

    async def all(self, done: Callable[[], None]) -> None:
        """Run one attack after another; `done` is called after each."""
        await self._run(
            done,
            self._costly_grammars,
            self._huge_prompts,
            self._huge_texts,
            self._many_choices,
            self._no_messages,
            self._other_sites,
        )

    async def on_large_vocabulary(self, done: Callable[[], None]) -> None:
        """The attacks that need one."""
        await self._run(
            done, self._first_grammar, partial(self._ids, "ids", 3), partial(self._ids, "padded ids", TOKENS)
        )

    async def _run(self, done: Callable[[], None], *attacks: Callable[[], Awaitable[Attack]]) -> None:
        for attack in attacks:
            self.attacks.append(await attack())
            done()

    async def _costly_grammars(self) -> Attack:
        def costly(number: int) -> Send:
            schema = {"type": "integer", "multipleOf": 999_983 + 2 * number}
            return self._sender("/v1/completions", _with_grammar({"json": schema}))

        async def other() -> float:
            body = _with_grammar({"regex": f"a{{{next(self._numbers) % 200 + 1}}}b*"})
            return await _seconds(self._sender("/v1/completions", body))

        return await self._attack("costly grammars", [costly(number) for number in range(10)], other)

    async def _huge_prompts(self) -> Attack:
        body = {"prompt": "word " * (SIZE // 5 - 10), "max_tokens": 1}
        return await self._attack("prompts of 8 MB", [self._sender("/v1/completions", body)] * 6, self._tokenize_s)

    async def _huge_texts(self) -> Attack:
        body = {"prompt": "word " * (SIZE // 5 - 10)}
        return await self._attack("texts of 8 MB to tokenize", [self._sender("/tokenize", body)] * 6, self._tokenize_s)

    async def _tokenize_s(self) -> float:
        """Time to tokenize one word."""
        return await _seconds(self._sender("/tokenize", {"prompt": "word"}))

    async def _many_choices(self) -> Attack:
        body = {
            "prompt": "def area(width, height):",
            "n": 128,
            "max_tokens": 400,
            "temperature": 1.0,
            "ignore_eos": True,
        }
        return await self._attack("128 choices", [self._sender("/v1/completions", body)], self._first_token_s)

    async def _first_token_s(self) -> float:
        """Time to the first token of a small request."""
        began, first = time.perf_counter(), 0.0

        def on_progress(completion: HttpCompletion) -> None:
            nonlocal first
            if completion.tokens and not first:
                first = time.perf_counter() - began

        await self.client.stream(
            "/v1/completions", {"prompt": f"x = {next(self._numbers)}", "max_tokens": 8}, on_progress
        )
        return first

    async def _first_grammar(self) -> Attack:
        send = self._sender("/v1/completions", _with_grammar({"json": {"type": "object"}}))
        return await self._attack("first grammar", [_later(send)], self._longest_gap_s)

    async def _ids(self, name: str, first: int) -> Attack:
        bodies = ({"prompt": [1, 2, first + i], "max_tokens": 16, "ignore_eos": True} for i in range(STREAMS))
        sends = [_later(self._sender("/v1/completions", body)) for body in bodies]
        return await self._attack(name, sends, self._longest_gap_s)

    async def _longest_gap_s(self) -> float:
        """Longest time between two events of a stream, of many streams at once."""
        return max(await asyncio.gather(*(self._gap_s() for _ in range(STREAMS))))

    async def _gap_s(self) -> float:
        body = {"prompt": f"x = {next(self._numbers)}", "max_tokens": STREAM_TOKENS, "ignore_eos": True}
        times: list[float] = []
        await self.client.stream("/v1/completions", body, lambda _: times.append(time.perf_counter()))
        return max(after - before for before, after in pairwise(times))

    async def _no_messages(self) -> Attack:
        deployment = self.stack.deployment
        workers = {"targets": deployment.targets.values(), "drafts": deployment.drafts.values()}
        sends = [
            _malformed(f"127.0.0.1:{port}", method)
            for kind, ports in workers.items()
            for port in ports
            for method in (*METHODS[kind], *EVERY_SERVER)
        ]
        return await self._attack("no messages", sends)

    async def _other_sites(self) -> Attack:
        async def post() -> str:
            headers = {"origin": "https://other.example", "content-type": "text/plain"}
            body = b'{"prompt": "x", "max_tokens": 1}'
            return str((await self.client.http.post("/v1/completions", content=body, headers=headers)).status_code)

        return await self._attack("other sites", [post])

    def _sender(self, path: str, body: dict[str, Any]) -> Send:
        """A function that posts the body and returns the status."""

        async def send() -> str:
            return str((await self.client.http.post(path, json=body)).status_code)

        return send

    async def _attack(self, name: str, sends: Sequence[Send], other: Waited | None = None) -> Attack:
        """Send everything at once while the other client sends one request after another.

        `other` sends one request and returns its waiting time in seconds.
        """
        alone = [await other() for _ in range(ALONE)] if other else []
        before = tree_pss_mb()
        began = time.perf_counter()
        responses = asyncio.gather(*(send() for send in sends))
        polling = asyncio.create_task(_peak_memory(responses))
        during = []
        try:
            while other and not responses.done():
                during.append(await other())
        except asyncio.CancelledError:
            responses.cancel()
            await asyncio.gather(responses, polling, return_exceptions=True)
            raise
        counts = Counter(await responses)
        seconds, peak = time.perf_counter() - began, await polling
        return Attack(
            name,
            len(sends),
            dict(counts),
            seconds,
            memory_mb=None if before is None or peak is None else max(0.0, peak - before),
            alone_s=median(alone) if alone else None,
            beside_s=median(during) if during else None,
            longest_s=max(during, default=None),
        )


def _with_grammar(grammar: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 1, "structured_outputs": grammar}


def _later(send: Send) -> Send:
    """A second after the other client began."""

    async def wait_and_send() -> Any:
        await asyncio.sleep(1.0)
        return await send()

    return wait_and_send


def _malformed(address: str, method: str) -> Send:
    async def send() -> str:
        async with grpc.aio.insecure_channel(address) as channel:
            call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(method)()
            try:
                await call.write(b"\xff\xff\xff")
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError as error:
                return error.code().name
        return "OK"

    return send


async def _peak_memory(until: asyncio.Future[Any]) -> float | None:
    peak = 0.0
    while not until.done():
        memory = await asyncio.to_thread(tree_pss_mb)
        if memory is None:
            return None
        peak = max(peak, memory)
        await asyncio.sleep(POLL_S)
    return peak


async def _seconds(send: Send) -> float:
    began = time.perf_counter()
    await send()
    return time.perf_counter() - began


async def _bench(console: Console, result: HostileResult) -> None:
    with TemporaryDirectory() as folder, progress(console, "attacks", ATTACKS) as done:
        async with _attacked(DeploymentOptions(), result) as bench:
            await bench.all(done)
        target, draft = write_large_family(Path(folder))
        speculation = SpeculativeConfig(method="draft_model", model=str(draft))
        async with _attacked(DeploymentOptions(str(target), speculation), result) as bench:
            await bench.on_large_vocabulary(done)


@asynccontextmanager
async def _attacked(options: DeploymentOptions, result: HostileResult) -> AsyncIterator[HostileBench]:
    lines: list[str] = []
    deployment = plan_deployment(options)
    async with running_stack(deployment, lines.append) as stack, open_client(deployment.url) as client:
        client.http.timeout = httpx.Timeout(600.0)
        await stack.ready()
        try:
            yield HostileBench(stack, client, result.attacks)
        finally:
            result.tracebacks += sum("Traceback" in line for line in lines)


def _table(attacks: Sequence[Attack]) -> Table:
    table = Table("attack", "responses", "s", "MB more", "alone, ms", "during", "longest", box=None)
    for each in attacks:
        responses = ", ".join(f"{number} × {status}" for status, number in each.answers.items())
        memory = "" if each.memory_mb is None else f"{each.memory_mb:.0f}"
        waits = ("" if wait is None else f"{1e3 * wait:.1f}" for wait in (each.alone_s, each.beside_s, each.longest_s))
        table.add_row(each.name, responses, f"{each.seconds:.2f}", memory, *waits)
    return table


def run(console: Console) -> HostileResult:
    """Measure and show. Ctrl-C ends the run with what was measured so far. Raises `StartError` or `StateError`."""
    result = HostileResult()
    with results_kept_on_interrupt(console):
        asyncio.run(_bench(console, result))
    console.print(_table(result.attacks))
    return result

"""`paceline bench hostile`: what one client can do to the others.

Starts the whole stack over the shipped model, as `paceline serve` does, and sends it what a hostile or careless client
sends, while another client goes on asking for something small:

- `costly grammars`: ten schemas of sixty bytes each of which takes seconds to compile; the other brings a new grammar.
- `prompts of 8 MB`: six at once, far longer than the context; the other tokenizes a word.
- `texts of 8 MB to tokenize`: six at once, which are answered; the other tokenizes a word.
- `128 choices`: one request with `n: 128`; the other streams an answer, and waits for its first token.
- `no messages`: bytes that are no protobuf, to target and draft, and to their health and reflection.
- `other sites`: text posted by a page of another site.

Each line of the table says how they were answered, how long that took, how much more memory all processes had at most,
and what the other waited: alone (median), and beside it (median and longest). The last line is one JSON document:
`attacks`, the same, times in seconds and memory in MB (10^6 bytes, proportional set size); and `tracebacks`, how many
the services logged.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any

import grpc
import httpx
from rich.console import Console
from rich.table import Table

from paceline.cli.deployment import DeploymentOptions, plan_deployment
from paceline.cli.http_client import HttpClient, HttpCompletion, open_client
from paceline.cli.local_stack import LocalStack, running_stack
from paceline.cli.process_tree import tree_pss_mb
from paceline.cli.progress import progress, results_kept_on_interrupt

ALONE = 9
"""How often the other asks while nothing else goes on."""
ATTACKS = 6
LOOK_EVERY_S = 0.2
SIZE = 8_000_000
METHODS = {
    "targets": ("/paceline.v1.TargetService/Describe", "/paceline.v1.TargetService/Serve"),
    "drafts": ("/paceline.v1.DraftService/Describe", "/paceline.v1.DraftService/Grow"),
}
EVERYBODYS = (
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)

Ask = Callable[[], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Attack:
    """One row of the table. Units are in the module's docstring. `memory_mb` is None where the system does not tell,
    times of the other client are None where an attack has none."""

    name: str
    sent: int
    answers: dict[str, int]
    seconds: float
    memory_mb: float | None
    alone_s: float | None = None
    beside_s: float | None = None
    longest_s: float | None = None


@dataclass(slots=True)
class HostileResult:
    attacks: list[Attack] = field(default_factory=list)
    tracebacks: int = 0
    """In what the services logged meanwhile."""


@dataclass(slots=True)
class HostileBench:
    """One stack, and the clients of it."""

    stack: LocalStack
    client: HttpClient
    attacks: list[Attack]
    _numbers: count[int] = field(default_factory=count)

    async def all(self, done: Callable[[], None]) -> None:
        """One after the other; `done` hears of each."""
        every = (
            self._costly_grammars,
            self._huge_prompts,
            self._huge_texts,
            self._many_choices,
            self._no_messages,
            self._other_sites,
        )
        for attack in every:
            self.attacks.append(await attack())
            done()

    async def _costly_grammars(self) -> Attack:
        def costly(number: int) -> Ask:
            schema = {"type": "integer", "multipleOf": 999_983 + 2 * number}
            return lambda: self._post("/v1/completions", _bound({"json": schema}))

        async def other() -> None:
            await self._post("/v1/completions", _bound({"regex": f"a{{{next(self._numbers) % 200 + 1}}}b*"}))

        return await self._attack("costly grammars", [costly(number) for number in range(10)], other)

    async def _huge_prompts(self) -> Attack:
        body = {"prompt": "word " * (SIZE // 5 - 10), "max_tokens": 1}
        return await self._attack("prompts of 8 MB", [lambda: self._post("/v1/completions", body)] * 6, self._word)

    async def _huge_texts(self) -> Attack:
        body = {"prompt": "word " * (SIZE // 5 - 10)}
        return await self._attack("texts of 8 MB to tokenize", [lambda: self._post("/tokenize", body)] * 6, self._word)

    async def _word(self) -> None:
        await self._post("/tokenize", {"prompt": "word"})

    async def _many_choices(self) -> Attack:
        body = {
            "prompt": "def area(width, height):",
            "n": 128,
            "max_tokens": 400,
            "temperature": 1.0,
            "ignore_eos": True,
        }
        alone, beside = [], []
        for _ in range(ALONE):
            alone.append(await self._first_token_s())

        async def other() -> None:
            beside.append(await self._first_token_s())

        told = await self._attack("128 choices", [lambda: self._post("/v1/completions", body)], other)
        return Attack(
            told.name,
            told.sent,
            told.answers,
            told.seconds,
            told.memory_mb,
            *_told(alone),
            _told(beside)[0],
            max(beside),
        )

    async def _first_token_s(self) -> float:
        """Of a small request."""
        began, first = time.perf_counter(), 0.0

        def progress(answer: HttpCompletion) -> None:
            nonlocal first
            if answer.tokens and not first:
                first = time.perf_counter() - began

        await self.client.stream("/v1/completions", {"prompt": f"x = {next(self._numbers)}", "max_tokens": 8}, progress)
        return first

    async def _no_messages(self) -> Attack:
        deployment = self.stack.deployment
        places = {"targets": deployment.targets.values(), "drafts": deployment.drafts.values()}
        asks = [
            _no_message(f"127.0.0.1:{port}", method)
            for kind, ports in places.items()
            for port in ports
            for method in (*METHODS[kind], *EVERYBODYS)
        ]
        return await self._attack("no messages", asks)

    async def _other_sites(self) -> Attack:
        async def post() -> str:
            headers = {"origin": "https://other.example", "content-type": "text/plain"}
            body = b'{"prompt": "x", "max_tokens": 1}'
            return str((await self.client.http.post("/v1/completions", content=body, headers=headers)).status_code)

        return await self._attack("other sites", [post])

    async def _post(self, path: str, body: dict[str, Any]) -> str:
        return str((await self.client.http.post(path, json=body)).status_code)

    async def _attack(self, name: str, asks: Sequence[Ask], other: Ask | None = None) -> Attack:
        alone = [await _timed(other) for _ in range(ALONE)] if other else []
        before = tree_pss_mb()
        began = time.perf_counter()
        all_ = asyncio.gather(*(ask() for ask in asks))
        looking = asyncio.create_task(_most_memory(all_))
        beside = []
        try:
            while other and not all_.done():
                beside.append(await _timed(other))
        except asyncio.CancelledError:
            all_.cancel()
            await asyncio.gather(all_, looking, return_exceptions=True)
            raise
        answers = Counter(await all_)
        seconds, most = time.perf_counter() - began, await looking
        memory = None if before is None or most is None else max(0.0, most - before)
        return Attack(
            name, len(asks), dict(answers), seconds, memory, *_told(alone), *_told(beside), max(beside, default=None)
        )


def _bound(outputs: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 1, "structured_outputs": outputs}


def _no_message(address: str, method: str) -> Ask:
    async def ask() -> str:
        async with grpc.aio.insecure_channel(address) as channel:
            call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(method)()
            try:
                await call.write(b"\xff\xff\xff")
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError as error:
                return error.code().name
        return "OK"

    return ask


async def _most_memory(until: asyncio.Future[Any]) -> float | None:
    most = 0.0
    while not until.done():
        memory = await asyncio.to_thread(tree_pss_mb)
        if memory is None:
            return None
        most = max(most, memory)
        await asyncio.sleep(LOOK_EVERY_S)
    return most


async def _timed(ask: Ask) -> float:
    began = time.perf_counter()
    await ask()
    return time.perf_counter() - began


def _told(seconds: Sequence[float]) -> tuple[float | None]:
    return (median(seconds) if seconds else None,)


async def _bench(console: Console, result: HostileResult) -> None:
    said: list[str] = []
    deployment = plan_deployment(DeploymentOptions())
    async with running_stack(deployment, said.append) as stack, open_client(deployment.url) as client:
        client.http.timeout = httpx.Timeout(600.0)
        await stack.ready()
        try:
            with progress(console, "attacks", ATTACKS) as done:
                await HostileBench(stack, client, result.attacks).all(done)
        finally:
            result.tracebacks = sum("Traceback" in line for line in said)


def _table(attacks: Sequence[Attack]) -> Table:
    table = Table("attack", "answers", "s", "MB more", "alone, ms", "beside", "longest", box=None)
    for each in attacks:
        answers = ", ".join(f"{number} × {answer}" for answer, number in each.answers.items())
        memory = "" if each.memory_mb is None else f"{each.memory_mb:.0f}"
        waits = ("" if wait is None else f"{1e3 * wait:.1f}" for wait in (each.alone_s, each.beside_s, each.longest_s))
        table.add_row(each.name, answers, f"{each.seconds:.2f}", memory, *waits)
    return table


def run(console: Console) -> HostileResult:
    """Measure and show; after Ctrl-C, what was measured by then. Raises `ServiceStartError` or `StateError`."""
    result = HostileResult()
    with results_kept_on_interrupt(console):
        asyncio.run(_bench(console, result))
    console.print(_table(result.attacks))
    return result

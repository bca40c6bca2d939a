"""A client that streams one request after the other, and holds each answer against what it has to be."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random

import httpx

from loadtests.chaos.chaos_cases import ChaosCase, UnexpectedAnswerError, opened
from loadtests.chaos.chaos_report import ChaosReport
from loadtests.chaos.chaos_stack import ChaosStack
from loadtests.chaos.stream_response import StreamError, StreamResponse

EXCUSED_S = 60.0
"""A gateway that was struck may refuse or drop connections for so long: it drains, and has to be started again."""
REQUEST_S = 240.0
"""A request that takes longer, with all its retries, counts as an error."""
BREAK_S = 0.2
"""Between two tries."""
BUSY = (429, 503)


@dataclass(slots=True)
class ChaosClient:
    stack: ChaosStack
    http: httpx.AsyncClient
    report: ChaosReport
    random: Random

    async def run(self, cases: list[ChaosCase], stop: asyncio.Event) -> None:
        """One request after the other, until told to stop; the last one is finished."""
        while not stop.is_set():
            await self.request(self.random.choice(cases))

    async def request(self, case: ChaosCase) -> None:
        """Try until there is an answer. It is the gateways' turn one after the other."""
        urls = list(self.stack.urls.values())
        turn = self.random.randrange(len(urls))
        last = StreamResponse()
        try:
            async with asyncio.timeout(REQUEST_S):
                while not await self._attempt(case, urls[turn % len(urls)], last := StreamResponse()):
                    turn += 1
        except TimeoutError:
            self.report.record_error(case, last, f"no answer within {REQUEST_S:g} s")

    async def _attempt(self, case: ChaosCase, url: str, got: StreamResponse) -> bool:
        """Whether this was the end of it. Fills `got`."""
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with opened(self.http, url, case.body) as lines:
                async for line in lines:
                    got.take(line)
            if not got.complete:
                raise StreamError("the stream ended without an end")
        except UnexpectedAnswerError as error:
            if error.status not in BUSY:
                self.report.record_error(case, got, str(error))
                return True
            self.report.refused += 1
            await asyncio.sleep(min(error.retry_after_s, 1.0))
            return False
        except httpx.TransportError as error:
            return await self._lost(case, url, got, began, error)
        except StreamError as error:
            self.report.record_error(case, got, str(error))
            return True
        self.report.record_finished(case, got)
        return True

    async def _lost(
        self, case: ChaosCase, url: str, got: StreamResponse, began: float, error: httpx.TransportError
    ) -> bool:
        """A connection that ended: excused if its gateway was struck, during the answer or not long before it began."""
        since = began if got.tokens else began - EXCUSED_S
        if not any(at >= since for at in self.stack.faults_at.get(url, ())):
            self.report.record_error(case, got, f"{type(error).__name__}: {error}")
            return True
        self.report.record_retry(case, got)
        await asyncio.sleep(BREAK_S)
        return False

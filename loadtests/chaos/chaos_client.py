"""A client that streams one request after another, and compares each answer with the expected one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random

import httpx

from loadtests.chaos.chaos_cases import ChaosCase, UnexpectedAnswerError, opened
from loadtests.chaos.chaos_report import ChaosReport
from loadtests.chaos.chaos_stack import ChaosStack
from loadtests.received_stream import ReceivedStream, StreamError

EXCUSED_S = 60.0
"""After a fault a gateway may refuse or drop connections this long: it drains, and is started again."""
REQUEST_S = 240.0
"""Time limit of a request with all its retries; beyond it the request is an error."""
RETRY_DELAY_S = 0.2
BUSY = (429, 503)
NOT_FOUND = 404
LEAVE_SHARE = 0.002
"""The share of a stream's lines after which the client leaves, to resume at another gateway."""


@dataclass(slots=True)
class ChaosClient:
    stack: ChaosStack
    http: httpx.AsyncClient
    report: ChaosReport
    random: Random

    async def run(self, cases: list[ChaosCase], stop: asyncio.Event) -> None:
        """Send one request after another until `stop` is set; the last one is finished."""
        while not stop.is_set():
            await self.request(self.random.choice(cases))

    async def request(self, case: ChaosCase) -> None:
        """Try the gateways in turn until one answers to the end."""
        urls = list(self.stack.urls.values())
        turn = self.random.randrange(len(urls))
        got = ReceivedStream()
        try:
            async with asyncio.timeout(REQUEST_S):
                while not await self._attempt(case, urls[turn % len(urls)], got):
                    turn += 1
                    if not got.last_id:
                        got = ReceivedStream()
        except TimeoutError:
            self.report.record_error(case, got, f"no answer within {REQUEST_S:g} s")

    async def _attempt(self, case: ChaosCase, url: str, got: ReceivedStream) -> bool:
        """Send the request once, or resume it after what `got` has. False: try again."""
        clock = asyncio.get_running_loop().time
        began, before, resumed = clock(), len(got.tokens), bool(got.last_id)
        try:
            async with opened(self.http, url, case.body, got.last_id) as lines:
                self.report.resumed += resumed
                async for line in lines:
                    got.feed(line)
                    if got.last_id and self.random.random() < LEAVE_SHARE:
                        self.report.left += 1
                        return False
            got.require_end()
        except UnexpectedAnswerError as error:
            return await self._refused(case, got, error)
        except httpx.TransportError as error:
            since = began if len(got.tokens) > before else began - EXCUSED_S
            return await self._connection_lost(case, url, got, since, error)
        except StreamError as error:
            if error.temporary and got.last_id:
                self.report.refused += 1
                await asyncio.sleep(RETRY_DELAY_S)
                return False
            self.report.record_error(case, got, str(error))
            return True
        self.report.record_finished(case, got)
        return True

    async def _refused(self, case: ChaosCase, got: ReceivedStream, error: UnexpectedAnswerError) -> bool:
        """An answer other than 200. What Redis has lost with its memory begins again."""
        if error.status == NOT_FOUND and got.last_id:
            self.report.record_restart(case, got)
            got.last_id = ""
            return False
        if error.status not in BUSY:
            self.report.record_error(case, got, str(error))
            return True
        self.report.refused += 1
        await asyncio.sleep(min(error.retry_after_s, 1.0))
        return False

    async def _connection_lost(
        self, case: ChaosCase, url: str, got: ReceivedStream, since: float, error: httpx.TransportError
    ) -> bool:
        """A connection broke: excused if its gateway had a fault during the answer, or up to EXCUSED_S before one that
        did not begin."""
        if not any(at >= since for at in self.stack.faults_at.get(url, ())):
            self.report.record_error(case, got, f"{type(error).__name__}: {error}")
            return True
        self.report.record_retry(case, got)
        await asyncio.sleep(RETRY_DELAY_S)
        return False

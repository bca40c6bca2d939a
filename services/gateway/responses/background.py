"""Responses that run without a client (`background`): each has one gateway at a time, and outlives it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing, suppress

from paceline.state.periodic_task import PeriodicTask
from paceline.state.state_errors import StateUnavailableError
from paceline_services.gateway.api_errors import ApiError, InvalidRequestError, RetryLaterError, UnavailableError
from paceline_services.gateway.auth import ApiClient
from paceline_services.gateway.generation.journal import Journal, StreamLeftError
from paceline_services.gateway.generation.resumption import check, resumable
from paceline_services.gateway.responses.generation import ResponseGeneration, ResponseRequests

log = logging.getLogger(__name__)

LEASE_S = 5.0
"""After a gateway was silent for so long, another one goes on with its responses."""
HANDED_OVER_S = 0.001
"""The lease of a response that any gateway may take over."""


class BackgroundResponses(PeriodicTask):
    """The responses that this gateway generates in the background. Takes over those of gateways that are gone."""

    interval_s = 1.0

    def __init__(self, requests: ResponseRequests, client_named: Callable[[str], ApiClient | None]) -> None:
        """`client_named`: the client with this API key, if the key is still valid."""
        self._requests = requests
        self._client_named = client_named
        self._running: dict[asyncio.Task[None], Journal] = {}

    async def begin(self, journal: Journal, made: ResponseGeneration) -> None:
        """Generate a new response. Raises `InvalidRequestError` or `UnavailableError` if it cannot be kept."""
        if not (self._requests.journals.enabled and self._requests.history.enabled):
            raise InvalidRequestError("background: this server keeps no responses or streams", param="background")
        check(journal, [made.request])
        if not await journal.lease(LEASE_S):
            message = "background: it takes Redis, which does not answer; try again soon"
            raise UnavailableError(message, code="resumption_unavailable")
        self._start(journal, made)

    async def run_once(self) -> None:
        """Prolong the leases, and take over what nobody runs."""
        for task, journal in list(self._running.items()):
            try:
                await journal.renew()
            except StreamLeftError:  # this gateway was silent for too long
                task.cancel()
        with suppress(StateUnavailableError, UnavailableError):
            self._requests.models.check_available()
            mine = {journal.id for journal in self._running.values()}
            for journal in await self._requests.journals.unleased():
                if journal.id not in mine:
                    await self._take_over(journal)

    async def __aexit__(self, *exc: object) -> None:
        """Leave what runs to other gateways."""
        await super().__aexit__(*exc)
        left = dict(self._running)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for journal in left.values():
            await journal.lease(HANDED_OVER_S)

    async def _take_over(self, journal: Journal) -> None:
        client = self._client_named(journal.client)
        if client is None:
            await self._requests.journals.delete(journal.client, journal.id)
            return
        try:
            made = await self._requests.prepare(journal, client)
        except ApiError as error:  # such as a model that other gateways serve
            log.debug("response resp_%s cannot go on here: %s", journal.id, error)
            return
        if await journal.lease(LEASE_S):
            log.info("response resp_%s goes on here", journal.id)
            self._start(journal, made)

    def _start(self, journal: Journal, made: ResponseGeneration) -> None:
        task = asyncio.create_task(self._generate(journal, made), name=f"background resp_{journal.id}")
        self._running[task] = journal
        task.add_done_callback(self._running.pop)

    async def _generate(self, journal: Journal, made: ResponseGeneration) -> None:
        """Generate a response to its end. Its lease runs out if another gateway should try."""
        deltas = resumable(journal, made.model, [made.request], made.client, streamed=True)
        try:
            async with aclosing(made.events(deltas)) as events:
                async for _ in events:
                    pass
        except (RetryLaterError, StreamLeftError) as error:
            log.warning("response resp_%s does not end here: %s", journal.id, error)
            return
        except ApiError as error:  # before the first token
            log.warning("response resp_%s failed: %s", journal.id, error)
        except Exception:
            log.exception("response resp_%s does not end here", journal.id)
            return
        await journal.lease(0.0)

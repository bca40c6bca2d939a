"""The pool of draft workers as a target's event loop sees it: a link to each, and their sessions by number."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from paceline.config import MAPPING_HINT
from paceline.wire.draft_codec import DraftDescription
from paceline.wire.draft_link import DraftLink, DraftLinkConfig, IncompatibleWorkerError, LinkObserver, NullLinkObserver
from paceline.wire.session_messages import (
    ConnectDrafts,
    SendDraftFrame,
    SessionDown,
    SessionEvent,
    SessionEventHandler,
    SessionUp,
)


class DraftPool:
    """Belongs to the event loop. `tell` hears what happens, for `RemoteDrafting` at the engine."""

    def __init__(
        self,
        terms: DraftLinkConfig,
        tell: SessionEventHandler,
        layers: int = 0,
        observer: LinkObserver = NullLinkObserver(),  # noqa: B008 - it has no state
    ) -> None:
        """`layers`: of the target."""
        self._terms = terms
        self._on_event = tell
        self._observer = observer
        self._layers = layers
        self._links: dict[str, DraftLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._sessions: dict[int, DraftLink] = {}

    def connect(self, wish: ConnectDrafts) -> None:
        """Reach for these workers, so that they are there when a request names them."""
        for address in wish.addresses:
            if address not in self._links:
                link = self._links[address] = self._new_link(address)
                task = asyncio.create_task(self._run_link(link), name=f"link to draft {address}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    @property
    def connected(self) -> list[str]:
        """Addresses of the workers that are up. Any thread."""
        return [link.address for link in list(self._sessions.values())]

    def send(self, said: SendDraftFrame) -> None:
        """Send this on its session. If that has ended, nobody wants to hear it any more."""
        link = self._sessions.get(said.session_id)
        if link is not None and link.session is not None:
            link.session.send(said.frame)

    async def stop(self) -> None:
        """End every link. The workers forget what was open on them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _new_link(self, address: str) -> DraftLink:
        return DraftLink(address, self._terms, self._admit, self._tell, self._numbers, self._observer)

    def _tell(self, event: SessionEvent) -> None:
        if isinstance(event, SessionUp):
            self._sessions[event.session_id] = self._links[event.address]
        elif isinstance(event, SessionDown):
            del self._sessions[event.number]
        self._on_event(event)

    def _admit(self, worker: DraftDescription) -> None:
        """Raises `IncompatibleWorkerError` if this worker cannot draft for this target."""
        expected = self._terms.vocabulary_fingerprint
        if worker.vocabulary_fingerprint not in ("", expected):
            raise IncompatibleWorkerError(
                f"its vocabulary {worker.vocabulary_fingerprint} is not the target's {expected}: "
                f"start it with a draft model that shares the target's tokenizer, {MAPPING_HINT}"
            )
        if wanted := tuple(worker.hidden_state_layers):
            self._check_layers(wanted)

    def _check_layers(self, wanted: Sequence[int]) -> None:
        """The target sends the same hidden states to all: what the first one asks for, until none is left of its kind.

        Raises `IncompatibleWorkerError`.
        """
        most = self._layers + 1  # the final norm's output
        if len(set(wanted)) < len(wanted) or max(wanted) > most:
            raise IncompatibleWorkerError(f"it asks for hidden states of layers {wanted}, this target has 0 to {most}")
        for link in self._sessions.values():
            sent = link.session.description.hidden_state_layers if link.session is not None else ()
            if sent and tuple(sent) != wanted:
                raise IncompatibleWorkerError(
                    f"it asks for hidden states of layers {wanted}, and draft {link.address} has those of "
                    f"{tuple(sent)}: a target's drafts have to ask for the same"
                )

    async def _run_link(self, link: DraftLink) -> None:
        try:
            await link.run()
        finally:
            del self._links[link.address]

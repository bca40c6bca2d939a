"""The draft worker's loop: one thread that owns a speculator and grows trees for many links.

    take in what the links said → grow, one round → hand out the new nodes

A link is one target. It may say anything at any time, from any thread; it waits for nothing. When no open
request is worth another guess, the loop sleeps until somebody says something.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from paceline.messages import Timings
from paceline.speculators.base import Commit, Context, DraftError, Opening, Speculator
from paceline.telemetry.round import RoundStats
from paceline.tree import Growth


@dataclass(frozen=True, slots=True)
class Close:
    """The target needs no more guesses for this request."""

    request_id: int


Said = Opening | Context | Commit | Close


@dataclass(slots=True)
class Grown:
    """What rounds of the loop have for one link: nodes by request, requests that cannot be drafted and why.

    `applied` counts what the link said (`Link.say`) and the speculator has been told.
    """

    growths: list[tuple[int, Growth]] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)
    applied: int = 0
    timings: Timings = field(default_factory=Timings)


class Link:
    """One target's requests. Made by `GrowingLoop.attach`."""

    def __init__(self, inbox: queue.SimpleQueue[_Mail], deliver: Callable[[Grown], None]) -> None:
        self._inbox = inbox
        # The rest belongs to the loop's thread.
        self.deliver = deliver
        self.requests: dict[int, int] = {}  # the speculator's ids by the link's
        self.news = Grown()

    def say(self, said: Sequence[Said]) -> None:
        """Tell the speculator all this, in this order, before it grows again. Any thread."""
        self._inbox.put(_Mail(self, said))

    def leave(self) -> None:
        """Close every request of this link. A delivery that is under way may still come. Any thread."""
        self._inbox.put(_Mail(self, None))


@dataclass(frozen=True, slots=True)
class _Mail:
    link: Link | None  # None: the loop is to stop
    said: Sequence[Said] | None  # None: the link leaves
    sent_at: float = field(default_factory=time.perf_counter)


class GrowingLoop:
    """Owns the speculator; only `run` touches it."""

    def __init__(self, speculator: Speculator, observe: Callable[[RoundStats], None] = lambda stats: None) -> None:
        """`observe` is told about every round, on the loop's thread."""
        self._speculator = speculator
        self._observe = observe
        self._inbox: queue.SimpleQueue[_Mail] = queue.SimpleQueue()
        self._owners: dict[int, tuple[Link, int]] = {}  # by the speculator's id: the link, and its id there
        self._next_id = 1
        self._dropped = 0
        self._stopping = False

    def attach(self, deliver: Callable[[Grown], None]) -> Link:
        """A new link. `deliver` is called from the loop's thread after each round that concerns it."""
        return Link(self._inbox, deliver)

    def stop(self) -> None:
        """`run` returns after the round at hand. Any thread."""
        self._inbox.put(_Mail(None, None))

    def run(self) -> None:
        """The loop, until `stop`. Errors of the speculator other than `DraftError` end it."""
        idle = True
        while True:
            heard, queue_s = self._take_in(wait=idle)
            if self._stopping:
                return
            began = time.perf_counter()
            grown = self._speculator.grow()
            compute_s = time.perf_counter() - began
            idle = not grown and not self._speculator.behind
            self._report(grown, compute_s)
            self._hand_out(grown, heard, Timings(queue_s, compute_s, queue_s + compute_s))

    def _take_in(self, *, wait: bool) -> tuple[set[Link], float]:
        """Apply what has been said; return who said it, and how long the oldest of it waited, in seconds."""
        heard: set[Link] = set()
        queue_s = 0.0
        while mail := self._next_mail(wait=wait and not heard and not self._stopping):
            queue_s = max(queue_s, time.perf_counter() - mail.sent_at)
            if mail.link is None:
                self._stopping = True
            elif mail.said is None:
                self._forget(mail.link)
                heard.discard(mail.link)
            else:
                self._apply(mail.link, mail.said)
                heard.add(mail.link)
        return heard, queue_s

    def _next_mail(self, *, wait: bool) -> _Mail | None:
        try:
            return self._inbox.get(block=wait)
        except queue.Empty:
            return None

    def _apply(self, link: Link, said: Sequence[Said]) -> None:
        link.news.applied += 1
        for each in said:
            try:
                self._tell(link, each)
            except DraftError as error:
                self._close(link, each.request_id)
                link.news.dropped[each.request_id] = str(error)
                self._dropped += 1

    def _tell(self, link: Link, said: Said) -> None:
        """What concerns requests that are not open is late, and dropped."""
        if isinstance(said, Opening):
            self._open(link, said)
        elif isinstance(said, Close):
            self._close(link, said.request_id)
        elif (own_id := link.requests.get(said.request_id)) is None:
            return
        elif isinstance(said, Commit):
            self._speculator.commit(replace(said, request_id=own_id))
        else:
            self._speculator.context(replace(said, request_id=own_id))

    def _open(self, link: Link, opening: Opening) -> None:
        own_id = self._next_id
        self._next_id += 1
        link.requests[opening.request_id] = own_id
        self._owners[own_id] = link, opening.request_id
        self._speculator.open(replace(opening, request_id=own_id))

    def _close(self, link: Link, request_id: int) -> None:
        if (own_id := link.requests.pop(request_id, None)) is not None:
            del self._owners[own_id]
            self._speculator.close(own_id)

    def _forget(self, link: Link) -> None:
        for request_id in list(link.requests):
            self._close(link, request_id)

    def _report(self, grown: dict[int, Growth], compute_s: float) -> None:
        nodes = sum(len(growth.node_ids) for growth in grown.values())
        self._observe(RoundStats(compute_s, nodes, self._dropped))
        self._dropped = 0

    def _hand_out(self, grown: dict[int, Growth], heard: set[Link], timings: Timings) -> None:
        """Every link gets its share, and those that said something learn that it was applied."""
        for own_id, growth in grown.items():
            link, request_id = self._owners[own_id]
            link.news.growths.append((request_id, growth))
            heard.add(link)
        for link in heard:
            news, link.news = link.news, Grown(applied=link.news.applied)
            news.timings = timings
            link.deliver(news)

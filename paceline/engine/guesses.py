"""Where an engine's guesses come from: who drafts for which request, what they sent, and whether to wait for more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paceline.budget import Worth
from paceline.engine.drafting import Drafting, News
from paceline.engine.request import Request
from paceline.engine.waiting import Clock, Waiting
from paceline.speculators.base import Commit, Context
from paceline.tree import Growth

POOL, BESIDE = SOURCES = (0, 1)
"""Whose guesses a tree tells apart: those of a request's draft, and of who drafts for all in this process."""
HOPED = 1.0
"""Guesses per step that a draft nobody knows may bring."""
RETRY_DRAFT_S = 0.5
"""How often a request without a draft looks for one."""


class Guesses:
    """Belongs to one engine."""

    def __init__(
        self,
        drafting: Drafting,
        beside: Drafting,
        strategy: str,
        waiting: Waiting,
        vocabulary_size: int,
        clock: Clock,
    ) -> None:
        """`drafting`: finds each request a draft. `beside`: drafts for every request, too. `strategy`: by its name."""
        self.received = 0
        """Nodes that came."""
        self.grafted = 0
        """Those of them that joined a tree."""
        self._drafting = drafting
        self._beside = beside
        self._strategy = strategy
        self._waiting = waiting
        self._vocabulary_size = vocabulary_size
        self._clock = clock
        self._brings: dict[str, float] = {}
        """By draft: guesses that it brings per step, over all requests."""

    def find_drafts(self, requests: Iterable[Request]) -> None:
        """Look for a draft for each of these that has none and has not looked lately."""
        now = self._clock()
        for request in requests:
            if request.speculative and not request.beside:
                request.beside = True
                self._beside.open(request.opening(self._strategy, self._waiting.ahead), ())
        seeking = [r for r in requests if r.speculative and r.draft is None and r.retry_draft_at <= now]
        for request in seeking:
            request.tree.forget_ids()
            opening = request.opening(self._strategy, self._waiting.ahead)
            request.draft = self._drafting.open(opening, request.submission.drafts)
            request.retry_draft_at = now + RETRY_DRAFT_S
            if request.draft is not None:
                request.stats.drafts.append(request.draft)
                self._start_judging(request)
        if seeking:
            self._drafting.flush()

    def context(self, context: Context) -> None:
        self._drafting.context(context)

    def commit(self, commit: Commit) -> None:
        self._drafting.commit(commit)
        self._beside.commit(commit)

    def close(self, key: int) -> None:
        self._drafting.close(key)
        self._beside.close(key)

    def flush(self) -> None:
        """Send what was said."""
        self._drafting.flush()

    def judge(self, request: Request, offered: bool, accepted: int) -> None:
        """A step committed so many guesses of a request's draft. One that does not pay is paused for a while.

        Not `offered`: it had no guess in time, which says nothing of what its guesses are worth.
        """
        if request.draft is None or not (offered or request.worth.paused):
            return
        if request.worth.observe(accepted):
            self._drafting.limit(request.limit(self._waiting.ahead))
        if not request.worth.paused:
            brings = self._brings.get(request.draft, HOPED)
            self._brings[request.draft] = brings + Worth.LEARNING / 4 * (accepted - brings)

    def _start_judging(self, request: Request) -> None:
        """A new draft is judged by what it brings to others."""
        assert request.draft is not None
        request.worth = Worth(self._brings.get(request.draft, HOPED))
        if request.worth.paused:
            self._drafting.limit(request.limit(self._waiting.ahead))

    def take_in(self, requests: Mapping[int, Request]) -> None:
        """Graft what has arrived."""
        self._absorb(self._drafting.poll(0.0), requests, POOL)
        self._absorb(self._beside.poll(0.0), requests, BESIDE)

    def wait(self, requests: Mapping[int, Request], drawing: Sequence[Request]) -> None:
        """Take in more for as long as that pays: `drawing` is all that the next step would run."""

        def receive(timeout_s: float) -> bool:
            news = self._drafting.poll(timeout_s)
            self._absorb(news, requests, POOL)
            return bool(news)

        if any(request.drafted and request.depth_allowed() > 0 for request in drawing):
            self._waiting.wait(drawing, receive)

    def _absorb(self, news: News, requests: Mapping[int, Request], source: int) -> None:
        for key, growth in news.grown:
            self.received += len(growth)
            request = requests.get(key)
            if request is not None and (source == BESIDE or not request.worth.paused) and self._knows(growth):
                self.grafted += request.tree.graft(growth, request.most_held, source)
        for key in news.lost:
            request = requests.get(key)
            if request is not None and source == POOL:
                request.draft, request.retry_draft_at = None, 0.0

    def _knows(self, growth: Growth) -> bool:
        """Whether all tokens can be run. A draft of the same vocabulary may be padded to more ids than the target."""
        return min(growth.tokens, default=0) >= 0 and max(growth.tokens, default=0) < self._vocabulary_size

"""Where an engine's guesses come from: who drafts for which request, what they sent, and whether to wait for more."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from paceline.budget import Patience, RowCost
from paceline.engine.drafting import Drafting, News
from paceline.engine.request import Request
from paceline.engine.scheduler import outlook
from paceline.tree import Growth

RETRY_DRAFT_S = 0.5
"""How often a request without a draft looks for one."""


class Guesses:
    """Belongs to one engine."""

    def __init__(self, drafting: Drafting, strategy: str, cost: RowCost, vocabulary_size: int) -> None:
        """`strategy`: by its name. `cost`: of the target's passes."""
        self.received = 0
        """Nodes that came."""
        self.grafted = 0
        """Those of them that joined a tree."""
        self._drafting = drafting
        self._strategy = strategy
        self._cost = cost
        self._vocabulary_size = vocabulary_size
        self._patience = Patience()

    def find_drafts(self, requests: Iterable[Request]) -> None:
        """Look for a draft for each of these that has none and has not looked lately."""
        now = time.perf_counter()
        seeking = [r for r in requests if r.speculative and r.draft is None and r.retry_draft_at <= now]
        for request in seeking:
            request.tree.forget_ids()
            request.draft = self._drafting.open(request.opening(self._strategy), request.submission.drafts)
            request.retry_draft_at = now + RETRY_DRAFT_S
            if request.draft is not None:
                request.stats.drafts.append(request.draft)
        if seeking:
            self._drafting.flush()

    def take_in(self, requests: Mapping[int, Request]) -> None:
        """Graft what has arrived."""
        self._absorb(self._drafting.poll(0.0), requests)

    def wait(self, requests: Mapping[int, Request], drawing: Sequence[Request]) -> None:
        """Take in more for as long as that pays: `drawing` is all that the next step would run."""
        if not any(request.draft is not None and request.depth_allowed() > 0 for request in drawing):
            return
        waited_s = 0.0
        now = outlook(drawing, self._cost)
        while wait_s := self._patience.wait_s(now.height, now.tokens, now.step_s + waited_s):
            start = time.perf_counter()
            news = self._drafting.poll(wait_s)
            self._absorb(news, requests)
            delay_s = time.perf_counter() - start
            before, now = now, outlook(drawing, self._cost)
            self._patience.observe(before.height, now.tokens - before.tokens, delay_s)
            waited_s += delay_s
            if not news:
                return

    def _absorb(self, news: News, requests: Mapping[int, Request]) -> None:
        for key, growth in news.grown:
            self.received += len(growth.node_ids)
            request = requests.get(key)
            if request is not None and self._knows(growth):
                self.grafted += request.tree.graft(growth, request.most_held)
        for key in news.lost:
            request = requests.get(key)
            if request is not None:
                request.draft, request.retry_draft_at = None, 0.0

    def _knows(self, growth: Growth) -> bool:
        """Whether all tokens can be run. A draft of the same vocabulary may be padded to more ids than the target."""
        return min(growth.tokens, default=0) >= 0 and max(growth.tokens, default=0) < self._vocabulary_size

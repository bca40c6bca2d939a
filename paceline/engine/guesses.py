"""Where an engine's guesses come from: who drafts for which request, what they sent, and whether to wait for more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from paceline.budget import Worth
from paceline.engine.drafting import Drafting, News
from paceline.engine.request import POOL, Request
from paceline.engine.trial import Trial
from paceline.engine.waiting import Clock, Waiting
from paceline.growth import Growth
from paceline.speculators.base import Commit, Context, Opening
from paceline.speculators.by_law import WORD

RETRY_DRAFT_S = 0.5
"""How often a request without a draft looks for one."""
REMEMBERED = 256
"""Drafts that are not forgotten while they draft for nobody."""


class Guesses:
    """Belongs to one engine."""

    def __init__(
        self,
        drafting: Drafting,
        beside: Sequence[Drafting],
        strategy: str,
        waiting: Waiting,
        vocabulary_size: int,
        clock: Clock,
        *,
        judged: bool,
        by_law: bool = False,
    ) -> None:
        """`drafting`: finds each request a draft. `beside`: draft for every request, too. `strategy`: by its name.
        `judged`: whether drafts are paused, and told what a row is worth. `by_law`: as the strategy's."""
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
        self._judged = judged
        self._by_law = by_law
        self._trials: dict[str, Trial] = {}
        """By draft. None where nobody is judged."""
        self._trial_of: dict[int, Trial] = {}
        """By request that has a draft that is judged."""

    def find_drafts(self, requests: Iterable[Request]) -> None:
        """Look for a draft for each of these that has none and has not looked lately."""
        now = self._clock()
        for request in requests:
            if request.speculative and not request.beside:
                request.beside = True
                for each in self._beside:
                    each.open(self._opening(request), ())
        seeking = [r for r in requests if r.speculative and r.draft is None and r.retry_draft_at <= now]
        for request in seeking:
            request.tree.forget_ids()
            request.told = 0
            request.draft = self._drafting.open(self._opening(request), request.submission.drafts)
            request.retry_draft_at = now + RETRY_DRAFT_S
            if request.draft is not None:
                request.stats.drafts.append(request.draft)
                if self._judged:
                    trial = self._trial_of[request.key] = self._trial(request.draft)
                    trial.join(request)
        if seeking:
            self._drafting.flush()

    def context(self, context: Context) -> None:
        self._drafting.context(context)

    def commit(self, commit: Commit) -> None:
        self._drafting.commit(commit)
        for each in self._beside:
            each.commit(commit)

    def close(self, key: int) -> None:
        self._leave(key)
        self._drafting.close(key)
        for each in self._beside:
            each.close(key)

    def flush(self) -> None:
        """Send what was said."""
        self._drafting.flush()

    def count(self, request: Request, accepted: int) -> None:
        """A step committed so many guesses of a request's draft."""
        if trial := self._trial_of.get(request.key):
            trial.count(request, accepted)

    def judge(self, refused: float, lost: float) -> None:
        """A step has ended. Drafts that do not pay are paused for a while; all are told what nobody would verify.

        `refused`: path probability of the likeliest guess that had no row. `lost`: tokens that drafting cost each
        request that has a draft.
        """
        for trial in self._trials.values():
            trial.judge(lost)
        if self._judged and self._waiting.refused(refused):
            for trial in self._trials.values():
                for request in trial.requests.values():
                    self._limit(request)

    def _opening(self, request: Request) -> Opening:
        return request.opening(self._strategy, self._waiting.ahead, self._waiting.wanted)

    def _limit(self, request: Request) -> None:
        self._drafting.limit(request.limit(self._waiting.ahead, self._waiting.wanted))

    def _trial(self, draft: str) -> Trial:
        if draft not in self._trials:
            idle = [name for name, trial in self._trials.items() if not trial.requests]
            for name in idle[: max(0, len(self._trials) - REMEMBERED)]:
                del self._trials[name]
            self._trials[draft] = Trial(self._limit, None if self._drafting.concurrent else Worth.PAUSE_LOCAL)
        return self._trials[draft]

    def _leave(self, key: int) -> None:
        if trial := self._trial_of.pop(key, None):
            trial.leave(key)

    def gather(self, requests: Mapping[int, Request], drawing: Sequence[Request]) -> None:
        """Graft what has arrived, and what those guess at once who draft for all; then wait for as long as that pays.

        `drawing`: all that the next step would run, or nobody if it computes prompts, which is not held back. A draft
        that has only this process's time gets one round of it beside prompts, and else what that is worth.
        """
        if self._drafting.concurrent or not drawing:
            self._absorb(self._drafting.poll(0.0), requests, POOL)
        for source, each in enumerate(self._beside, POOL + 1):
            self._absorb(each.poll(0.0), requests, source)

        def receive(timeout_s: float) -> bool:
            news = self._drafting.poll(timeout_s)
            self._absorb(news, requests, POOL)
            return bool(news) and news.more

        if any(request.drafted and request.depth_allowed() > 0 for request in drawing):
            self._waiting.wait(drawing, receive)

    def _absorb(self, news: News, requests: Mapping[int, Request], source: int) -> None:
        for key, growth in news.grown:
            self.received += len(growth)
            request = requests.get(key)
            if request is not None and (source != POOL or not request.paused) and self._knows(growth):
                if self._by_law:  # from a guess itself nothing may follow for whether it is verified
                    growth.log_probs = [WORD] * len(growth)
                request.heard |= source == POOL
                self.grafted += request.tree.graft(growth, request.most_held, source)
        for key in news.lost:
            request = requests.get(key)
            if request is not None and source == POOL:
                request.draft, request.retry_draft_at = None, 0.0
                self._leave(key)

    def _knows(self, growth: Growth) -> bool:
        """Whether all tokens can be run. A draft of the same vocabulary may be padded to more ids than the target."""
        tokens = [*growth.tokens, *chain.from_iterable(growth.laws)] if growth.laws else growth.tokens
        return min(tokens, default=0) >= 0 and max(tokens, default=0) < self._vocabulary_size

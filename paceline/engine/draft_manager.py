"""Where an engine's guesses come from: who drafts for which request, what they sent, and whether to wait for more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from paceline.core.growth import Growth
from paceline.core.policy.draft_gate import DraftGate
from paceline.drafting.sampled_drafts import SAMPLED_DRAFT_SCORE
from paceline.drafting.speculator import Commit, Context, Opening
from paceline.engine.draft_client import DraftClient, DraftUpdates
from paceline.engine.draft_schedule import Clock, DraftSchedule
from paceline.engine.request import POOL_SOURCE, Request
from paceline.engine.worker_gate import WorkerGate

DRAFT_RETRY_S = 0.5
"""How often a request without a draft looks for one."""
MAX_IDLE_GATES = 256
"""Drafts that are not forgotten while they draft for nobody."""


class DraftManager:
    """Belongs to one engine."""

    def __init__(
        self,
        drafting: DraftClient,
        beside: Sequence[DraftClient],
        strategy: str,
        waiting: DraftSchedule,
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
        self._lookup_drafts = beside
        self._strategy = strategy
        self._schedule = waiting
        self._vocabulary_size = vocabulary_size
        self._clock = clock
        self._gated = judged
        self._sampled_drafts = by_law
        self._gates: dict[str, WorkerGate] = {}
        """By draft. None where nobody is judged."""
        self._gate_of: dict[int, WorkerGate] = {}
        """By request that has a draft that is judged."""

    def find_drafts(self, requests: Iterable[Request]) -> None:
        """Look for a draft for each of these that has none and has not looked lately."""
        now = self._clock()
        for request in requests:
            if request.speculative and not request.lookups_opened:
                request.lookups_opened = True
                for each in self._lookup_drafts:
                    each.open(self._opening(request), ())
        seeking = [r for r in requests if r.speculative and r.draft is None and r.retry_draft_at <= now]
        for request in seeking:
            request.tree.forget_ids()
            request.hidden_states_sent = 0
            request.draft = self._drafting.open(self._opening(request), request.submission.drafts)
            request.retry_draft_at = now + DRAFT_RETRY_S
            if request.draft is not None:
                request.stats.drafts.append(request.draft)
                if self._gated:
                    trial = self._gate_of[request.key] = self._gate_for(request.draft)
                    trial.add(request)
        if seeking:
            self._drafting.flush()

    def context(self, context: Context) -> None:
        self._drafting.context(context)

    def commit(self, commit: Commit) -> None:
        self._drafting.commit(commit)
        for each in self._lookup_drafts:
            each.commit(commit)

    def close(self, key: int) -> None:
        self._leave(key)
        self._drafting.close(key)
        for each in self._lookup_drafts:
            each.close(key)

    def flush(self) -> None:
        """Send what was said."""
        self._drafting.flush()

    def record_accepted(self, request: Request, accepted: int) -> None:
        """A step committed so many guesses of a request's draft."""
        if trial := self._gate_of.get(request.key):
            trial.record_accepted(request, accepted)

    def end_step(self, refused: float, lost: float) -> None:
        """A step has ended. Drafts that do not pay are paused for a while; all are told what nobody would verify.

        `refused`: path probability of the likeliest guess that had no row. `lost`: tokens that drafting cost each
        request that has a draft.
        """
        for trial in self._gates.values():
            trial.end_step(lost)
        if self._gated and self._schedule.observe_unverified(refused):
            for trial in self._gates.values():
                for request in trial.requests.values():
                    self._limit(request)

    def _opening(self, request: Request) -> Opening:
        return request.opening(self._strategy, self._schedule.depth_factor, self._schedule.min_path_probability)

    def _limit(self, request: Request) -> None:
        self._drafting.limit(request.limit(self._schedule.depth_factor, self._schedule.min_path_probability))

    def _gate_for(self, draft: str) -> WorkerGate:
        if draft not in self._gates:
            idle = [name for name, trial in self._gates.items() if not trial.requests]
            for name in idle[: max(0, len(self._gates) - MAX_IDLE_GATES)]:
                del self._gates[name]
            self._gates[draft] = WorkerGate(
                self._limit, None if self._drafting.concurrent else DraftGate.PAUSE_LOCAL_BELOW
            )
        return self._gates[draft]

    def _leave(self, key: int) -> None:
        if trial := self._gate_of.pop(key, None):
            trial.remove(key)

    def receive_growth(self, requests: Mapping[int, Request], drawing: Sequence[Request]) -> None:
        """Graft what has arrived, and what those guess at once who draft for all; then wait for as long as that pays.

        `drawing`: all that the next step would run, or nobody if it computes prompts, which is not held back. A draft
        that has only this process's time gets one round of it beside prompts, and else what that is worth.
        """
        if self._drafting.concurrent or not drawing:
            self._graft_updates(self._drafting.poll(0.0), requests, POOL_SOURCE)
        for source, each in enumerate(self._lookup_drafts, POOL_SOURCE + 1):
            self._graft_updates(each.poll(0.0), requests, source)

        def receive(timeout_s: float) -> bool:
            news = self._drafting.poll(timeout_s)
            self._graft_updates(news, requests, POOL_SOURCE)
            return bool(news) and news.may_continue

        if any(request.drafted and request.depth_allowed() > 0 for request in drawing):
            self._schedule.wait(drawing, receive)

    def _graft_updates(self, news: DraftUpdates, requests: Mapping[int, Request], source: int) -> None:
        for key, growth in news.growths:
            self.received += len(growth)
            request = requests.get(key)
            if request is not None and (source != POOL_SOURCE or not request.paused) and self._tokens_valid(growth):
                if self._sampled_drafts:  # from a guess itself nothing may follow for whether it is verified
                    growth.log_probs = [SAMPLED_DRAFT_SCORE] * len(growth)
                request.draft_started |= source == POOL_SOURCE
                self.grafted += request.tree.graft(growth, request.max_tree_nodes, source)
        for key in news.lost:
            request = requests.get(key)
            if request is not None and source == POOL_SOURCE:
                request.draft, request.retry_draft_at = None, 0.0
                self._leave(key)

    def _tokens_valid(self, growth: Growth) -> bool:
        """Whether all tokens can be run. A draft of the same vocabulary may be padded to more ids than the target."""
        tokens = [*growth.tokens, *chain.from_iterable(growth.distributions)] if growth.distributions else growth.tokens
        return min(tokens, default=0) >= 0 and max(tokens, default=0) < self._vocabulary_size

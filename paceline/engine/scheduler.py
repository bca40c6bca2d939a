"""Which rows the next step runs.

There is no prefill phase and no decode phase. A request has tokens computed and tokens wanted; the scheduler closes
the gap within the step's rows, oldest request first. Where only the root is missing, guesses may ride along.

Places are shared fairly: by clients, then by a client's groups (the choices of one request are a group), then in the
order of arrival. The client with the fewest running requests starts next. If no place is free, the youngest request of
a client that runs two more is preempted.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paceline.config import EngineConfig
from paceline.core.policy.step_cost import StepCost, nodes_to_verify
from paceline.core.tree import ROOT
from paceline.engine.request import POOL_SOURCE, Request
from paceline.engine.slot_pool import OutOfSlotsError, SlotPool


@dataclass(slots=True)
class ScheduledRequest:
    """One request's share of a step: its tokens [start, stop), then guesses, each in a slot of its own."""

    request: Request
    start: int
    stop: int
    nodes: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    @property
    def samples(self) -> bool:
        """Whether the root is run, so that the target draws."""
        return self.stop == len(self.request.tokens)


class Scheduler:
    """Waiting and running requests, and the slots that they share. `running` is ordered by admission, oldest first."""

    def __init__(self, config: EngineConfig, pool: SlotPool, cost: StepCost) -> None:
        self.pool = pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self.best_unverified = 0.0
        """Path probability of the likeliest guess that the last step had no row for."""
        self._config = config
        self._cost = cost

    def schedule(self) -> list[ScheduledRequest]:
        """Give every running request, and as many waiting ones as fit, their next rows. Slots are taken here."""
        self._preempt_for_fairness()
        rows = self._config.max_num_batched_rows
        works: list[ScheduledRequest] = []
        turn = 0
        while turn < len(self.running):
            request = self.running[turn]
            work = self._next_rows(request, rows)
            if work is not None:
                works.append(work)
                rows -= work.stop - work.start
            turn += self.running[turn : turn + 1] == [request]  # unless it had to give way itself
        while rows and (work := self._admit(rows)) is not None:
            works.append(work)
            rows -= work.stop - work.start
        self._add_draft_nodes(works, rows)
        return works

    def drawing(self) -> Sequence[Request]:
        """All that the next step runs, or nobody if it computes prompts: if one is missing, or one can be admitted."""
        only_draws = all(request.uncomputed_tokens == 1 for request in self.running) and not self._may_admit()
        return self.running if only_draws else ()

    def finish(self, request: Request, *, cached: bool = True) -> None:
        """The request is over, or has something else to wait for; its slots go back. It may be waiting or running.
        `cached`: what was computed may serve others."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.release_slots(self.pool, cached=cached)

    def reset(self) -> None:
        """Forget every request and what was cached, whatever state they are in."""
        self.running.clear()
        self.waiting.clear()
        self.pool = self.pool.emptied()

    def recompute_all(self) -> None:
        """Compute again what running requests have, and nothing of it from the cache."""
        for request in reversed(self.running.copy()):
            self._preempt(request, cached=False)
        self.pool = self.pool.emptied()

    def requests(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

    def _next_rows(self, request: Request, rows: int) -> ScheduledRequest | None:
        """The next missing tokens of a running request. Preempts the youngest while slots are short."""
        start = len(request.slot_table)
        stop = min(len(request.tokens), start + rows)
        while stop > start:
            try:
                request.slot_table.slots.extend(self.pool.allocate(stop - start))
            except OutOfSlotsError:
                victim = self._youngest_of_largest(self.running[self.running.index(request) :])  # others had their turn
                self._preempt(victim)
                if victim is request:
                    return None
            else:
                return ScheduledRequest(request, start, stop)
        return None

    def _may_admit(self) -> bool:
        """Whether a waiting request can start, by what can be told without looking into the cache."""
        if not self.waiting or self._full:
            return False
        return self._next_waiting().uncomputed_tokens <= self.pool.free

    def _admit(self, rows: int) -> ScheduledRequest | None:
        """Start the request whose turn it is if all its tokens fit now.

        Nobody who runs misses a prompt at this point: there would be no rows left.
        """
        if not self.waiting or self._full or not self._has_slots(request := self._next_waiting()):
            return None
        request.attach_prefix(self.pool)
        request.start()
        self.running.append(request)
        self.waiting.remove(request)
        return self._next_rows(request, rows)

    @property
    def _full(self) -> bool:
        """Whether as many run as may: then nobody need be looked for among those that wait."""
        return len(self.running) >= self._config.max_num_seqs

    def _has_slots(self, request: Request) -> bool:
        """Whether a waiting request can start now."""
        if self._full:
            return False
        request.attach_prefix(self.pool)
        fits = request.uncomputed_tokens <= self.pool.free
        request.release_slots(self.pool)
        return fits

    def _next_waiting(self) -> Request:
        """The waiting request whose turn it is."""
        clients, groups = self._running_counts()
        return min(self.waiting, key=lambda each: (clients[each.client], groups[each.group]))

    def _running_counts(self) -> tuple[Counter[str], Counter[tuple[str, str]]]:
        """How many requests run of each client, and of each group."""
        return Counter(each.client for each in self.running), Counter(each.group for each in self.running)

    def _youngest_of_largest(self, requests: Sequence[Request]) -> Request:
        """The youngest of those of whose client, then of whose group, most run."""
        clients, groups = self._running_counts()
        return max(reversed(requests), key=lambda each: (clients[each.client], groups[each.group]))

    def _preempt_for_fairness(self) -> None:
        """Preempt for the request whose turn it is, while it does not fit and somebody has two more running than it."""
        while self.waiting and not self._has_slots(request := self._next_waiting()):
            if (victim := self._fairness_victim(request)) is None:
                return
            self._preempt(victim)

    def _fairness_victim(self, request: Request) -> Request | None:
        """The youngest of a client that has two more running; if there is none, of such a group of the same client."""
        clients, groups = self._running_counts()
        others = [each for each in self.running if clients[each.client] > clients[request.client] + 1]
        same = [each for each in self.running if each.client == request.client]
        crowd = others or [each for each in same if groups[each.group] > groups[request.group] + 1]
        return self._youngest_of_largest(crowd) if crowd else None

    def _preempt(self, request: Request, *, cached: bool = True) -> None:
        """Take its slots away; it waits before its equals and is computed again. Its tree stays."""
        self.running.remove(request)
        request.release_slots(self.pool, cached=cached)
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _add_draft_nodes(self, works: Sequence[ScheduledRequest], rows: int) -> None:
        """Verify the best guesses over all requests. They take what rows and slots are left, nobody's."""
        drawing = [work for work in works if work.samples]
        needed = sum(work.stop - work.start for work in works)
        most = min(rows, self.pool.free)
        guesses = [(work, candidate_nodes(work.request)) for work in drawing]
        paths = [path for work, nodes in guesses for path in map(work.request.tree.path_log_probs.__getitem__, nodes)]
        paths.sort(reverse=True)
        self.best_unverified = 0.0
        if not paths:
            return
        probabilities = list(map(math.exp, paths))
        count = nodes_to_verify(probabilities, len(drawing), needed, most, self._cost)
        self.best_unverified = probabilities[count] if count < len(paths) else 0.0
        if not count:
            return
        least, slots = paths[count - 1], self.pool.allocate(count)
        for work, nodes in guesses:  # each request's are sorted, too: parents before children, and so they are taken
            path_log_probs = work.request.tree.path_log_probs
            for node in nodes:
                if not slots or path_log_probs[node] < least:
                    break
                work.nodes.append(node)
                work.slots.append(slots.pop())


def candidate_nodes(request: Request) -> Sequence[int]:
    """The guesses that a request may have verified in one step, best first."""
    depth = request.depth_allowed()
    return request.tree.best(request.max_nodes, depth) if depth > 0 else []


@dataclass(frozen=True, slots=True)
class StepForecast:
    """What a step would do: `tokens` it is expected to commit, the mean `tree_height` of drafted trees, the number of
    `guesses` that it would verify, and the `seconds` that it would take."""

    tokens: float
    height: int
    nodes: int
    seconds: float


def forecast_step(drawing: Sequence[Request], cost: StepCost) -> StepForecast:
    """Of a step that runs these requests, all of which draw, with the guesses they have."""
    paths: list[float] = []
    heights, drafted = 0, 0
    for request in drawing:
        nodes = candidate_nodes(request)
        paths += map(request.tree.path_log_probs.__getitem__, nodes)
        if request.drafted:
            drafted += 1
            heights += tree_height(request, nodes)
    paths.sort(reverse=True)
    probabilities = list(map(math.exp, paths))
    rows = len(drawing)
    count = nodes_to_verify(probabilities, rows, rows, len(probabilities), cost)
    return StepForecast(
        tokens=rows + sum(probabilities[:count]),
        height=heights // max(drafted, 1),
        nodes=count,
        seconds=cost(rows + count, count),
    )


@dataclass(frozen=True, slots=True)
class DraftFrontier:
    """Expected tokens of a step, by who guessed them: the requests' own drafts, or lookups beside them."""

    own: float
    """Guessed by the drafts, whether or not a lookup guessed the same."""
    deepest: float
    """Guessed by the drafts at their deepest level, if they may go deeper. A root without their guesses counts as 1."""
    covered_by_lookups: float
    """Guessed by lookups right after that level."""


def draft_frontier(drawing: Sequence[Request]) -> DraftFrontier:
    own, ends, beyond = 0.0, 0.0, 0.0
    for request in filter(lambda each: each.drafted, drawing):
        tree = request.tree
        chances = {node: math.exp(tree.path_log_probs[node]) for node in candidate_nodes(request)}
        its = {node: chance for node, chance in chances.items() if tree.guessed_by(POOL_SOURCE, node)}
        own += sum(its.values())
        top = tree_height(request, list(its))
        if top < request.depth_allowed():
            last = {node: chance for node, chance in its.items() if tree.depths[node] == top} or {ROOT: 1.0}
            ends += sum(last.values())
            beyond += sum(chance for node, chance in chances.items() if tree.parents[node] in last)
    return DraftFrontier(own, ends, beyond)


def tree_height(request: Request, nodes: Sequence[int]) -> int:
    """Of the deepest of these guesses above the root."""
    return max(map(request.tree.depths.__getitem__, nodes), default=0)

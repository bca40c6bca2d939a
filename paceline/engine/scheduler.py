"""Which rows the next step runs.

There is no prefill phase and no decode phase. A request has tokens computed and tokens wanted; the scheduler closes
the gap within the step's rows, oldest request first. Where only the root is missing, guesses may ride along.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.budget import RowCost, worthwhile
from paceline.config import EngineConfig
from paceline.engine.request import Request
from paceline.engine.slots import OutOfSlots, SlotPool
from paceline.tree import Node


@dataclass(slots=True)
class Work:
    """One request's share of a step: its tokens [start, stop), then guesses, each in a slot of its own."""

    request: Request
    start: int
    stop: int
    nodes: list[Node] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    @property
    def draws(self) -> bool:
        """Whether the root is run, so that the target draws."""
        return self.stop == len(self.request.tokens)


class Scheduler:
    """Waiting and running requests, and the slots that they share."""

    def __init__(self, config: EngineConfig, pool: SlotPool, cost: RowCost, reuse_prefixes: bool) -> None:
        self.pool = pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._config = config
        self._cost = cost
        self._reuse = reuse_prefixes

    def schedule(self) -> list[Work]:
        """Give every running request, and as many waiting ones as fit, their next rows. Slots are taken here."""
        rows = self._config.max_num_batched_rows
        works: list[Work] = []
        for request in list(self.running):
            if request in self.running and rows:  # preemption may have removed it
                work = self._next_rows(request, rows)
                rows -= work.stop - work.start if work else 0
                works += [work] if work else []
        works = [work for work in works if work.request in self.running]
        while self.waiting and rows and len(self.running) < self._config.max_num_seqs:
            work = self._admit(self.waiting[0], rows)
            if work is None:
                break
            works.append(work)
            rows -= work.stop - work.start
        self._add_guesses(works, rows)
        return works

    def finish(self, request: Request) -> None:
        """The request is over; its slots go back. It may be waiting or running."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.detach(self.pool)

    def requests(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

    def _next_rows(self, request: Request, rows: int) -> Work | None:
        """The next missing tokens of a running request. Preempts the youngest while slots are short."""
        start = len(request.lane)
        stop = min(len(request.tokens), start + rows)
        while True:
            try:
                request.lane.slots += self.pool.take(stop - start)
            except OutOfSlots:
                youngest = self.running[-1]
                self._preempt(youngest)
                if youngest is request:
                    return None
            else:
                return Work(request, start, stop)

    def _admit(self, request: Request, rows: int) -> Work | None:
        """Start a waiting request if all its tokens would fit now. It never preempts."""
        request.attach(self.pool, self._reuse)
        if request.missing > self.pool.free:
            request.detach(self.pool)
            return None
        self.waiting.popleft()
        self.running.append(request)
        return self._next_rows(request, rows)

    def _preempt(self, request: Request) -> None:
        """Take a request's slots away; it waits at the front and is computed again. Its tree stays."""
        self.running.remove(request)
        request.detach(self.pool)
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _add_guesses(self, works: list[Work], rows: int) -> None:
        drawing = [work for work in works if work.draws]
        needed = sum(work.stop - work.start for work in works)
        offers = [(-node.path_log_prob, work, node) for work in drawing for node in best_guesses(work.request)]
        offers.sort(key=lambda offer: offer[0])  # stable: of equal ones, parents stay before children
        probabilities = [math.exp(-offer[0]) for offer in offers]
        most = min(rows, self.pool.free)
        for _, work, node in offers[: worthwhile(probabilities, len(drawing), needed, most, self._cost)]:
            work.nodes.append(node)
            work.slots += self.pool.take(1)


def best_guesses(request: Request) -> list[Node]:
    """The guesses that a request may have verified in one step, best first."""
    depth = request.depth_allowed()
    return request.tree.best(request.max_nodes, depth) if depth > 0 else []


def expected_tokens(requests: list[Request], cost: RowCost) -> tuple[float, int, float]:
    """What a step over these drawing requests would commit now: tokens, the mean height of trees, seconds."""
    guesses = [best_guesses(request) for request in requests]
    probabilities = sorted((math.exp(n.path_log_prob) for nodes in guesses for n in nodes), reverse=True)
    count = worthwhile(probabilities, len(requests), len(requests), len(probabilities), cost)
    height = sum(_height(r, nodes) for r, nodes in zip(requests, guesses, strict=True)) // max(len(requests), 1)
    expected = len(requests) + sum(heapq.nlargest(count, probabilities))
    return expected, height, cost(len(requests) + count)


def _height(request: Request, nodes: list[Node]) -> int:
    return max((node.position for node in nodes), default=request.tree.root.position) - request.tree.root.position

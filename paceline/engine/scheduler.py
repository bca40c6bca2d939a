"""Which rows the next step runs.

There is no prefill phase and no decode phase. A request has tokens computed and tokens wanted. The scheduler closes the
gap within the step's rows, oldest request first. Where only the root is missing, draft nodes may ride along.

The `max_num_seqs` running requests are shared fairly: among clients, then among a client's groups (the choices of one
HTTP request are a group), then by arrival. The client with the fewest running requests starts next. If no more may run,
the youngest request of a client with two more running ones is preempted. A request's priority comes before its group,
and moves no other client's requests.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paceline.config import EngineConfig
from paceline.core.logits_rules import SamplingRow
from paceline.core.policy.step_cost import RowChoice, StepCost
from paceline.core.strategies import VerificationInput
from paceline.core.tree import ROOT
from paceline.engine.request import Request
from paceline.engine.slot_pool import OutOfSlotsError, SlotPool
from paceline.model.rows import Row

GRAMMAR_WAIT_S = 0.01
"""How long an idle step waits for a grammar."""
MAX_SCORED_ROWS = 256
"""Rows that score prompts in one step: each has a logit for every token of the vocabulary."""


@dataclass(slots=True)
class ScheduledRequest:
    """One request's share of a step: its tokens [start, stop), then draft nodes, each with a slot of its own."""

    request: Request
    start: int
    stop: int
    nodes: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether the root is run."""
        return self.stop == len(self.request.tokens)

    @property
    def draws(self) -> bool:
        """Whether the target draws: the root is run, and the request wants output."""
        return self.complete and self.request.max_tokens > 0

    @property
    def drawn_rows(self) -> int:
        """How many of its rows, the last ones, are drawn from: those of the root and of the nodes."""
        return 1 + len(self.nodes) if self.draws else 0

    @property
    def only_draws(self) -> bool:
        """Whether it computes no prompt tokens: the root is the only token that is run."""
        return self.draws and self.stop - self.start == 1

    @property
    def scored_rows(self) -> range:
        """The tokens whose rows score the token after them."""
        wanted = self.request.rows_to_score
        return range(max(self.start, wanted.start), min(self.stop, wanted.stop))

    def model_rows(self) -> list[Row]:
        """The rows of the tokens, then of the nodes."""
        tree, slot_table = self.request.tree, self.request.slot_table
        rows = [slot_table.row(self.request.tokens[i], i) for i in range(self.start, self.stop)]
        branches: dict[int, list[int]] = {ROOT: []}
        for node, slot in zip(self.nodes, self.slots, strict=True):
            branch = branches[node] = [*branches[tree.parents[node]], slot]
            rows.append(slot_table.branch_row(tree.tokens[node], branch))
        return rows

    def keep_slots(self, accepted: Sequence[int], pool: SlotPool) -> list[int]:
        """Keep the slots of accepted nodes; return the others to `pool`.

        The result says which of the drawn rows each committed token comes from: 0 is the root's, i + 1 that of node i.
        """
        if not self.nodes:
            return [0]
        kept = [self.nodes.index(node) for node in accepted]
        self.request.slot_table.slots.extend([self.slots[i] for i in kept])
        pool.return_slots([slot for i, slot in enumerate(self.slots) if i not in kept])
        return [0, *(i + 1 for i in kept)]

    def verification_input(self) -> VerificationInput:
        """The verifier's input, if the request draws."""
        request, tree = self.request, self.request.tree
        params, history = request.effective_params, request.history
        first = tree.position + 1
        rows = [SamplingRow(params, first, history)]
        for node in self.nodes:
            path = tree.path_tokens(node) if history.has_logits_rules else ()  # without rules nothing reads the path
            rows.append(SamplingRow(params, first + tree.depths[node], history, path))
        return VerificationInput(tree, self.nodes, rows, request.tokens)


class Scheduler:
    """Waiting and running requests, and the slots they share. `running` is ordered by admission, oldest first."""

    def __init__(self, config: EngineConfig, pool: SlotPool, cost: StepCost) -> None:
        self.pool = pool
        self.compiling: list[Request] = []
        """Requests whose grammar is being compiled or replayed, in the order of arrival."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._scored_rows_left = MAX_SCORED_ROWS
        """Of the step that is being scheduled."""
        self._config = config
        self._cost = cost

    def take_compiled(self, *, may_wait: bool) -> list[Request]:
        """Move requests whose grammars are ready to `waiting`, and return them.

        `may_wait`: wait a moment for the first grammar if no other request needs the engine.
        """
        if not self.compiling:
            return []
        if may_wait and not (self.running or self.waiting) and (grammar := self.compiling[0].grammar) is not None:
            grammar.wait(GRAMMAR_WAIT_S)
        ready = [each for each in self.compiling if each.grammar is None or each.grammar.ready]
        self.compiling = [each for each in self.compiling if each not in ready]
        for request in ready:
            if request.times.started is None:
                self.waiting.append(request)
            else:
                self.waiting.appendleft(request)
        return ready

    def schedule(self) -> list[ScheduledRequest]:
        """Give running requests, and as many waiting ones as fit, their next rows and slots."""
        self._preempt_for_fairness()
        rows, self._scored_rows_left = self._config.max_num_batched_rows, MAX_SCORED_ROWS
        batch: list[ScheduledRequest] = []
        turn = 0
        while turn < len(self.running):
            request = self.running[turn]
            scheduled = self._next_rows(request, rows)
            if scheduled is not None:
                batch.append(scheduled)
                rows -= scheduled.stop - scheduled.start
            if turn < len(self.running) and self.running[turn] is request:  # else it was preempted
                turn += 1
        while rows and (scheduled := self._admit(rows)) is not None:
            batch.append(scheduled)
            rows -= scheduled.stop - scheduled.start
        self._add_draft_nodes(batch, rows)
        return batch

    def expected_to_draw(self) -> Sequence[Request]:
        """The requests of the next step if all of them only draw; empty if it is expected to compute prompt tokens.

        A guess, cheaper than `schedule`: it does not know which requests are preempted, nor what the cache has.
        """
        only_draws = all(request.uncomputed_tokens == 1 for request in self.running) and not self._may_admit()
        return tuple(self.running) if only_draws else ()

    def recompile(self, request: Request) -> None:
        """Stop a running request until its grammar is ready."""
        self.finish(request)
        self.compiling.append(request)

    def finish(self, request: Request, *, cached: bool = True) -> None:
        """Remove a request and free its slots. `cached`: computed blocks stay in the cache."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            self.compiling.remove(request)
        request.release_slots(self.pool, cached=cached)

    def reset(self) -> None:
        """Forget every request and the cache, whatever state they are in."""
        self.compiling.clear()
        self.running.clear()
        self.waiting.clear()
        self.pool = self.pool.emptied()

    def recompute_all(self) -> None:
        """Recompute all running requests from scratch, without the cache."""
        for request in reversed(self.running.copy()):
            self._preempt(request, cached=False)
        self.pool = self.pool.emptied()

    def requests(self) -> Iterator[Request]:
        """All requests that may hold slots."""
        yield from self.running
        yield from self.waiting

    def _next_rows(self, request: Request, rows: int) -> ScheduledRequest | None:
        """The next missing tokens of a running request. Preempts the youngest request while slots are short."""
        start = len(request.slot_table)
        stop = min(len(request.tokens), start + rows)
        scored = ScheduledRequest(request, start, stop).scored_rows
        if len(scored) > self._scored_rows_left:
            scored = scored[: self._scored_rows_left]
            stop = scored.stop
        while stop > start:
            try:
                request.slot_table.slots.extend(self.pool.allocate(stop - start))
            except OutOfSlotsError:
                # Requests before this one are scheduled already.
                victim = self._youngest_of_largest(self.running[self.running.index(request) :])
                self._preempt(victim)
                if victim is request:
                    return None
            else:
                self._scored_rows_left -= len(scored)
                return ScheduledRequest(request, start, stop)
        return None

    def _may_admit(self) -> bool:
        """Whether a waiting request can start, without a look into the cache."""
        if not self.waiting or self._full:
            return False
        return self._next_waiting().uncomputed_tokens <= self.pool.free

    def _admit(self, rows: int) -> ScheduledRequest | None:
        """Start the next waiting request if all its tokens fit. `rows`: left after all running requests."""
        if not self.waiting or self._full:
            return None
        request = self._next_waiting()
        request.attach_prefix(self.pool)
        cached, fits = len(request.slot_table), request.uncomputed_tokens <= self.pool.free
        scheduled = self._next_rows(request, rows) if fits else None
        if scheduled is None:  # nor does it keep its prefix, after which the state may give way to another
            request.release_slots(self.pool)
            return None
        request.start(cached)
        self.running.append(request)
        self.waiting.remove(request)
        return scheduled

    @property
    def _full(self) -> bool:
        """Whether as many requests run as may."""
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
        """The waiting request that starts next, by fairness, priority and arrival."""
        clients, groups = self._running_counts()
        client = min(self.waiting, key=lambda each: (clients[each.client], groups[each.group])).client
        own = (each for each in self.waiting if each.client == client)
        return min(own, key=lambda each: (each.priority, groups[each.group]))

    def _running_counts(self) -> tuple[Counter[str], Counter[tuple[str, str]]]:
        """Running requests by client and by group."""
        return Counter(each.client for each in self.running), Counter(each.group for each in self.running)

    def _youngest_of_largest(self, requests: Sequence[Request]) -> Request:
        """Of the client with the most running requests, the youngest of the last priority and the largest group."""
        clients, groups = self._running_counts()
        client = max(reversed(requests), key=lambda each: (clients[each.client], groups[each.group])).client
        own = (each for each in reversed(requests) if each.client == client)
        return max(own, key=lambda each: (each.priority, groups[each.group]))

    def _preempt_for_fairness(self) -> None:
        """While the next waiting request does not fit, preempt a request of a client with two more running ones."""
        while self.waiting and not self._has_slots(request := self._next_waiting()):
            if (victim := self._fairness_victim(request)) is None:
                return
            self._preempt(victim)

    def _fairness_victim(self, request: Request) -> Request | None:
        """The youngest request of a client with two more running ones, or else of such a group of the same client."""
        clients, groups = self._running_counts()
        others = [each for each in self.running if clients[each.client] > clients[request.client] + 1]
        same = [each for each in self.running if each.client == request.client]
        largest = others or [each for each in same if groups[each.group] > groups[request.group] + 1]
        return self._youngest_of_largest(largest) if largest else None

    def _preempt(self, request: Request, *, cached: bool = True) -> None:
        """Move a running request to the front of `waiting` and free its slots. Its tree stays."""
        self.running.remove(request)
        request.release_slots(self.pool, cached=cached)
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _add_draft_nodes(self, batch: Sequence[ScheduledRequest], rows: int) -> None:
        """Verify the best nodes over all requests, within the rows and slots that are left."""
        drawing = [each for each in batch if each.draws]
        needed = sum(each.stop - each.start for each in batch)
        most = min(rows, self.pool.free)
        candidates = [(each.request.tree, each.request.candidate_nodes()) for each in drawing]
        choice = RowChoice(candidates, self._cost, needed, most)
        if choice.count:
            slots = self.pool.allocate(choice.count)
            for each, nodes in zip(drawing, choice.nodes(), strict=True):
                each.nodes, each.slots = nodes, [slots.pop() for _ in nodes]

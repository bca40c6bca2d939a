"""The target's loop: receive, schedule, run, draw and verify, commit.

    step:  growth from drafts → rows → forward pass → draws → tokens → deltas, and news for the drafts

Plain decoding is this loop with no guesses. `paceline.engine.loop` calls `step` while there is work.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.budget import FREE_ROWS, Calibration, RowCost, StepCost
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.engine.compiling import Compiling
from paceline.engine.drafting import Drafting
from paceline.engine.guesses import Guesses
from paceline.engine.hidden import HiddenStates
from paceline.engine.intake import Intake
from paceline.engine.request import POOL, Request
from paceline.engine.rows import guessed, rows_of
from paceline.engine.scheduler import Scheduler, Work, height
from paceline.engine.slots import SlotPool
from paceline.engine.waiting import Clock, waiting_for
from paceline.grammar.following import Grammars
from paceline.messages import Delta, FinishReason, Load, LogProbs, SpeculationStats, Submission, Timings
from paceline.model.model import Model
from paceline.sampling import is_finite, log_probs
from paceline.speculators.base import Commit, Context
from paceline.strategies import verifier
from paceline.telemetry.step import StepStats
from paceline.verify import strategy_of

log = logging.getLogger(__name__)

MOST_TOLD = 256
"""Positions of one request whose hidden states a step sends: as many as a step computes, by default."""
NOT_FINITE = "the model's logits are not finite numbers here: its weights or this input overflow its dtype"
REPORT_S = 0.1
"""How often deltas bring statistics of requests that go on."""


@dataclass(slots=True)
class _Tally:
    """What one step counts on its way."""

    prompt_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    guesses: list[tuple[int, bool]] = field(default_factory=list)


class Engine:
    """Decodes many requests at once over one model. Not thread-safe."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        speculation: SpeculativeConfig,
        drafting: Drafting,
        cost: RowCost,
        clock: Clock = time.perf_counter,
        beside: Sequence[Drafting] = (),
        grammars: Grammars | None = None,
    ) -> None:
        """`cost`: of a pass, by `paceline.model.probe.row_cost`. `beside`: draft for every request, too. `grammars`: of
        the model's vocabulary; None: as its name says."""
        self.model = model
        self._compiling = Compiling()
        sources = range(POOL, POOL + 1 + len(beside))
        self.calibrations = {(source, greedy): Calibration() for source in sources for greedy in (True, False)}
        """By who guesses, and whether the request is greedy: under noise a draft's confidence means something else."""
        self._strategy = strategy_of(speculation)
        self._verifier = verifier(speculation)
        if self._strategy.caveat:
            log.log(logging.INFO if self._strategy.exact else logging.WARNING, self._strategy.caveat)
        self._clock = clock
        lockstep = speculation.draft_schedule == "lockstep"
        self._cost = StepCost(cost)
        waiting = waiting_for(drafting.concurrent, lockstep, self._cost, clock)
        self._guesses = Guesses(
            drafting,
            beside,
            speculation.rejection_sampling_strategy,
            waiting,
            model.vocabulary_size,
            clock,
            judged=speculation.row_budget and not lockstep,
            by_law=self._strategy.by_law,
        )
        self._drafting = drafting
        self.hidden_layers = tuple(drafting.hidden_state_layers)
        """Those of which hidden states are kept, for drafts."""
        self.rows_per_s = config.max_num_batched_rows / cost(config.max_num_batched_rows)
        """Of full passes."""
        budgeted = self._cost if speculation.row_budget else StepCost(FREE_ROWS)
        self._hidden = HiddenStates(model.slots)
        self._scheduler = Scheduler(config, SlotPool(model.slots, caching=config.enable_prefix_caching), budgeted)
        grammars = grammars or Grammars.of(model.name, model.vocabulary_size)
        self._intake = Intake(model, speculation, self._strategy, grammars, self.calibrations, clock)
        self._requests: dict[int, Request] = {}
        self._keys: dict[str, int] = {}
        self._ended: list[Delta] = []
        """Last deltas of requests that ended between steps: refused or cancelled."""
        self._tally = _Tally()
        self.last_step = StepStats(0.0, 0, 0, 0, model.slots)
        """What the last step did."""
        self.reports = False
        """Whether the last step's deltas bring statistics, as they do now and then; a last delta always does."""
        self._reported = -REPORT_S

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests or self._ended)

    @property
    def load(self) -> Load:
        """As of the last step."""
        last = self.last_step
        return Load(last.running, last.waiting, last.free_slots, last.rows, last.step_s)

    def seed(self, drafted: Sequence[float], accepted: Sequence[float]) -> None:
        """Start from what was learned elsewhere: guesses decided and drawn, by `Calibration`'s cells."""
        for greedy in (True, False):
            self.calibrations[POOL, greedy].seed(drafted, accepted)

    def submit(self, submission: Submission) -> None:
        """Take in a request. One that cannot be served ends at the next step, with an error in its delta."""
        try:
            if submission.request_id in self._keys:
                raise ValueError(f"request id {submission.request_id!r} is in use")
            request = self._intake.request(submission)
        except ValueError as error:
            self._ended.append(Delta(submission.request_id, finish_reason=FinishReason.ERROR, error=str(error)))
            return
        self._requests[request.key] = request
        self._keys[request.id] = request.key
        self._compiling.add(request)
        self._begin_compiled(idle=False)

    def cancel(self, request_id: str) -> None:
        """End a request: the next step gives its last delta, with what it came to. Unknown ids are ignored."""
        key = self._keys.get(request_id)
        if key is not None:
            request = self._requests[key]
            delta = Delta(request_id, finish_reason=FinishReason.CANCELLED, speculation=request.stats.snapshot())
            self._close(request, delta)
            self._ended.append(delta)
            self._guesses.flush()

    def step(self) -> list[Delta]:
        """Run one forward pass, if there is anything to run, and return what is new."""
        start = self._clock()
        self._begin_compiled(idle=not (self._scheduler.running or self._scheduler.waiting))
        deltas, self._ended = self._ended, []
        self.reports = start - self._reported >= REPORT_S
        self._reported = start if self.reports else self._reported
        drawing = list(self._scheduler.drawing())  # the scheduler's own list changes in the step
        self._guesses.gather(self._requests, drawing)
        if (layers := tuple(self._drafting.hidden_state_layers)) != self.hidden_layers:
            self._keep_hidden(layers)
            drawing = []
        gathered = self._clock()
        works = self._scheduler.schedule()
        self._guesses.find_drafts(self._scheduler.running)  # before the pass: whoever drafts can begin with the prompt
        guesses = sum(len(work.nodes) for work in works)
        if works:
            deltas += self._run(works)
            self._guesses.judge(self._scheduler.refused, self._lost_to_drafts(drawing, self._clock() - start))
        self._guesses.flush()
        if drawing:
            self._observe(drawing, guesses, self._clock() - gathered)
        self._report(works, deltas, self._clock() - start)
        return deltas

    def _keep_hidden(self, layers: tuple[int, ...]) -> None:
        """A draft is there that asks for these hidden states. What was computed without them is computed again: it
        would guess badly for whoever shares any of it."""
        self.hidden_layers = layers
        self._hidden.forget()
        self._scheduler.start_over()

    def _lost_to_drafts(self, drawing: Sequence[Request], seconds: float) -> float:
        """Tokens that drafting cost each request that is drafted for, in a step that took so long and ran these."""
        drafted = sum(request.drafted for request in drawing)
        return self._cost.lost(len(drawing), seconds) / drafted if drafted else 0.0

    def _observe(self, drawing: Sequence[Request], guesses: int, seconds: float) -> None:
        """What a step took, from when it knew its guesses."""
        self._cost.observe(len(drawing) + guesses, seconds, guesses)
        if not guesses:
            self._cost.observe_plain(len(drawing), seconds, drafted=any(request.drafted for request in drawing))

    def abandon(self) -> None:
        """Forget every request without a word, and all slots: a step failed half-way. The engine can be used again."""
        for key in self._requests:
            self._guesses.close(key)
        self._guesses.flush()
        self._requests.clear()
        self._keys.clear()
        self._ended.clear()
        self._compiling.clear()
        self._scheduler.abandon()

    def check_integrity(self) -> None:
        """Prove that every slot is accounted for. Raises AssertionError."""
        requests = list(self._scheduler.requests())
        self._scheduler.pool.check_integrity((r.own_slots() for r in requests), (r.shared for r in requests))

    # Requests come and go.

    def _begin_compiled(self, *, idle: bool) -> None:
        """Those that wait for no grammar wait for rows from now on, unless there is nothing left to draw."""
        for request in self._compiling.done(idle=idle):
            started = request.times.started is not None
            if started:
                self._scheduler.waiting.appendleft(request)  # it has had its turn
            else:
                self._scheduler.waiting.append(request)
            if started or (request.grammar is not None and request.output_tokens):
                self._end_late(request)  # a target that was lost may not have come to it
            elif error := request.nothing_left():
                self._end(request)
                self._ended.append(Delta(request.id, finish_reason=FinishReason.ERROR, error=error))

    def _end_late(self, request: Request) -> None:
        """Its grammar did not know, when its last tokens were committed, whether they end it."""
        if (reason := request.ending()) is not None:
            error, stats = request.complaint(), request.stats.snapshot()
            delta = Delta(request.id, finish_reason=reason, speculation=stats, error=error)
            self._close(request, delta)
            self._ended.append(delta)

    def _end(self, request: Request, *, cached: bool = True) -> None:
        if not self._compiling.remove(request):
            self._scheduler.finish(request, cached=cached)
        del self._requests[request.key], self._keys[request.id]
        self._guesses.close(request.key)

    # One forward pass.

    def _run(self, works: Sequence[Work]) -> list[Delta]:
        """Run all works' rows, draw and verify, and commit what came of it."""
        start = self._clock()
        rows, wanted = rows_of(works)
        output = self.model.run(rows, wanted, self.hidden_layers)
        if output.hidden is not None:
            self._hidden.keep([row.slot for row in rows], output.hidden)
        logits = output.logits
        deltas: list[Delta] = []
        if not is_finite(logits):
            works, logits, deltas = self._end_broken(works, logits)
        verdicts = self._verifier.verify(logits, [guessed(work) for work in works if work.draws])
        seconds = self._clock() - start
        for work in works:
            self._count(work, start, seconds)
        return deltas + self._commit_all(works, logits, verdicts)

    def _end_broken(self, works: Sequence[Work], logits: Tensor) -> tuple[list[Work], Tensor, list[Delta]]:
        """End the requests that would draw from logits that are not finite. The other works, their logits, and last
        deltas. Guesses that lead to such logits are dropped: without them the request may never come there."""
        sizes = [1 + len(work.nodes) if work.draws else 0 for work in works]
        left, parts, deltas = [], [logits[:0]], []
        for work, part in zip(works, logits.split(sizes), strict=True):
            if not is_finite(part):
                self._scheduler.pool.give(work.slots)
                work.nodes, work.slots, part = [], [], part[:1]
            if is_finite(part):
                left.append(work)
                parts.append(part)
                continue
            delta = Delta(work.request.id, finish_reason=FinishReason.ERROR, error=NOT_FINITE)
            self._close(work.request, delta, cached=False)
            deltas.append(delta)
        return left, torch.cat(parts), deltas

    def _commit_all(self, works: Sequence[Work], logits: Tensor, verdicts: Sequence[list[int]]) -> list[Delta]:
        """`verdicts`: what each of the works that draw commits."""
        deltas = []
        row, verified = 0, iter(verdicts)  # where the next work's logits begin, and what it commits
        for work in works:
            if self.hidden_layers:
                self._tell_context(work)
            if work.draws:
                deltas.append(self._commit(work, next(verified), logits, row))
                row += 1 + len(work.nodes)
        return deltas

    def _count(self, work: Work, start: float, seconds: float) -> None:
        times = work.request.times
        times.started = start if times.started is None else times.started
        times.compute_s += seconds
        if new := work.request.prefill(work.stop):
            self._tally.prompt_tokens += new
            work.request.share(self._scheduler.pool)  # the other choices of the same request have the same prompt

    def _tell_context(self, work: Work) -> None:
        """Tell the draft the hidden states before the root that it does not know; the root's come with the commit.

        After a hit in the prefix cache, a move to another draft or a pause, this sends all missing states, up to
        MOST_TOLD positions a step.
        """
        request = work.request
        told = slice(request.told, min(work.stop - work.draws, request.told + MOST_TOLD))
        if request.drafted and told.start < told.stop:
            self._guesses.context(Context(request.key, told.start, self._hidden.of(request.lane.slots[told])))
            request.told = told.stop

    # What was verified becomes final.

    def _commit(self, work: Work, verdict: Sequence[int], logits: Tensor, row: int) -> Delta:
        """`verdict`: accepted tokens and one more. `logits` are the step's, of which the root's are at `row`, and those
        of each verified node after it."""
        request, base = work.request, len(work.request.tokens) - 1
        tokens, reason = request.until_end(verdict)
        error = request.complaint(tokens) if reason is FinishReason.ERROR else ""
        accepted = min(len(tokens), len(verdict) - 1)  # a request may end with an accepted token
        path = request.tree.match(tokens)
        self._learn(work, tokens, path, accepted)
        pooled = [request.tree.sources[node] for node in path[:accepted]].count(POOL)
        drawn_at = self._keep_accepted(work, path[: min(accepted, len(tokens) - 1)])
        request.tokens += tokens
        request.history.extend(tokens)
        request.tree.commit(tokens)
        delta = Delta(
            request.id,
            tokens,
            [True] * accepted + [False] * (len(tokens) - accepted),
            self._log_probs(request, logits, [row + i for i in drawn_at], tokens),
            reason,
            speculation=request.stats.snapshot() if self.reports or reason is not None else None,
            error=error,
        )
        self._guesses.count(request, pooled)
        # The last tokens, too: who drafts may learn from them for other requests.
        self._guesses.commit(Commit(request.key, base, tokens, accepted, self._states_from(request, base)))
        if reason is not None:
            self._close(request, delta)
        elif request.grammar is not None and not request.grammar.ready:
            self._scheduler.finish(request)
            self._compiling.add(request)
        return delta

    def _states_from(self, request: Request, base: int) -> Tensor | None:
        """Hidden states of the root at `base` and the accepted tokens. None if the draft lacks the states of earlier
        positions, or is paused: then `_tell_context` sends them later.
        """
        if not self.hidden_layers or request.paused or request.told < base:
            return None
        request.told = len(request.lane)
        return self._hidden.of(request.lane.slots[base:])

    def _learn(self, work: Work, tokens: Sequence[int], path: Sequence[int], accepted: int) -> None:
        """Count what was verified, and what the drafts' confidence turned out to be worth.

        Where tokens do not depend on guesses, they tell of those without a row, too. Learning from rows alone would
        never hear that what it believes too little was right.
        """
        reached = height(work.request, work.nodes)
        for stats in (work.request.stats, self._tally.speculation):
            stats.record(len(work.nodes), reached, accepted)
        every, calibrations = self._strategy.drafter_invariant, work.request.calibrations
        for node, source, cell, hit in work.request.tree.decided(path, tokens):
            if every or node in work.nodes:
                calibrations[source].observe(cell, hit)
                if source == POOL:
                    self._tally.guesses.append((cell, hit))

    def _keep_accepted(self, work: Work, path: Sequence[int]) -> list[int]:
        """Guesses on the path to the last committed token keep their slots, in order; the others give theirs back.

        Returns which of the work's draws the tokens are: 0 is the root's, i + 1 that of node i.
        """
        if not work.nodes:
            return [0]
        kept = [work.nodes.index(node) for node in path]
        work.request.lane.slots.extend([work.slots[i] for i in kept])
        self._scheduler.pool.give([slot for i, slot in enumerate(work.slots) if i not in kept])
        return [0, *(i + 1 for i in kept)]

    def _log_probs(
        self, request: Request, logits: Tensor, places: Sequence[int], tokens: Sequence[int]
    ) -> list[LogProbs]:
        top = request.submission.sampling.logprobs
        return log_probs(logits[list(places)], tokens, top) if top is not None else []

    def _close(self, request: Request, delta: Delta, *, cached: bool = True) -> None:
        now, times = self._clock(), request.times
        stopped = delta.finish_reason is FinishReason.STOP and request.stops(request.tokens[-1])
        delta.stop_token = request.tokens[-1] if stopped else None
        delta.usage = request.usage()
        queued = (now if times.started is None else times.started) - times.arrived
        delta.timings = Timings(queued, times.compute_s, now - times.arrived)
        self._end(request, cached=cached)

    def _report(self, works: Sequence[Work], deltas: Sequence[Delta], seconds: float) -> None:
        rows = sum(work.stop - work.start + len(work.nodes) for work in works)
        self.last_step = StepStats(
            seconds,
            rows,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            free_slots=self._scheduler.pool.free,
            prompt_tokens=self._tally.prompt_tokens,
            generation_tokens=sum(len(d.tokens) for d in deltas),
            preemptions=self._scheduler.preemptions,
            speculation=self._tally.speculation,
            nodes_received=self._guesses.received,
            nodes_grafted=self._guesses.grafted,
            guesses=self._tally.guesses,
        )
        self._scheduler.preemptions = self._guesses.received = self._guesses.grafted = 0
        self._tally = _Tally()

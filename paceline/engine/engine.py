"""The target's loop: receive, schedule, run, draw and verify, commit.

    step:  growth from drafts → rows → forward pass → draws → tokens → deltas, and news for the drafts

Plain decoding is this loop with no guesses. `paceline.engine.engine_loop` calls `step` while there is work.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.core.messages import Delta, EngineLoad, FinishReason, LogProbs, SpeculationStats, Submission, Timings
from paceline.core.policy.calibration import Calibration
from paceline.core.policy.step_cost import FREE_ROWS, RowCost, StepCost
from paceline.core.sampling import is_finite, log_probs
from paceline.core.strategies import make_verifier
from paceline.core.verify import strategy_of
from paceline.drafting.speculator import Commit, Context
from paceline.engine.draft_client import DraftClient
from paceline.engine.draft_manager import DraftManager
from paceline.engine.draft_schedule import Clock, make_draft_schedule
from paceline.engine.grammar_queue import GrammarQueue
from paceline.engine.hidden_states import HiddenStates
from paceline.engine.request import POOL_SOURCE, Request
from paceline.engine.request_factory import RequestFactory
from paceline.engine.scheduler import ScheduledRequest, Scheduler, tree_height
from paceline.engine.slot_pool import SlotPool
from paceline.engine.step_batch import model_rows, verification_input
from paceline.grammar.grammar_state import GrammarCompiler
from paceline.model.model import Model
from paceline.telemetry.step_stats import StepStats

log = logging.getLogger(__name__)

MAX_HIDDEN_STATES_SENT = 256
"""Positions of one request whose hidden states a step sends: as many as a step computes, by default."""
NOT_FINITE_ERROR = "the model's logits are not finite numbers here: its weights or this input overflow its dtype"
STATS_INTERVAL_S = 0.1
"""How often deltas bring statistics of requests that go on."""


@dataclass(slots=True)
class _StepCounters:
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
        drafting: DraftClient,
        cost: RowCost,
        clock: Clock = time.perf_counter,
        beside: Sequence[DraftClient] = (),
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """`cost`: of a pass, by `paceline.model.row_probe.measure_row_cost`. `beside`: draft for every request, too.
        `grammars`: of the model's vocabulary; None: as its name says."""
        self.model = model
        self._grammar_queue = GrammarQueue()
        sources = range(POOL_SOURCE, POOL_SOURCE + 1 + len(beside))
        self.calibrations = {(source, greedy): Calibration() for source in sources for greedy in (True, False)}
        """By who guesses, and whether the request is greedy: under noise a draft's confidence means something else."""
        self._strategy = strategy_of(speculation)
        self._verifier = make_verifier(speculation)
        if self._strategy.warning:
            log.log(logging.INFO if self._strategy.exact else logging.WARNING, self._strategy.warning)
        self._clock = clock
        lockstep = speculation.draft_schedule == "lockstep"
        self._cost = StepCost(cost)
        waiting = make_draft_schedule(drafting.concurrent, lockstep, self._cost, clock)
        self._draft_manager = DraftManager(
            drafting,
            beside,
            speculation.rejection_sampling_strategy,
            waiting,
            model.vocabulary_size,
            clock,
            judged=speculation.row_budget and not lockstep,
            by_law=self._strategy.sampled_drafts,
        )
        self._drafting = drafting
        self.hidden_layers = tuple(drafting.hidden_state_layers)
        """Those of which hidden states are kept, for drafts."""
        self.rows_per_s = config.max_num_batched_rows / cost(config.max_num_batched_rows)
        """Of full passes."""
        budgeted = self._cost if speculation.row_budget else StepCost(FREE_ROWS)
        self._hidden = HiddenStates(model.slots)
        self._scheduler = Scheduler(config, SlotPool(model.slots, caching=config.enable_prefix_caching), budgeted)
        grammars = grammars or GrammarCompiler.of(model.name, model.vocabulary_size)
        self._request_factory = RequestFactory(model, speculation, self._strategy, grammars, self.calibrations, clock)
        self._requests: dict[int, Request] = {}
        self._keys: dict[str, int] = {}
        self._ended: list[Delta] = []
        """Last deltas of requests that ended between steps: refused or cancelled."""
        self._counters = _StepCounters()
        self.last_step = StepStats(0.0, 0, 0, 0, model.slots)
        """What the last step did."""
        self.stats_due = False
        """Whether the last step's deltas bring statistics, as they do now and then; a last delta always does."""
        self._stats_sent_at = -STATS_INTERVAL_S

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests or self._ended)

    @property
    def load(self) -> EngineLoad:
        """As of the last step."""
        last = self.last_step
        return EngineLoad(last.running, last.waiting, last.free_slots, last.rows, last.step_s)

    def seed(self, drafted: Sequence[float], accepted: Sequence[float]) -> None:
        """Start from what was learned elsewhere: guesses decided and drawn, by `Calibration`'s cells."""
        for greedy in (True, False):
            self.calibrations[POOL_SOURCE, greedy].seed(drafted, accepted)

    def submit(self, submission: Submission) -> None:
        """Take in a request. One that cannot be served ends at the next step, with an error in its delta."""
        try:
            if submission.request_id in self._keys:
                raise ValueError(f"request id {submission.request_id!r} is in use")
            request = self._request_factory.create(submission)
        except ValueError as error:
            self._ended.append(Delta(submission.request_id, finish_reason=FinishReason.ERROR, error=str(error)))
            return
        self._requests[request.key] = request
        self._keys[request.id] = request.key
        self._grammar_queue.add(request)
        self._start_grammar_ready(idle=False)

    def cancel(self, request_id: str) -> None:
        """End a request: the next step gives its last delta, with what it came to. Unknown ids are ignored."""
        key = self._keys.get(request_id)
        if key is not None:
            request = self._requests[key]
            delta = Delta(request_id, finish_reason=FinishReason.CANCELLED, speculation=request.stats.snapshot())
            self._finish(request, delta)
            self._ended.append(delta)
            self._draft_manager.flush()

    def step(self) -> list[Delta]:
        """Run one forward pass, if there is anything to run, and return what is new."""
        start = self._clock()
        self._start_grammar_ready(idle=not (self._scheduler.running or self._scheduler.waiting))
        deltas, self._ended = self._ended, []
        self.stats_due = start - self._stats_sent_at >= STATS_INTERVAL_S
        self._stats_sent_at = start if self.stats_due else self._stats_sent_at
        drawing = list(self._scheduler.drawing())  # the scheduler's own list changes in the step
        self._draft_manager.receive_growth(self._requests, drawing)
        if (layers := tuple(self._drafting.hidden_state_layers)) != self.hidden_layers:
            self._change_hidden_layers(layers)
            drawing = []
        gathered = self._clock()
        works = self._scheduler.schedule()
        self._draft_manager.find_drafts(
            self._scheduler.running
        )  # before the pass: whoever drafts can begin with the prompt
        guesses = sum(len(work.nodes) for work in works)
        if works:
            deltas += self._run_step(works)
            self._draft_manager.end_step(
                self._scheduler.best_unverified, self._draft_overhead_tokens(drawing, self._clock() - start)
            )
        self._draft_manager.flush()
        if drawing:
            self._observe_step_cost(drawing, guesses, self._clock() - gathered)
        self._record_step_stats(works, deltas, self._clock() - start)
        return deltas

    def _change_hidden_layers(self, layers: tuple[int, ...]) -> None:
        """A draft is there that asks for these hidden states. What was computed without them is computed again: it
        would guess badly for whoever shares any of it."""
        self.hidden_layers = layers
        self._hidden.clear()
        self._scheduler.recompute_all()

    def _draft_overhead_tokens(self, drawing: Sequence[Request], seconds: float) -> float:
        """Tokens that drafting cost each request that is drafted for, in a step that took so long and ran these."""
        drafted = sum(request.drafted for request in drawing)
        return self._cost.tokens_lost(len(drawing), seconds) / drafted if drafted else 0.0

    def _observe_step_cost(self, drawing: Sequence[Request], guesses: int, seconds: float) -> None:
        """What a step took, from when it knew its guesses."""
        self._cost.observe(len(drawing) + guesses, seconds, guesses)
        if not guesses:
            self._cost.observe_plain(len(drawing), seconds, drafted=any(request.drafted for request in drawing))

    def reset(self) -> None:
        """Forget every request without a word, and all slots: a step failed half-way. The engine can be used again."""
        for key in self._requests:
            self._draft_manager.close(key)
        self._draft_manager.flush()
        self._requests.clear()
        self._keys.clear()
        self._ended.clear()
        self._grammar_queue.clear()
        self._scheduler.reset()

    def check_integrity(self) -> None:
        """Prove that every slot is accounted for. Raises AssertionError."""
        requests = list(self._scheduler.requests())
        self._scheduler.pool.check_integrity((r.own_slots() for r in requests), (r.shared_blocks for r in requests))

    # Requests come and go.

    def _start_grammar_ready(self, *, idle: bool) -> None:
        """Those that wait for no grammar wait for rows from now on, unless there is nothing left to draw."""
        for request in self._grammar_queue.done(idle=idle):
            started = request.times.started is not None
            if started:
                self._scheduler.waiting.appendleft(request)  # it has had its turn
            else:
                self._scheduler.waiting.append(request)
            if started or (request.grammar is not None and request.output_tokens):
                self._finish_if_ended(request)  # a target that was lost may not have come to it
            elif error := request.rejection_reason():
                self._remove(request)
                self._ended.append(Delta(request.id, finish_reason=FinishReason.ERROR, error=error))

    def _finish_if_ended(self, request: Request) -> None:
        """Its grammar did not know, when its last tokens were committed, whether they end it."""
        if (reason := request.check_finish()) is not None:
            error, stats = request.grammar_error(), request.stats.snapshot()
            delta = Delta(request.id, finish_reason=reason, speculation=stats, error=error)
            self._finish(request, delta)
            self._ended.append(delta)

    def _remove(self, request: Request, *, cached: bool = True) -> None:
        if not self._grammar_queue.remove(request):
            self._scheduler.finish(request, cached=cached)
        del self._requests[request.key], self._keys[request.id]
        self._draft_manager.close(request.key)

    # One forward pass.

    def _run_step(self, works: Sequence[ScheduledRequest]) -> list[Delta]:
        """Run all works' rows, draw and verify, and commit what came of it."""
        start = self._clock()
        rows, wanted = model_rows(works)
        output = self.model.run(rows, wanted, self.hidden_layers)
        if output.hidden is not None:
            self._hidden.store([row.slot for row in rows], output.hidden)
        logits = output.logits
        deltas: list[Delta] = []
        if not is_finite(logits):
            works, logits, deltas = self._fail_not_finite(works, logits)
        verdicts = self._verifier.verify(logits, [verification_input(work) for work in works if work.samples])
        seconds = self._clock() - start
        for work in works:
            self._record_compute(work, start, seconds)
        return deltas + self._commit_all(works, logits, verdicts)

    def _fail_not_finite(
        self, works: Sequence[ScheduledRequest], logits: Tensor
    ) -> tuple[list[ScheduledRequest], Tensor, list[Delta]]:
        """End the requests that would draw from logits that are not finite. The other works, their logits, and last
        deltas. Guesses that lead to such logits are dropped: without them the request may never come there."""
        sizes = [1 + len(work.nodes) if work.samples else 0 for work in works]
        left, parts, deltas = [], [logits[:0]], []
        for work, part in zip(works, logits.split(sizes), strict=True):
            if not is_finite(part):
                self._scheduler.pool.return_slots(work.slots)
                work.nodes, work.slots, part = [], [], part[:1]
            if is_finite(part):
                left.append(work)
                parts.append(part)
                continue
            delta = Delta(work.request.id, finish_reason=FinishReason.ERROR, error=NOT_FINITE_ERROR)
            self._finish(work.request, delta, cached=False)
            deltas.append(delta)
        return left, torch.cat(parts), deltas

    def _commit_all(
        self, works: Sequence[ScheduledRequest], logits: Tensor, verdicts: Sequence[list[int]]
    ) -> list[Delta]:
        """`verdicts`: what each of the works that draw commits."""
        deltas = []
        row, verified = 0, iter(verdicts)  # where the next work's logits begin, and what it commits
        for work in works:
            if self.hidden_layers:
                self._send_hidden_states(work)
            if work.samples:
                deltas.append(self._commit(work, next(verified), logits, row))
                row += 1 + len(work.nodes)
        return deltas

    def _record_compute(self, work: ScheduledRequest, start: float, seconds: float) -> None:
        times = work.request.times
        times.started = start if times.started is None else times.started
        times.compute_s += seconds
        if new := work.request.record_prefill(work.stop):
            self._counters.prompt_tokens += new
            work.request.cache_blocks(
                self._scheduler.pool
            )  # the other choices of the same request have the same prompt

    def _send_hidden_states(self, work: ScheduledRequest) -> None:
        """Tell the draft the hidden states before the root that it does not know; the root's come with the commit.

        After a hit in the prefix cache, a move to another draft or a pause, this sends all missing states, up to
        MOST_TOLD positions a step.
        """
        request = work.request
        told = slice(
            request.hidden_states_sent,
            min(work.stop - work.samples, request.hidden_states_sent + MAX_HIDDEN_STATES_SENT),
        )
        if request.drafted and told.start < told.stop:
            self._draft_manager.context(
                Context(request.key, told.start, self._hidden.gather(request.slot_table.slots[told]))
            )
            request.hidden_states_sent = told.stop

    # What was verified becomes final.

    def _commit(self, work: ScheduledRequest, verdict: Sequence[int], logits: Tensor, row: int) -> Delta:
        """`verdict`: accepted tokens and one more. `logits` are the step's, of which the root's are at `row`, and those
        of each verified node after it."""
        request, base = work.request, len(work.request.tokens) - 1
        tokens, reason = request.truncate_at_end(verdict)
        error = request.grammar_error(tokens) if reason is FinishReason.ERROR else ""
        accepted = min(len(tokens), len(verdict) - 1)  # a request may end with an accepted token
        path = request.tree.match(tokens)
        self._record_acceptance(work, tokens, path, accepted)
        pooled = [request.tree.sources[node] for node in path[:accepted]].count(POOL_SOURCE)
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
            speculation=request.stats.snapshot() if self.stats_due or reason is not None else None,
            error=error,
        )
        self._draft_manager.record_accepted(request, pooled)
        # The last tokens, too: who drafts may learn from them for other requests.
        self._draft_manager.commit(
            Commit(request.key, base, tokens, accepted, self._commit_hidden_states(request, base))
        )
        if reason is not None:
            self._finish(request, delta)
        elif request.grammar is not None and not request.grammar.ready:
            self._scheduler.finish(request)
            self._grammar_queue.add(request)
        return delta

    def _commit_hidden_states(self, request: Request, base: int) -> Tensor | None:
        """Hidden states of the root at `base` and the accepted tokens. None if the draft lacks the states of earlier
        positions, or is paused: then `_tell_context` sends them later.
        """
        if not self.hidden_layers or request.paused or request.hidden_states_sent < base:
            return None
        request.hidden_states_sent = len(request.slot_table)
        return self._hidden.gather(request.slot_table.slots[base:])

    def _record_acceptance(
        self, work: ScheduledRequest, tokens: Sequence[int], path: Sequence[int], accepted: int
    ) -> None:
        """Count what was verified, and what the drafts' confidence turned out to be worth.

        Where tokens do not depend on guesses, they tell of those without a row, too. Learning from rows alone would
        never hear that what it believes too little was right.
        """
        reached = tree_height(work.request, work.nodes)
        for stats in (work.request.stats, self._counters.speculation):
            stats.record(len(work.nodes), reached, accepted)
        every, calibrations = self._strategy.drafter_invariant, work.request.calibrations
        for node, source, cell, hit in work.request.tree.outcomes(path, tokens):
            if every or node in work.nodes:
                calibrations[source].observe(cell, hit)
                if source == POOL_SOURCE:
                    self._counters.guesses.append((cell, hit))

    def _keep_accepted(self, work: ScheduledRequest, path: Sequence[int]) -> list[int]:
        """Guesses on the path to the last committed token keep their slots, in order; the others give theirs back.

        Returns which of the work's draws the tokens are: 0 is the root's, i + 1 that of node i.
        """
        if not work.nodes:
            return [0]
        kept = [work.nodes.index(node) for node in path]
        work.request.slot_table.slots.extend([work.slots[i] for i in kept])
        self._scheduler.pool.return_slots([slot for i, slot in enumerate(work.slots) if i not in kept])
        return [0, *(i + 1 for i in kept)]

    def _log_probs(
        self, request: Request, logits: Tensor, places: Sequence[int], tokens: Sequence[int]
    ) -> list[LogProbs]:
        top = request.submission.sampling.logprobs
        return log_probs(logits[list(places)], tokens, top) if top is not None else []

    def _finish(self, request: Request, delta: Delta, *, cached: bool = True) -> None:
        now, times = self._clock(), request.times
        stopped = delta.finish_reason is FinishReason.STOP and request.is_stop_token(request.tokens[-1])
        delta.stop_token = request.tokens[-1] if stopped else None
        delta.usage = request.usage()
        queued = (now if times.started is None else times.started) - times.arrived
        delta.timings = Timings(queued, times.compute_s, now - times.arrived)
        self._remove(request, cached=cached)

    def _record_step_stats(self, works: Sequence[ScheduledRequest], deltas: Sequence[Delta], seconds: float) -> None:
        rows = sum(work.stop - work.start + len(work.nodes) for work in works)
        self.last_step = StepStats(
            seconds,
            rows,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            free_slots=self._scheduler.pool.free,
            prompt_tokens=self._counters.prompt_tokens,
            generation_tokens=sum(len(d.tokens) for d in deltas),
            preemptions=self._scheduler.preemptions,
            speculation=self._counters.speculation,
            nodes_received=self._draft_manager.received,
            nodes_grafted=self._draft_manager.grafted,
            calibration_samples=self._counters.guesses,
        )
        self._scheduler.preemptions = self._draft_manager.received = self._draft_manager.grafted = 0
        self._counters = _StepCounters()

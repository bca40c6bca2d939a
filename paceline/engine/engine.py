"""The target's loop: receive, schedule, run, verify, commit.

    step:  growth from drafts → rows → forward pass → draws → tokens → messages to the drafts → deltas

Plain decoding is this loop without draft nodes. `paceline.engine.engine_loop` calls `overlapped_step` while there is
work. An accelerator computes while this process does something else, so there the last arrow leads into the next step:
a step's deltas are delivered once the next pass has started. Nothing that a step decides waits for them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import chain, count

from torch import Tensor

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.core.logits_rules import History
from paceline.core.policy.calibration import Calibration
from paceline.core.policy.step_cost import FREE_ROWS, RowCost, StepCost
from paceline.core.strategies import make_verifier
from paceline.core.tree import ROOT, TokenTree
from paceline.core.verify import Verdict
from paceline.engine.draft_client import DraftClient
from paceline.engine.draft_manager import DraftManager
from paceline.engine.draft_schedule import Clock, make_draft_schedule
from paceline.engine.drafted_request import OWN_DRAFT_SOURCE
from paceline.engine.host_copy import HostCopy
from paceline.engine.log_probabilities import DeltaLogProbs
from paceline.engine.model_pass import ModelPass, PassResult
from paceline.engine.request import Request
from paceline.engine.scheduler import ScheduledRequest, Scheduler
from paceline.engine.slot_pool import SlotPool
from paceline.engine.step_meter import StepMeter
from paceline.grammar.grammar_state import GrammarCompiler
from paceline.messages import (
    Delta,
    EngineLoad,
    FinishReason,
    GenerationRequest,
    VerifiedTree,
)
from paceline.model.model import Model
from paceline.model.native.native_library import draw_candidates
from paceline.telemetry.step_stats import StepStats

log = logging.getLogger(__name__)

Deliver = Callable[[list[Delta]], None]
"""Takes the new deltas of one step."""

NOT_FINITE_ERROR = "the model's logits are not finite numbers here: its weights or this input overflow its dtype"


class Engine:
    """Decodes many requests at once with one model. Not thread-safe."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        speculative_config: SpeculativeConfig,
        draft_client: DraftClient,
        cost: RowCost,
        clock: Clock = time.perf_counter,
        lookup_clients: Sequence[DraftClient] = (),
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """`cost`: of a pass, by `paceline.model.kept_row_cost`. `lookup_clients`: of the lookups, which
        draft for every request. `grammars`: default by the model's name."""
        self.model = model
        sources = range(OWN_DRAFT_SOURCE, OWN_DRAFT_SOURCE + 1 + len(lookup_clients))
        self.calibrations = {(source, greedy): Calibration() for source in sources for greedy in (True, False)}
        """By source, and by whether the request is greedy: noise changes what a draft's probabilities mean."""
        self.rows_per_s = config.max_num_batched_rows / cost(config.max_num_batched_rows)
        """Of full passes."""
        self._speculative_config = speculative_config
        self._methods = (speculative_config.method, *speculative_config.beside)
        """By source of a node."""
        self._strategy = speculative_config.strategy
        if self._strategy.warning:
            log.log(logging.INFO if self._strategy.exact else logging.WARNING, self._strategy.warning)
        self._clock = clock
        self._meter = StepMeter(cost, model.slots, clock)
        self._draft_client = draft_client
        self._draft_manager = self._make_draft_manager(lookup_clients)
        self._grammars = grammars or GrammarCompiler.of(model.name, model.vocabulary_size)
        self._pass = ModelPass(
            model, make_verifier(speculative_config, draw_candidates), draft_client.hidden_state_layers, clock
        )
        node_cost = self._meter.cost if speculative_config.row_budget else StepCost(FREE_ROWS)
        pool = SlotPool(
            model.slots,
            caching=config.enable_prefix_caching,
            prefix_length=None if model.states is None else model.states.prefix_length,
        )
        self._scheduler = Scheduler(config, pool, node_cost)
        self._requests: dict[int, Request] = {}
        self._keys: dict[str, int] = {}
        self._next_key = count(1)
        self._deltas: list[Delta] = []
        """To be delivered, in the order in which they came about: those of requests that ended between steps, too."""
        self._states: dict[int, tuple[int, Tensor]] = {}
        """Of the last step, by number of a request: the first position, and the hidden states that its draft lacks."""
        self._log_probs = DeltaLogProbs()
        self._batch: list[ScheduledRequest] = []
        """Of the last step that has started."""
        self._undelivered = False
        """Whether a step has ended whose deltas were not delivered."""

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests or self._deltas)

    @property
    def stats_due(self) -> bool:
        """Whether the last step's deltas carry statistics. Final deltas always do."""
        return self._meter.last_stats_due

    @property
    def last_step(self) -> StepStats:
        return self._meter.last_step

    @property
    def load(self) -> EngineLoad:
        """As of the last step."""
        last = self.last_step
        return EngineLoad(last.running, last.waiting, last.free_slots, last.rows, last.step_s)

    def _make_draft_manager(self, lookup_clients: Sequence[DraftClient]) -> DraftManager:
        client, config = self._draft_client, self._speculative_config
        lockstep = config.draft_schedule == "lockstep"
        schedule = make_draft_schedule(client.concurrent, lockstep, self._meter.cost, self._clock)
        size = self.model.vocabulary_size
        return DraftManager(client, lookup_clients, config, schedule, size, self._clock, self._hidden_states)

    def _hidden_states(self, key: int, start: int, stop: int) -> Tensor:
        first, states = self._states[key]
        return states[start - first : stop - first]

    def start_calibration(self, drafted: Sequence[float], accepted: Sequence[float]) -> None:
        """Start from the calibration counts of other engines, by cell."""
        for greedy in (True, False):
            self.calibrations[OWN_DRAFT_SOURCE, greedy].start_from(drafted, accepted)

    def submit(self, generation_request: GenerationRequest) -> None:
        """Take in a request. If it cannot be served, the next step returns a delta with the error."""
        try:
            if generation_request.request_id in self._keys:
                raise ValueError(f"request id {generation_request.request_id!r} is in use")
            request = self._new_request(generation_request)
        except ValueError as error:
            self._deltas.append(
                Delta(generation_request.request_id, finish_reason=FinishReason.ERROR, error=str(error))
            )
            return
        self._requests[request.key] = request
        self._keys[request.id] = request.key
        self._scheduler.compiling.append(request)
        self._start_compiled(may_wait=False)

    def cancel(self, request_id: str) -> None:
        """End a request; the next step returns its final delta. Unknown ids are ignored."""
        key = self._keys.get(request_id)
        if key is not None:
            self._deltas.append(self._end(self._requests[key], FinishReason.CANCELLED))
            self._draft_manager.flush()

    def step(self) -> list[Delta]:
        """Run one forward pass, if there is anything to run, and return the new deltas."""
        self._start_step()
        self._finish_step()
        return self._take_deltas()

    def overlapped_step(self, deliver: Deliver) -> None:
        """As `step`, but a pass that runs asynchronously hides the delivery of the step before.

        `deliver` gets the deltas of each step once: while the next pass runs, or at once if this step's are not
        followed by a pass. They never wait while the engine does.
        """
        if not self.model.asynchronous:
            deliver(self.step())
            return

        def deliver_last() -> None:
            if self._undelivered:
                deliver(self._take_deltas())

        self._start_step(deliver_last)
        deliver_last()
        self._finish_step()
        if not (self._batch and self._requests):
            deliver_last()

    def _start_step(self, before_wait: Callable[[], None] = lambda: None) -> None:
        """Start one forward pass, if there is anything to run. `before_wait` is called before each wait for growth."""
        self._meter.begin()
        self._receive(before_wait)
        self._batch = self._schedule()
        if self._batch:
            self._pass.start(self._batch)

    def _finish_step(self) -> None:
        """Read the pass, and commit what it drew: all that the next step depends on."""
        deltas: list[Delta] = []
        if self._batch:
            deltas = self._commit_all(self._verify())
            self._draft_manager.end_step(self._meter.draft_overhead_tokens())
        self._draft_manager.flush()
        self._meter.end(deltas, self._scheduler, self._draft_manager)
        self._deltas += deltas
        self._undelivered = True

    def _take_deltas(self) -> list[Delta]:
        self._log_probs.read()
        deltas, self._deltas, self._undelivered = self._deltas, [], False
        return deltas

    def _receive(self, before_wait: Callable[[], None]) -> None:
        """Take in requests whose grammars are ready, and growth from drafts."""
        self._start_compiled(may_wait=not self._undelivered)
        self._draft_manager.receive_growth(self._requests, self._scheduler.expected_to_draw(), before_wait)
        if (layers := tuple(self._draft_client.hidden_state_layers)) != self._pass.layers:
            # Everything is computed again, also the cache: a draft guesses badly where states are missing.
            self._pass.keep_layers(layers)
            self._scheduler.recompute_all()
        self._meter.received()

    def _schedule(self) -> list[ScheduledRequest]:
        """The rows of the step. Drafts are opened before the pass, so that they can start with the prompt."""
        batch = self._scheduler.schedule()
        self._draft_manager.find_drafts(self._scheduler.running)
        self._meter.scheduled(batch)
        return batch

    def _verify(self) -> list[PassResult]:
        results = self._pass.read(self._scheduler.pool)
        self._meter.pass_s = self._pass.seconds
        seconds = self._clock() - self._meter.scheduled_at
        for each in results:
            if each.finite:
                self._record_compute(each.scheduled, self._meter.scheduled_at, seconds)
        return results

    def _record_compute(self, scheduled: ScheduledRequest, start: float, seconds: float) -> None:
        request = scheduled.request
        request.times.add(start, seconds)
        if new := request.record_prefill(scheduled.stop):
            self._meter.prompt_tokens += new
            request.cache_blocks(self._scheduler.pool)  # other choices of the same HTTP request have the same prompt

    def reset(self) -> None:
        """Forget every request and all slots without final deltas, after a step failed half-way."""
        for request in self._requests.values():
            self._draft_manager.close(request)
        self._draft_manager.flush()
        self._requests.clear()
        self._keys.clear()
        self._log_probs = DeltaLogProbs()
        self._take_deltas()
        self._scheduler.reset()

    def check_integrity(self) -> None:
        """Verify that every slot and every state is accounted for. Raises AssertionError."""
        requests = list(self._scheduler.requests())
        if self.model.states is not None:
            self.model.states.check_integrity(each.slot_table for each in requests)
        self._scheduler.pool.check_integrity((r.own_slots() for r in requests), (r.shared_blocks for r in requests))

    # Requests start and end.

    def _new_request(self, generation_request: GenerationRequest) -> Request:
        """Raises ValueError, with the reason, if the request cannot be served."""
        tokens = [*generation_request.prompt, *generation_request.committed]
        max_tokens = min(generation_request.sampling.max_tokens, self._max_output_tokens(generation_request, tokens))
        params, strategy = self._strategy.effective_params(generation_request.sampling), self._strategy
        grammar = self._grammars.start_request(params, generation_request.committed)
        calibrations = {source: each for (source, greedy), each in self.calibrations.items() if greedy is params.greedy}
        tree = TokenTree(
            len(tokens) - 1,
            tokens[-1],
            {source: each.cache for source, each in calibrations.items()},
            # Nodes outside the grammar waste rows, but a strategy with sampled drafts has to test them.
            None if grammar is None or strategy.sampled_drafts else grammar.permits,
            chain=strategy.sampled_drafts,
        )
        request = Request(
            next(self._next_key),
            generation_request,
            History(
                params, generation_request.prompt, generation_request.committed, self.model.vocabulary_size, grammar
            ),
            tree,
            max_tokens=max_tokens,
            # Without a second token of output there is no guess to verify.
            limits=self._speculative_config.limits(generation_request.speculative) if max_tokens > 1 else (0, 0),
            calibrations=calibrations,
            arrived=self._clock(),
            grammar=grammar,
        )
        request.stats.strategy = strategy.name
        request.stats.lossy = not strategy.exact
        request.stats.drafter_invariant = strategy.drafter_invariant
        return request

    def _max_output_tokens(self, generation_request: GenerationRequest, tokens: Sequence[int]) -> int:
        """Output tokens that fit after the prompt. Raises ValueError if one is wanted and none fits.

        Also if a token is invalid.
        """
        prompt, positions = len(generation_request.prompt), min(self.model.max_model_len, self.model.slots)
        longest = positions - 1 if generation_request.sampling.max_tokens else positions
        if not prompt:
            raise ValueError("the prompt is empty")
        if prompt > longest:
            raise ValueError(f"the prompt has {prompt} tokens; there is room for {longest}")
        sampling = generation_request.sampling
        named = (*tokens, *sampling.grammar_begins_after, *sampling.logprob_token_ids)
        if any(not 0 <= token < self.model.vocabulary_size for token in named):
            raise ValueError(f"a token id is outside the vocabulary of {self.model.vocabulary_size}")
        return positions - prompt

    def _start_compiled(self, *, may_wait: bool) -> None:
        """Let requests with a ready grammar wait for rows, unless they are over or cannot be served."""
        for request in self._scheduler.take_compiled(may_wait=may_wait):
            if request.times.started is not None or (request.grammar is not None and request.output_tokens):
                # Its grammar did not know, when its last tokens were committed, whether they end it.
                if (reason := request.check_finish()) is not None:
                    self._deltas.append(self._end(request, reason, request.grammar_error()))
            elif error := request.rejection_reason():
                self._remove(request)
                self._deltas.append(Delta(request.id, finish_reason=FinishReason.ERROR, error=error))

    def _end(self, request: Request, reason: FinishReason, error: str = "") -> Delta:
        """End a request without new tokens; return its final delta."""
        delta = Delta(request.id, finish_reason=reason, speculation=request.stats.snapshot(), error=error)
        self._finish(request, delta)
        return delta

    def _finish(self, request: Request, delta: Delta, *, cached: bool = True) -> None:
        """End a request and complete its final delta. `cached`: its computed blocks stay in the cache."""
        stopped = delta.finish_reason is FinishReason.STOP and request.is_stop_token(request.tokens[-1])
        delta.stop_token = request.tokens[-1] if stopped else None
        delta.usage = request.usage()
        delta.timings = request.times.timings(self._clock())
        self._remove(request, cached=cached)

    def _remove(self, request: Request, *, cached: bool = True) -> None:
        self._scheduler.finish(request, cached=cached)
        del self._requests[request.key], self._keys[request.id]
        self._draft_manager.close(request)

    # Accepted and bonus tokens become final.

    def _commit_all(self, results: Sequence[PassResult]) -> list[Delta]:
        deltas = []
        self._gather_states([each for each in results if each.finite])
        for result in results:
            if (delta := self._commit(result)) is not None:
                delta.prompt_log_probs = result.prompt_log_probs
                deltas.append(delta)
        self._log_probs.start()
        return deltas

    def _gather_states(self, results: Sequence[PassResult]) -> None:
        """The hidden states that drafts lack, for all requests at once: a gather is a kernel, and a copy a wait."""
        self._states.clear()
        if not self._draft_client.hidden_state_layers:
            return
        slots: dict[int, tuple[int, Sequence[int]]] = {}
        for each in results:
            request, accepted = each.scheduled.request, each.accepted_slots()
            computed = request.slot_table.slots
            if lacking := self._draft_manager.lacking_states(request, len(computed) + len(accepted)):
                start, stop = lacking.start, lacking.stop
                slots[request.key] = start, [*computed[start:stop], *accepted[: max(0, stop - len(computed))]]
        if slots:
            states = self._pass.hidden_states.gather(list(chain.from_iterable(part for _, part in slots.values())))
            if self._draft_client.concurrent:  # they are sent
                [states] = HostCopy(states).read()
            parts = states.split([len(part) for _, part in slots.values()])
            self._states.update(
                (key, (start, part)) for (key, (start, _)), part in zip(slots.items(), parts, strict=True)
            )

    def _commit(self, result: PassResult) -> Delta | None:
        """Commit what a pass brought one request. None: nothing that its client wants."""
        scheduled, request = result.scheduled, result.scheduled.request
        if not result.finite:
            delta = Delta(request.id, finish_reason=FinishReason.ERROR, error=NOT_FINITE_ERROR)
            self._finish(request, delta, cached=False)
            return delta
        self._draft_manager.send_hidden_states(request, scheduled.stop - scheduled.draws)
        if result.verdict is not None:
            return self._commit_verdict(result, result.verdict)
        if scheduled.complete:
            return self._end(request, FinishReason.LENGTH)  # it wants no output
        return Delta(request.id) if result.prompt_log_probs else None

    def _commit_verdict(self, result: PassResult, verdict: Verdict) -> Delta:
        scheduled, request = result.scheduled, result.scheduled.request
        tokens, reason = request.truncate_at_end(verdict.tokens(request.tree))
        accepted = verdict.accepted[: len(tokens)]
        self._record_acceptance(scheduled, tokens, accepted)
        delta = self._new_delta(scheduled, tokens, accepted, reason)
        # The last token becomes the root, whose row is yet to be run: it keeps no slot, be it an accepted node's.
        drawn_at = scheduled.keep_slots(accepted[: len(tokens) - 1], self._scheduler.pool)
        if (params := request.generation_request.sampling).logprobs is not None:
            drawn_from = [result.logits[row : row + 1] for row in drawn_at]
            self._log_probs.add(delta, drawn_from, params.logprobs, params.logprob_token_ids)
        self._draft_manager.commit(request, tokens, accepted)
        request.commit(tokens)  # last: it moves the root of the tree
        request.times.commit(self._clock())
        if reason is not None:
            self._finish(request, delta)
        elif request.grammar is not None and not request.grammar.ready:
            self._scheduler.recompile(request)
        return delta

    def _record_acceptance(self, scheduled: ScheduledRequest, tokens: Sequence[int], accepted: Sequence[int]) -> None:
        """Count the verified nodes, and calibrate the drafts' probabilities.

        If tokens do not depend on the draft, calibration also learns from nodes without a row: underrated nodes get no
        row, so their rating would never recover.
        """
        request, nodes = scheduled.request, scheduled.nodes
        reached = request.tree.height(nodes)
        for stats in (request.stats, self._meter.speculation):
            stats.record(len(nodes), reached, len(accepted))
        among = None if self._strategy.drafter_invariant else nodes
        self._meter.calibration_samples += request.observe_outcomes(accepted, tokens, among)

    def _new_delta(
        self, scheduled: ScheduledRequest, tokens: list[int], accepted_nodes: Sequence[int], reason: FinishReason | None
    ) -> Delta:
        request, count = scheduled.request, len(accepted_nodes)
        accepted = [True] * count + [False] * (len(tokens) - count)
        delta = Delta(request.id, tokens, accepted, finish_reason=reason)
        if self._meter.stats_due or reason is not None:
            delta.speculation = request.stats.snapshot()
        if reason is FinishReason.ERROR:
            delta.error = request.grammar_error(tokens)
        if request.generation_request.return_tree:
            delta.trees = [self._verified_tree(scheduled, accepted_nodes)]
        return delta

    def _verified_tree(self, scheduled: ScheduledRequest, accepted_nodes: Sequence[int]) -> VerifiedTree:
        """The step's nodes, numbered by their rows."""
        tree, nodes = scheduled.request.tree, scheduled.nodes
        numbers = {ROOT: 0} | {node: number for number, node in enumerate(nodes, 1)}
        return VerifiedTree(
            parents=[numbers[tree.parents[node]] for node in nodes],
            tokens=[tree.tokens[node] for node in nodes],
            accepted=[node in accepted_nodes for node in nodes],
            methods=[self._methods[tree.sources[node]] for node in nodes],
        )

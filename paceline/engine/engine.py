"""The target's loop: receive, schedule, run, verify, commit.

    step:  growth from drafts → rows → forward pass → draws → tokens → deltas, and messages to the drafts

Plain decoding is this loop without draft nodes. `paceline.engine.engine_loop` calls `step` while there is work.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.core.log_probabilities import log_probs
from paceline.core.logits_rules import History
from paceline.core.policy.calibration import Calibration
from paceline.core.policy.step_cost import FREE_ROWS, RowCost, StepCost
from paceline.core.sampling import is_finite
from paceline.core.strategies import make_verifier
from paceline.core.tree import ROOT, TokenTree
from paceline.drafting.speculator import Commit, Context
from paceline.engine.draft_client import DraftClient
from paceline.engine.draft_manager import DraftManager
from paceline.engine.draft_schedule import Clock, make_draft_schedule
from paceline.engine.drafted_request import OWN_DRAFT_SOURCE
from paceline.engine.hidden_states import MAX_HIDDEN_STATES_SENT, HiddenStates
from paceline.engine.prompt_scores import score_prompts
from paceline.engine.request import Request
from paceline.engine.scheduler import ScheduledRequest, Scheduler
from paceline.engine.slot_pool import SlotPool
from paceline.grammar.grammar_state import GrammarCompiler
from paceline.messages import (
    Delta,
    EngineLoad,
    FinishReason,
    GenerationRequest,
    LogProbs,
    PromptLogProbs,
    SpeculationStats,
    VerifiedTree,
)
from paceline.model.model import Model
from paceline.model.native.native_product import draw_candidates
from paceline.model.row_probe import finish
from paceline.model.rows import Row
from paceline.telemetry.step_stats import StatsTimer, StepStats

log = logging.getLogger(__name__)

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
        self.hidden_layers = tuple(draft_client.hidden_state_layers)
        """Layers whose hidden states are kept for drafts."""
        self.rows_per_s = config.max_num_batched_rows / cost(config.max_num_batched_rows)
        """Of full passes."""
        self.last_step = StepStats(0.0, 0, 0, 0, model.slots)
        self.stats_due = False
        """Whether the last step's deltas carry statistics. Final deltas always do."""
        self._speculative_config = speculative_config
        self._methods = (speculative_config.method, *speculative_config.beside)
        """By source of a node."""
        self._strategy = speculative_config.strategy
        self._verifier = make_verifier(speculative_config, draw_candidates)
        if self._strategy.warning:
            log.log(logging.INFO if self._strategy.exact else logging.WARNING, self._strategy.warning)
        self._clock = clock
        self._cost = StepCost(cost)
        lockstep = speculative_config.draft_schedule == "lockstep"
        self._draft_client = draft_client
        self._draft_manager = DraftManager(
            draft_client,
            lookup_clients,
            speculative_config.rejection_sampling_strategy,
            make_draft_schedule(draft_client.concurrent, lockstep, self._cost, clock),
            model.vocabulary_size,
            clock,
            gated=speculative_config.row_budget and not lockstep,
            sampled_drafts=self._strategy.sampled_drafts,
        )
        self._grammars = grammars or GrammarCompiler.of(model.name, model.vocabulary_size)
        self._hidden = HiddenStates(model.slots)
        node_cost = self._cost if speculative_config.row_budget else StepCost(FREE_ROWS)
        self._scheduler = Scheduler(config, SlotPool(model.slots, caching=config.enable_prefix_caching), node_cost)
        self._requests: dict[int, Request] = {}
        self._keys: dict[str, int] = {}
        self._next_key = count(1)
        self._ended: list[Delta] = []
        """Final deltas of requests that ended between steps."""
        self._stats_timer = StatsTimer()
        self._pass_s = 0.0
        """Of the last pass."""
        self._reset_counters()

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests or self._ended)

    @property
    def load(self) -> EngineLoad:
        """As of the last step."""
        last = self.last_step
        return EngineLoad(last.running, last.waiting, last.free_slots, last.rows, last.step_s)

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
            self._ended.append(Delta(generation_request.request_id, finish_reason=FinishReason.ERROR, error=str(error)))
            return
        self._requests[request.key] = request
        self._keys[request.id] = request.key
        self._scheduler.compiling.append(request)
        self._start_compiled(may_wait=False)

    def cancel(self, request_id: str) -> None:
        """End a request; the next step returns its final delta. Unknown ids are ignored."""
        key = self._keys.get(request_id)
        if key is not None:
            self._ended.append(self._end(self._requests[key], FinishReason.CANCELLED))
            self._draft_manager.flush()

    def step(self) -> list[Delta]:
        """Run one forward pass, if there is anything to run, and return the new deltas."""
        start = self._clock()
        self._start_compiled(may_wait=True)
        deltas, self._ended = self._ended, []
        self.stats_due = self._stats_timer.due(start)
        self._draft_manager.receive_growth(self._requests, self._scheduler.expected_to_draw())
        if (layers := tuple(self._draft_client.hidden_state_layers)) != self.hidden_layers:
            self._change_hidden_layers(layers)
        received = self._clock()
        batch = self._scheduler.schedule()
        self._draft_manager.find_drafts(self._scheduler.running)  # before the pass: drafts can start with the prompt
        only_draws = all(each.only_draws for each in batch)
        drawing = [each.request for each in batch] if only_draws else []
        nodes = sum(len(each.nodes) for each in batch)
        if batch:
            deltas += self._run_step(batch)
            overhead = self._draft_overhead_tokens(drawing, self._clock() - start)
            self._draft_manager.end_step(self._scheduler.best_unverified, overhead)
        self._draft_manager.flush()
        if drawing:
            self._observe_step_cost(drawing, nodes, self._clock() - received)
        self._record_step_stats(batch, deltas, self._clock() - start)
        return deltas

    def reset(self) -> None:
        """Forget every request and all slots without final deltas, after a step failed half-way."""
        for request in self._requests.values():
            self._draft_manager.close(request)
        self._draft_manager.flush()
        self._requests.clear()
        self._keys.clear()
        self._ended.clear()
        self._scheduler.reset()

    def check_integrity(self) -> None:
        """Verify that every slot is accounted for. Raises AssertionError."""
        requests = list(self._scheduler.requests())
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
                    self._ended.append(self._end(request, reason, request.grammar_error()))
            elif error := request.rejection_reason():
                self._remove(request)
                self._ended.append(Delta(request.id, finish_reason=FinishReason.ERROR, error=error))

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

    # One forward pass.

    def _run_step(self, batch: Sequence[ScheduledRequest]) -> list[Delta]:
        """Run the batch's rows, verify, and commit."""
        start = self._clock()
        rows: list[Row] = []
        sampled: list[int] = []
        scored: list[int] = []
        for each in batch:
            first = len(rows) - each.start  # where the row of the request's first token would be
            scored += [first + i for i in each.scored_rows]
            rows += each.model_rows()
            if each.draws:
                sampled += range(len(rows) - 1 - len(each.nodes), len(rows))
        began = self._clock()
        output = self.model.run(rows, [*sampled, *scored], self.hidden_layers)
        finish(output.logits)
        self._pass_s = self._clock() - began
        if output.hidden is not None:
            self._hidden.store([row.slot for row in rows], output.hidden)
        logits, prompt_logits = output.logits[: len(sampled)], output.logits[len(sampled) :]
        deltas: list[Delta] = []
        if not is_finite(output.logits):
            batch, logits, prompt_logits, deltas = self._fail_not_finite(batch, logits, prompt_logits)
        new_tokens = self._verifier.verify(logits, [each.verification_input() for each in batch if each.draws])
        prompt_log_probs = score_prompts(batch, prompt_logits)
        seconds = self._clock() - start
        for each in batch:
            self._record_compute(each, start, seconds)
        return deltas + self._commit_all(batch, logits, new_tokens, prompt_log_probs)

    def _fail_not_finite(
        self, batch: Sequence[ScheduledRequest], logits: Tensor, prompt_logits: Tensor
    ) -> tuple[list[ScheduledRequest], Tensor, Tensor, list[Delta]]:
        """End the requests whose root or prompt has logits that are not finite.

        If only nodes have such logits, the nodes are dropped: the target may never draw them. Returns the rest of the
        batch with its logits, and deltas.
        """
        sizes = [1 + len(each.nodes) if each.draws else 0 for each in batch]
        scored = [len(each.scored_rows) for each in batch]
        left, parts, prompt_parts, deltas = [], [logits[:0]], [prompt_logits[:0]], []
        for each, part, prompt_part in zip(batch, logits.split(sizes), prompt_logits.split(scored), strict=True):
            prompt_is_finite = is_finite(prompt_part)
            if not (prompt_is_finite and is_finite(part)):
                self._scheduler.pool.return_slots(each.slots)
                each.nodes, each.slots, part = [], [], part[:1]
            if prompt_is_finite and is_finite(part):
                left.append(each)
                parts.append(part)
                prompt_parts.append(prompt_part)
                continue
            delta = Delta(each.request.id, finish_reason=FinishReason.ERROR, error=NOT_FINITE_ERROR)
            self._finish(each.request, delta, cached=False)
            deltas.append(delta)
        return left, torch.cat(parts), torch.cat(prompt_parts), deltas

    def _record_compute(self, scheduled: ScheduledRequest, start: float, seconds: float) -> None:
        request = scheduled.request
        request.times.started = start if request.times.started is None else request.times.started
        request.times.compute_s += seconds
        if new := request.record_prefill(scheduled.stop):
            self._prompt_tokens += new
            request.cache_blocks(self._scheduler.pool)  # other choices of the same HTTP request have the same prompt

    # Accepted and bonus tokens become final.

    def _commit_all(
        self,
        batch: Sequence[ScheduledRequest],
        logits: Tensor,
        new_tokens: Sequence[list[int]],
        prompt_log_probs: Sequence[list[PromptLogProbs]],
    ) -> list[Delta]:
        """`new_tokens`: for each request that draws, in order, its accepted tokens and the bonus token.

        `prompt_log_probs`: what each request of the batch sends of its prompt.
        """
        deltas = []
        row, tokens = 0, iter(new_tokens)  # `row`: the first row of the next request in `logits`
        for scheduled, scores in zip(batch, prompt_log_probs, strict=True):
            if self.hidden_layers:
                self._send_hidden_states(scheduled)
            if scheduled.draws:
                delta = self._commit(scheduled, next(tokens), logits, row)
                row += 1 + len(scheduled.nodes)
            elif scheduled.complete:
                delta = self._end(scheduled.request, FinishReason.LENGTH)  # it wants no output
            elif scores:
                delta = Delta(scheduled.request.id)
            else:
                continue
            delta.prompt_log_probs = scores
            deltas.append(delta)
        return deltas

    def _commit(self, scheduled: ScheduledRequest, new_tokens: Sequence[int], logits: Tensor, row: int) -> Delta:
        """`new_tokens`: accepted tokens, the bonus token. `row`: of the root in `logits`; those of its nodes follow."""
        request = scheduled.request
        tokens, reason = request.truncate_at_end(new_tokens)
        path = request.tree.match(tokens)  # may end with a node without a row that the bonus token has confirmed
        # With `residual` the last token may be an accepted guess that had no row: it counts as the bonus token.
        accepted_nodes = path[: len(new_tokens) - 1]
        self._record_acceptance(scheduled, tokens, path, len(accepted_nodes))
        # The last token becomes the root, whose row is yet to be run: it keeps no slot, be it an accepted node's.
        drawn_at = self._keep_accepted(scheduled, accepted_nodes[: len(tokens) - 1])
        delta = self._new_delta(scheduled, tokens, accepted_nodes, reason)
        delta.log_probs = self._log_probs(request, logits, [row + i for i in drawn_at], tokens)
        self._commit_at_drafts(request, tokens, accepted_nodes)
        request.commit(tokens, self._clock())  # last: it moves the root of the tree
        if reason is not None:
            self._finish(request, delta)
        elif request.grammar is not None and not request.grammar.ready:
            self._scheduler.recompile(request)
        return delta

    def _new_delta(
        self, scheduled: ScheduledRequest, tokens: list[int], accepted_nodes: Sequence[int], reason: FinishReason | None
    ) -> Delta:
        request, count = scheduled.request, len(accepted_nodes)
        accepted = [True] * count + [False] * (len(tokens) - count)
        delta = Delta(request.id, tokens, accepted, finish_reason=reason)
        if self.stats_due or reason is not None:
            delta.speculation = request.stats.snapshot()
        if reason is FinishReason.ERROR:
            delta.error = request.grammar_error(tokens)
        if request.generation_request.return_tree:
            delta.trees = [self._verified_tree(scheduled, accepted_nodes)]
        return delta

    def _commit_at_drafts(self, request: Request, tokens: Sequence[int], accepted_nodes: Sequence[int]) -> None:
        """Send the drafts what a step commits.

        They get the last tokens of a request, too: some learn from them for other requests.
        """
        base = len(request.tokens) - 1
        from_draft = [request.tree.sources[node] for node in accepted_nodes].count(OWN_DRAFT_SOURCE)
        self._draft_manager.record_accepted(request, from_draft)
        hidden_states = self._commit_hidden_states(request, base)
        self._draft_manager.commit(request, Commit(request.key, base, tokens, len(accepted_nodes), hidden_states))

    def _record_acceptance(
        self, scheduled: ScheduledRequest, tokens: Sequence[int], path: Sequence[int], accepted_count: int
    ) -> None:
        """Count the verified nodes, and calibrate the drafts' probabilities.

        If tokens do not depend on the draft, calibration also learns from nodes without a row: underrated nodes get no
        row, so their rating would never recover.
        """
        tree, nodes = scheduled.request.tree, scheduled.nodes
        reached = tree.height(nodes)
        for stats in (scheduled.request.stats, self._step_speculation):
            stats.record(len(nodes), reached, accepted_count)
        learn_from_all, calibrations = self._strategy.drafter_invariant, scheduled.request.calibrations
        for node, source, cell, was_drawn in tree.outcomes(path, tokens):
            if learn_from_all or node in nodes:
                calibrations[source].observe(cell, was_drawn)
                if source == OWN_DRAFT_SOURCE:
                    self._calibration_samples.append((cell, was_drawn))

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

    def _keep_accepted(self, scheduled: ScheduledRequest, path: Sequence[int]) -> list[int]:
        """Keep the slots of accepted nodes on the path to the last committed token; return the others.

        The result says which of the request's rows each committed token was drawn from: 0 is the root's, i + 1 that of
        node i.
        """
        if not scheduled.nodes:
            return [0]
        kept = [scheduled.nodes.index(node) for node in path]
        scheduled.request.slot_table.slots.extend([scheduled.slots[i] for i in kept])
        self._scheduler.pool.return_slots([slot for i, slot in enumerate(scheduled.slots) if i not in kept])
        return [0, *(i + 1 for i in kept)]

    def _log_probs(
        self, request: Request, logits: Tensor, rows: Sequence[int], tokens: Sequence[int]
    ) -> list[LogProbs]:
        params = request.generation_request.sampling
        if params.logprobs is None:
            return []
        return log_probs(logits[list(rows)], tokens, params.logprobs, params.logprob_token_ids)

    # Hidden states for drafts.

    def _send_hidden_states(self, scheduled: ScheduledRequest) -> None:
        """Send the draft the hidden states before the root that it lacks; the root's come with the commit.

        After a hit in the prefix cache, a move to another draft or a pause, these are all missing states, up to
        `MAX_HIDDEN_STATES_SENT` positions a step.
        """
        request = scheduled.request
        start = request.hidden_states_sent
        stop = min(scheduled.stop - scheduled.draws, start + MAX_HIDDEN_STATES_SENT)
        if request.draft_active and start < stop:
            states = self._hidden.gather(request.slot_table.slots[start:stop])
            self._draft_manager.context(Context(request.key, start, states))
            request.hidden_states_sent = stop

    def _commit_hidden_states(self, request: Request, base: int) -> Tensor | None:
        """Hidden states of the root at `base` and the accepted tokens.

        None if the draft lacks earlier states or is paused: then `_send_hidden_states` sends them later.
        """
        if not self.hidden_layers or request.paused or request.hidden_states_sent < base:
            return None
        request.hidden_states_sent = len(request.slot_table)
        return self._hidden.gather(request.slot_table.slots[base:])

    def _change_hidden_layers(self, layers: tuple[int, ...]) -> None:
        """Keep the hidden states of other layers for a new draft.

        Everything is computed again, also the cache: a draft guesses badly where states are missing.
        """
        self.hidden_layers = layers
        self._hidden.clear()
        self._scheduler.recompute_all()

    # Costs and statistics.

    def _draft_overhead_tokens(self, drawing: Sequence[Request], seconds: float) -> float:
        """Tokens that drafting cost each drafted request, in a step that took `seconds`.

        `drawing`: its requests if it computed no prompt tokens, else none.
        """
        drafted = sum(request.draft_active for request in drawing)
        return self._cost.tokens_lost(len(drawing), seconds) / drafted if drafted else 0.0

    def _observe_step_cost(self, drawing: Sequence[Request], nodes: int, seconds: float) -> None:
        """`seconds`: of the step after growth was received."""
        self._cost.passes.observe(len(drawing) + nodes, self._pass_s)
        self._cost.observe(len(drawing) + nodes, seconds, nodes)
        if not nodes:
            self._cost.observe_plain(len(drawing), seconds, drafted=any(request.draft_active for request in drawing))

    def _record_step_stats(self, batch: Sequence[ScheduledRequest], deltas: Sequence[Delta], seconds: float) -> None:
        self.last_step = StepStats(
            seconds,
            rows=sum(each.stop - each.start + len(each.nodes) for each in batch),
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            free_slots=self._scheduler.pool.free,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=sum(len(delta.tokens) for delta in deltas),
            preemptions=self._scheduler.preemptions,
            speculation=self._step_speculation,
            nodes_received=self._draft_manager.received,
            nodes_grafted=self._draft_manager.grafted,
            calibration_samples=self._calibration_samples,
        )
        self._reset_counters()

    def _reset_counters(self) -> None:
        """Start counting for the next step."""
        self._prompt_tokens = 0
        self._step_speculation = SpeculationStats()
        self._calibration_samples: list[tuple[int, bool]] = []
        self._scheduler.preemptions = self._draft_manager.received = self._draft_manager.grafted = 0

"""The target's loop: receive, schedule, run, draw and verify, commit.

    step:  growth from drafts → rows → forward pass → draws → tokens → deltas, and news for the drafts

Plain decoding is this loop with no guesses. `step` runs on one thread; `paceline.engine.loop` gives it one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from paceline.budget import Calibration, Patience, RowCost
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.engine.drafting import Drafting, News
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler, Work, expected_tokens
from paceline.engine.slots import SlotPool
from paceline.messages import Delta, FinishReason, Load, LogProbs, SpeculationStats, Submission, Timings
from paceline.model.model import Model, Output
from paceline.model.rows import Row
from paceline.sampling import Row as DrawRow
from paceline.sampling import draw, log_probs
from paceline.speculators.base import Commit, Context
from paceline.telemetry.step import StepStats
from paceline.tree import TokenTree
from paceline.verify import STRATEGIES, walk

RETRY_DRAFT_S = 0.5
"""How often a request without a draft looks for one."""


@dataclass(slots=True)
class _Tally:
    """What one step counts on its way."""

    received: int = 0
    grafted: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    guesses: list[tuple[float, bool]] = field(default_factory=list)


class Engine:
    """Decodes many requests at once over one model. Not thread-safe."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        speculation: SpeculativeConfig,
        drafting: Drafting,
        cost: RowCost,
        observe: Callable[[StepStats], None] = lambda stats: None,
    ) -> None:
        """`cost`: measured by `paceline.model.probe.row_cost`. `observe` is told about every step."""
        self.model = model
        self.calibration = Calibration()
        self._speculation = speculation
        self._strategy = STRATEGIES[speculation.rejection_sampling_strategy]
        self._drafting = drafting
        self._cost = cost
        self._observe = observe
        self._patience = Patience()
        self._hidden_layers = tuple(drafting.hidden_state_layers)
        # A position found in the prefix cache has no hidden states to hand to a draft that wants them.
        reuse = config.enable_prefix_caching and not self._hidden_layers
        self._pool = SlotPool(model.slots, caching=reuse)
        self._scheduler = Scheduler(config, self._pool, cost, reuse)
        self._requests: dict[int, Request] = {}
        self._keys: dict[str, int] = {}
        self._serial = itertools.count(1)
        self._refused: list[Delta] = []
        self._tally = _Tally()
        self._last_load = Load(0, 0, self._pool.free, 0, 0.0)
        self._last_news = time.perf_counter()

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests or self._refused)

    @property
    def load(self) -> Load:
        return self._last_load

    def submit(self, submission: Submission) -> None:
        """Take in a request. One that cannot be served ends at the next step, with an error in its delta."""
        try:
            request = self._accept(submission)
        except ValueError as error:
            self._refused.append(Delta(submission.request_id, finish_reason=FinishReason.ERROR, error=str(error)))
            return
        self._requests[request.key] = request
        self._keys[request.id] = request.key
        self._scheduler.waiting.append(request)
        self._find_draft(request)
        self._drafting.flush()

    def cancel(self, request_id: str) -> None:
        """End a request: the next step gives its last delta, with what it came to. Unknown ids are ignored."""
        key = self._keys.get(request_id)
        if key is not None:
            delta = Delta(request_id, finish_reason=FinishReason.CANCELLED)
            self._close(self._requests[key], delta)
            self._refused.append(delta)
            self._drafting.flush()

    def step(self) -> list[Delta]:
        """Run one forward pass, if there is anything to run, and return what is new."""
        start = time.perf_counter()
        deltas, self._refused = self._refused, []
        self._gather_guesses()
        works = self._scheduler.schedule()
        if works:
            output, wanted = self._run(works)
            deltas += self._verify(works, output, wanted, start)
        self._drafting.flush()
        self._last_news = time.perf_counter()
        self._report(works, deltas, self._last_news - start)
        return deltas

    def check_integrity(self) -> None:
        """Prove that every slot is accounted for. Raises AssertionError."""
        requests = list(self._scheduler.requests())
        self._pool.check_integrity((r.own_slots() for r in requests), (r.shared for r in requests))

    # Requests come and go.

    def _accept(self, submission: Submission) -> Request:
        prompt, done = len(submission.prompt), len(submission.committed)
        room = min(self.model.max_model_len, self._pool.slots) - prompt
        if not submission.prompt:
            raise ValueError("the prompt is empty")
        if room < 1:
            raise ValueError(f"the prompt has {prompt} tokens; there is room for {prompt + room - 1}")
        if any(not 0 <= t < self.model.vocabulary_size for t in (*submission.prompt, *submission.committed)):
            raise ValueError(f"a token id is outside the vocabulary of {self.model.vocabulary_size}")
        if submission.request_id in self._keys:
            raise ValueError(f"request id {submission.request_id!r} is in use")
        max_tokens = min(submission.sampling.max_tokens, room)
        last = submission.committed[-1] if done else submission.prompt[-1]
        request = Request(
            next(self._serial),
            submission,
            self._strategy.law(submission.sampling),
            max_tokens,
            self._speculation.limits(submission.speculative),
            self.model.vocabulary_size,
            TokenTree(prompt + done - 1, last, self.calibration),
        )
        if done and request.finish_reason_of(done, last) is not None:
            raise ValueError(f"the request is over already: {done} tokens were committed, the last one ended it")
        return request

    def _end(self, request: Request) -> None:
        self._scheduler.finish(request)
        del self._requests[request.key], self._keys[request.id]
        self._drafting.close(request.key)

    # Guesses come in.

    def _find_draft(self, request: Request) -> None:
        if not request.speculative:
            return
        request.tree.forget_ids()
        opening = request.opening(self._speculation.rejection_sampling_strategy)
        request.draft = self._drafting.open(opening, request.submission.drafts)
        request.retry_draft_at = time.perf_counter() + RETRY_DRAFT_S
        if request.draft is not None:
            request.stats.drafts.append(request.draft)

    def _gather_guesses(self) -> None:
        """Take in what has arrived, then wait for more for as long as that pays."""
        self._absorb(self._drafting.poll(0.0))
        now = time.perf_counter()
        for request in self._requests.values():
            if request.speculative and request.draft is None and now >= request.retry_draft_at:
                self._find_draft(request)
        while True:
            drawing = [r for r in self._scheduler.running if r.missing == 1]
            hopeful = any(r.draft is not None and r.depth_allowed() > 0 for r in drawing)
            if not hopeful or len(drawing) < len(self._requests):
                return
            expected, height, step_s = expected_tokens(drawing, self._cost)
            wait_s = self._patience.wait_s(height, expected, step_s)
            if not wait_s:
                return
            news = self._drafting.poll(wait_s)
            self._absorb(news)
            now = time.perf_counter()
            gain = expected_tokens(drawing, self._cost)[0] - expected
            self._patience.observe(height, gain, now - self._last_news)
            self._last_news = now
            if not news:
                return

    def _absorb(self, news: News) -> None:
        for key, growth in news.grown:
            self._tally.received += len(growth.node_ids)
            request = self._requests.get(key)
            if request is not None:
                self._tally.grafted += request.tree.graft(growth, 4 * request.max_nodes)
        for key in news.lost:
            request = self._requests.get(key)
            if request is not None:
                request.draft = None
                self._find_draft(request)

    # One forward pass.

    def _run(self, works: Sequence[Work]) -> tuple[Output, list[int]]:
        """Run the rows of all works; also the indices of those that are drawn from, work by work."""
        rows: list[Row] = []
        wanted: list[int] = []
        for work in works:
            request = work.request
            rows += [request.lane.row(request.tokens[i], i) for i in range(work.start, work.stop)]
            if work.draws:
                wanted += range(len(rows) - 1, len(rows) + len(work.nodes))
            branches: dict[int, list[int]] = {id(request.tree.root): []}
            for node, slot in zip(work.nodes, work.slots, strict=True):
                branches[id(node)] = [*branches[id(node.parent)], slot]
                rows.append(request.lane.branch_row(node.token, branches[id(node)]))
        return self.model.run(rows, wanted, self._hidden_layers), wanted

    def _verify(self, works: Sequence[Work], output: Output, wanted: Sequence[int], start: float) -> list[Delta]:
        draws = draw(output.logits, [row for work in works if work.draws for row in _draw_rows(work)]).tolist()
        seconds = time.perf_counter() - start
        deltas = []
        first_row = first_draw = 0
        for work in works:
            clock = work.request.clock
            clock.started = clock.started if clock.started is not None else start
            clock.compute_s += seconds
            hidden = output.hidden
            if hidden is not None:
                count = work.stop - work.start
                hidden = hidden[first_row : first_row + count + len(work.nodes)]
                self._send_context(work, hidden)
                first_row += count + len(work.nodes)
                hidden = hidden[count - 1 :]
            if work.draws:
                last_draw = first_draw + 1 + len(work.nodes)
                deltas.append(
                    self._commit(work, draws[first_draw:last_draw], output.logits[first_draw:last_draw], hidden)
                )
                first_draw = last_draw
        return deltas

    def _send_context(self, work: Work, hidden: Tensor) -> None:
        """Hidden states of the tokens before the root; those of the root travel with the commit."""
        request = work.request
        count = work.stop - work.start - work.draws
        if request.draft is not None and count:
            self._drafting.context(Context(request.key, work.start, hidden[:count]))

    # What was drawn becomes final.

    def _commit(self, work: Work, draws: Sequence[int], logits: Tensor, hidden: Tensor | None) -> Delta:
        """`draws`, `logits` and `hidden` are those of the root and of each verified node, in this order."""
        request, base = work.request, len(work.request.tokens) - 1
        tokens = walk(request.tree.root, work.nodes, draws)
        self._learn(work, tokens)
        places = self._keep_accepted(work, tokens)
        guessed = len(tokens) - 1
        tokens, reason = _until_end(request, tokens)
        places = places[: len(tokens)]
        request.tokens += tokens
        request.history.extend(tokens)
        request.tree.commit(tokens)
        delta = Delta(
            request.id,
            tokens,
            [i < guessed for i in range(len(tokens))],
            self._log_probs(request, logits, places, tokens),
            reason,
            speculation=request.stats,
        )
        if reason is not None:
            self._close(request, delta)
        elif request.draft is not None:
            states = hidden[places] if hidden is not None else None
            self._drafting.commit(Commit(request.key, base, tokens, min(guessed, len(tokens)), states))
        return delta

    def _learn(self, work: Work, tokens: Sequence[int]) -> None:
        """Count what was verified, and what the draft's confidence turned out to be worth."""
        root = work.request.tree.root
        for stats in (work.request.stats, self._tally.speculation):
            stats.record([node.position - root.position for node in work.nodes], len(tokens) - 1)
        drawn = {id(root): tokens[0]}
        node = root
        for token, after in itertools.pairwise(tokens):
            node = node.children[token]
            drawn[id(node)] = after
        for node in work.nodes:
            if id(node.parent) in drawn:
                hit = node.token == drawn[id(node.parent)]
                self.calibration.observe(node.log_prob, hit)
                self._tally.guesses.append((node.log_prob, hit))

    def _keep_accepted(self, work: Work, tokens: Sequence[int]) -> list[int]:
        """Accepted guesses keep their slots, in order; the others give theirs back. Which rows were drawn from."""
        place = {id(node): i for i, node in enumerate(work.nodes)}
        places = [0]
        node = work.request.tree.root
        for token in tokens[:-1]:
            node = node.children[token]
            places.append(place[id(node)] + 1)
        kept = {i - 1 for i in places[1:]}
        work.request.lane.slots += [work.slots[i - 1] for i in places[1:]]
        self._pool.give(slot for i, slot in enumerate(work.slots) if i not in kept)
        return places

    def _log_probs(
        self, request: Request, logits: Tensor, places: Sequence[int], tokens: Sequence[int]
    ) -> list[LogProbs]:
        top = request.submission.sampling.logprobs
        return log_probs(logits[list(places)], tokens, top) if top is not None else []

    def _close(self, request: Request, delta: Delta) -> None:
        now, clock = time.perf_counter(), request.clock
        delta.stop_token = delta.tokens[-1] if delta.finish_reason is FinishReason.STOP else None
        delta.usage = request.usage()
        queued = (clock.started or now) - clock.arrived
        delta.timings = Timings(queued, clock.compute_s, now - clock.arrived)
        self._end(request)

    def _report(self, works: Sequence[Work], deltas: Sequence[Delta], seconds: float) -> None:
        rows = sum(work.stop - work.start + len(work.nodes) for work in works)
        running, waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        self._last_load = Load(running, waiting, self._pool.free, rows, seconds)
        self._observe(
            StepStats(
                seconds,
                rows,
                running,
                waiting,
                self._pool.free,
                prompt_tokens=sum(max(0, min(w.stop, w.request.prompt_tokens) - w.start) for w in works),
                generation_tokens=sum(len(d.tokens) for d in deltas),
                preemptions=self._scheduler.preemptions,
                speculation=self._tally.speculation,
                nodes_received=self._tally.received,
                nodes_grafted=self._tally.grafted,
                guesses=self._tally.guesses,
            )
        )
        self._scheduler.preemptions = 0
        self._tally = _Tally()


def _draw_rows(work: Work) -> list[DrawRow]:
    """What the target draws with after the root and after each guess."""
    request = work.request
    position = len(request.tokens)
    paths: dict[int, list[int]] = {id(request.tree.root): []}
    rows = [DrawRow(request.law, position, request.history)]
    for node in work.nodes:
        path = paths[id(node)] = [*paths[id(node.parent)], node.token]
        rows.append(DrawRow(request.law, position + len(path), request.history, path))
    return rows


def _until_end(request: Request, tokens: Sequence[int]) -> tuple[list[int], FinishReason | None]:
    """The tokens up to the one that ends the request, if one does."""
    for count, token in enumerate(tokens, 1):
        reason = request.finish_reason_of(request.output_tokens + count, token)
        if reason is not None:
            return list(tokens[:count]), reason
    return list(tokens), None

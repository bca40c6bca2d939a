"""One forward pass: the rows of a batch in; logits, verdicts, scores of prompts and hidden states out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.sampling import is_finite, logit_sum
from paceline.core.strategies import Verifier
from paceline.core.verify import Verdict
from paceline.engine.draft_schedule import Clock
from paceline.engine.hidden_states import HiddenStates
from paceline.engine.log_probabilities import log_probs
from paceline.engine.scheduler import ScheduledRequest
from paceline.engine.slot_pool import SlotPool
from paceline.messages import LogProbs, PromptLogProbs
from paceline.model.model import Model
from paceline.model.rows import Row

SCORED_AT_ONCE = 64
"""Rows that are scored together: each takes several numbers for every token of the vocabulary."""


@dataclass(slots=True)
class PassResult:
    """What a pass computed for one request."""

    scheduled: ScheduledRequest
    logits: Tensor
    """Of the root and the verified nodes, [rows, V]; without rows if the request does not draw."""
    prompt_logits: Tensor
    """Of the rows that score the prompt, [rows, V]."""
    finite: bool = True
    """Whether all these are finite numbers. If not, there is no verdict."""
    verdict: Verdict | None = None
    """None if the request does not draw."""
    prompt_log_probs: list[PromptLogProbs] = field(default_factory=list)
    """One part of the prompt's scores, or nothing."""

    def accepted_slots(self) -> list[int]:
        """The slots of the accepted nodes, in the order of their positions."""
        by_node = dict(zip(self.scheduled.nodes, self.scheduled.slots, strict=True))
        return [by_node[node] for node in self.verdict.accepted] if self.verdict else []


@dataclass(frozen=True, slots=True)
class _RunningPass:
    """A pass that was started and whose draws were not read."""

    batch: Sequence[ScheduledRequest]
    logits: Tensor
    """Of the rows that are drawn from, then of those that score prompts, [rows, V]."""
    total: Tensor
    """`logit_sum` of these."""
    began: float


class ModelPass:
    """Runs batches, one at a time: `start`, then `read`. Their hidden states stay in `hidden_states`."""

    def __init__(self, model: Model, verifier: Verifier, layers: Sequence[int], clock: Clock) -> None:
        """`layers`: whose hidden states are kept."""
        self.layers = tuple(layers)
        self.hidden_states = HiddenStates(model.slots)
        self.seconds = 0.0
        """Duration of the last pass; with a model that runs asynchronously, until its draws were read."""
        self._model = model
        self._verifier = verifier
        self._clock = clock
        self._running: _RunningPass | None = None

    def keep_layers(self, layers: Sequence[int]) -> None:
        """Keep the hidden states of other layers for a new draft. All states so far are forgotten."""
        self.layers = tuple(layers)
        self.hidden_states.clear()

    def start(self, batch: Sequence[ScheduledRequest]) -> None:
        """Run the rows. Waits for nothing that an accelerator computes."""
        rows: list[Row] = []
        sampled: list[int] = []
        scored: list[int] = []
        for each in batch:
            first = len(rows) - each.start  # where the row of the request's first token would be
            scored += [first + i for i in each.scored_rows]
            rows += each.model_rows()
            sampled += range(len(rows) - each.drawn_rows, len(rows))
        began = self._clock()
        output = self._model.run(rows, [*sampled, *scored], self.layers)
        self.seconds = self._clock() - began
        if output.hidden is not None:
            self.hidden_states.store([row.slot for row in rows], output.hidden)
        self._running = _RunningPass(batch, output.logits, logit_sum(output.logits), began)

    def read(self, pool: SlotPool) -> list[PassResult]:
        """Verify the started pass, and score prompts. If only nodes have logits that are not finite, the nodes are
        dropped, and their slots go back to `pool`: the target may never draw them."""
        running, self._running = self._running, None
        assert running is not None
        sampled = sum(each.drawn_rows for each in running.batch)
        logits = running.logits[:sampled]
        parts = logits.split([each.drawn_rows for each in running.batch])
        prompts = running.logits[sampled:].split([len(each.scored_rows) for each in running.batch])
        results = [PassResult(*each) for each in zip(running.batch, parts, prompts, strict=True)]
        self._verify(results, logits)  # its draws are queued behind the pass, and the first to be waited for
        if self._model.asynchronous:
            self.seconds = self._clock() - running.began
        if not is_finite(running.logits, running.total):
            for each in results:
                _drop_not_finite(each, pool)
            self._verify(results, torch.cat([logits[:0], *(each.logits for each in results if each.finite)]))
        for each in results:
            if each.finite and len(each.prompt_logits):
                each.prompt_log_probs = [_score(each)]
        return results

    def _verify(self, results: Sequence[PassResult], logits: Tensor) -> None:
        """Set the verdicts. `logits`: [rows, V], of all finite results that draw."""
        drawing = [each for each in results if each.finite and each.scheduled.draws]
        verdicts = self._verifier.verify(logits, [each.scheduled.verification_input() for each in drawing])
        for each, verdict in zip(drawing, verdicts, strict=True):
            each.verdict = verdict


def _drop_not_finite(result: PassResult, pool: SlotPool) -> None:
    scheduled, prompt_is_finite = result.scheduled, is_finite(result.prompt_logits)
    result.verdict = None
    if not (prompt_is_finite and is_finite(result.logits)):
        pool.return_slots(scheduled.slots)
        scheduled.nodes, scheduled.slots, result.logits = [], [], result.logits[:1]
    result.finite = prompt_is_finite and is_finite(result.logits)


def _score(result: PassResult) -> PromptLogProbs:
    """The row of a prompt's token scores the token after it. It runs in any case, as the prompt is computed."""
    request, rows = result.scheduled.request, result.scheduled.scored_rows
    tokens = request.tokens[rows.start + 1 : rows.stop + 1]
    top = request.generation_request.sampling.prompt_logprobs or 0
    entries: list[LogProbs] = []
    for start in range(0, len(tokens), SCORED_AT_ONCE):
        stop = start + SCORED_AT_ONCE
        entries += log_probs(result.prompt_logits[start:stop], tokens[start:stop], top)
    request.rows_scored = rows.stop
    return PromptLogProbs(rows.start + 1, entries)

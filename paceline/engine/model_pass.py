"""One forward pass: the rows of a batch in; logits, verdicts, scores of prompts and hidden states out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.sampling import is_finite
from paceline.core.strategies import Verifier
from paceline.core.verify import Verdict
from paceline.engine.draft_schedule import Clock
from paceline.engine.hidden_states import HiddenStates
from paceline.engine.log_probabilities import log_probs
from paceline.engine.scheduler import ScheduledRequest
from paceline.engine.slot_pool import SlotPool
from paceline.messages import LogProbs, PromptLogProbs
from paceline.model.model import Model
from paceline.model.row_probe import finish
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


class ModelPass:
    """Runs batches. Their hidden states stay in `hidden_states`."""

    def __init__(self, model: Model, verifier: Verifier, layers: Sequence[int], clock: Clock) -> None:
        """`layers`: whose hidden states are kept."""
        self.layers = tuple(layers)
        self.hidden_states = HiddenStates(model.slots)
        self.seconds = 0.0
        """Duration of the last pass."""
        self._model = model
        self._verifier = verifier
        self._clock = clock

    def keep_layers(self, layers: Sequence[int]) -> None:
        """Keep the hidden states of other layers for a new draft. All states so far are forgotten."""
        self.layers = tuple(layers)
        self.hidden_states.clear()

    def run(self, batch: Sequence[ScheduledRequest], pool: SlotPool) -> list[PassResult]:
        """Run the rows, verify, and score prompts. If only nodes have logits that are not finite, the nodes are
        dropped, and their slots go back to `pool`: the target may never draw them."""
        results, logits = self._run_rows(batch)
        if not all(each.finite for each in results):
            for each in results:
                _drop_not_finite(each, pool)
            logits = torch.cat([logits[:0], *(each.logits for each in results if each.finite)])
        drawing = [each for each in results if each.finite and each.scheduled.draws]
        verdicts = self._verifier.verify(logits, [each.scheduled.verification_input() for each in drawing])
        for each, verdict in zip(drawing, verdicts, strict=True):
            each.verdict = verdict
        for each in results:
            if each.finite and len(each.prompt_logits):
                each.prompt_log_probs = [_score(each)]
        return results

    def _run_rows(self, batch: Sequence[ScheduledRequest]) -> tuple[list[PassResult], Tensor]:
        """The results by request, none of them verified, and the logits of all that draw, [rows, V]."""
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
        finish(output.logits)
        self.seconds = self._clock() - began
        if output.hidden is not None:
            self.hidden_states.store([row.slot for row in rows], output.hidden)
        parts = output.logits[: len(sampled)].split([each.drawn_rows for each in batch])
        prompts = output.logits[len(sampled) :].split([len(each.scored_rows) for each in batch])
        finite = is_finite(output.logits)
        results = [
            PassResult(each, part, prompt, finite) for each, part, prompt in zip(batch, parts, prompts, strict=True)
        ]
        return results, output.logits[: len(sampled)]


def _drop_not_finite(result: PassResult, pool: SlotPool) -> None:
    scheduled, prompt_is_finite = result.scheduled, is_finite(result.prompt_logits)
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

"""The lossy strategies: a rule may accept a draft token that the target did not draw.

Each verified node is accepted if it is the target's own draw after its parent, as in `coupled`, or if the rule accepts
it. The commit follows the longest accepted path; among equally long paths, the most probable one, where a drawn token
counts as certain. The target's draw after the last accepted node ends the commit. If the rule accepts nothing, the
result is that of `coupled`.

Shapes: R rows of the step, N tested nodes, V vocabulary, K kept tokens.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from paceline.core.growth import CERTAIN_TOKEN, DraftDistribution
from paceline.core.logits_rules import History, SamplingRow
from paceline.core.sampling import draw, probabilities
from paceline.core.strategies.verifier import VerificationInput, Verifier, sampling_rows
from paceline.core.tree import ROOT
from paceline.core.verify import Verdict


@dataclass(frozen=True, slots=True)
class NodeTest:
    """A node that the rule decides about."""

    node: int
    token: int
    parent_row: int
    """The row of the node's parent, among all rows of the step."""
    draft_distribution: DraftDistribution


class LossyVerifier(Verifier):
    """Walks the tree along drawn and accepted tokens. A subclass is the rule that accepts tokens."""

    @abstractmethod
    def accepts(self, target_NV: Tensor, probs_N: Tensor, tests: Sequence[NodeTest]) -> Tensor:
        """Which nodes are accepted if their parents are, bool [N].

        `target_NV`: the target's distribution after each node's parent. `probs_N`: its probability of the node's token.
        """

    def tested_nodes(self, request: VerificationInput) -> Sequence[int]:
        """The verified nodes that the rule decides about; for the others only the draw counts."""
        return request.verified

    def distribution_row(self, row: SamplingRow) -> SamplingRow:
        """The parameters of the target distribution that the rule reads."""
        return row

    def verify(self, logits_RV: Tensor, requests: Sequence[VerificationInput]) -> list[Verdict]:
        rows = sampling_rows(requests)
        draws = iter(draw(logits_RV, rows, self.find).tolist())
        tests: list[list[NodeTest]] = []
        first_row = 0
        for request in requests:
            tests.append(self._tests(request, first_row))
            first_row += len(request.rows)
        probs = iter(self._accepted_probs(logits_RV, rows, [test for each in tests for test in each]))
        return [
            longest_accepted_path(
                request,
                list(islice(draws, len(request.rows))),
                {test.node: p for test, p in zip(each, islice(probs, len(each)), strict=True) if p > 0},
            )
            for request, each in zip(requests, tests, strict=True)
        ]

    def _tests(self, request: VerificationInput, first_row: int) -> list[NodeTest]:
        tree = request.tree
        row_of = {node: first_row + i for i, node in enumerate((ROOT, *request.verified))}
        return [
            NodeTest(node, tree.tokens[node], row_of[parent], tree.distributions.get(node, CERTAIN_TOKEN))
            for node in self.tested_nodes(request)
            if (parent := tree.parents[node]) in row_of
        ]

    def _accepted_probs(
        self, logits_RV: Tensor, rows: Sequence[SamplingRow], tests: Sequence[NodeTest]
    ) -> Sequence[float]:
        """The target's probability of each accepted token, and 0 for the others."""
        if not tests:
            return ()
        parent_rows = [test.parent_row for test in tests]
        target_NV = probabilities(logits_RV[parent_rows], [self.distribution_row(rows[row]) for row in parent_rows])
        probs_N = target_NV[range(len(tests)), [test.token for test in tests]]
        accepted: list[float] = probs_N.where(self.accepts(target_NV, probs_N, tests), 0.0).tolist()
        return accepted


class TypicalAcceptance(LossyVerifier):
    """`typical-acceptance`: accept token x if target_probs[x] > min(threshold, alpha * exp(-entropy)).

    Cai et al. 2024 (Medusa), Hewitt et al. 2022. At temperature 0 only the largest logit passes. Improbable tokens
    come less often than the target would draw them.
    """

    def __init__(self, threshold: float, alpha: float) -> None:
        """`posterior_threshold` and `posterior_alpha`."""
        self._threshold = threshold
        self._alpha = alpha

    def accepts(self, target_NV: Tensor, probs_N: Tensor, tests: Sequence[NodeTest]) -> Tensor:
        entropy_N = torch.special.entr(target_NV).sum(-1)
        return probs_N > (self._alpha * torch.exp(-entropy_N)).clamp(max=self._threshold)


class LogitComparison(LossyVerifier):
    """`logit-comparison`: accept token x if log draft_probs[x] - log target_probs[x] <= eps.

    Where the draft gives a token too little probability, the target's surplus is never drawn.
    """

    def __init__(self, eps: float) -> None:
        """`logit_comparison_eps`, in nats."""
        self._eps = eps

    def accepts(self, target_NV: Tensor, probs_N: Tensor, tests: Sequence[NodeTest]) -> Tensor:
        decisions = [self._accepts(test, p) for test, p in zip(tests, probs_N.tolist(), strict=True)]
        return torch.tensor(decisions, device=probs_N.device)

    def _accepts(self, test: NodeTest, target_prob: float) -> bool:
        weights = test.draft_distribution
        draft_prob = weights[test.token] / sum(weights.values()) if weights else 1.0
        return target_prob > 0 and math.log(draft_prob) - math.log(target_prob) <= self._eps


@dataclass(slots=True)
class _ThinkingState:
    """Whether a request is in a thinking phase after the first `seen` of its tokens."""

    seen: int = 0
    thinks: bool = False


class RelaxedThinking(LossyVerifier):
    """`use_relaxed_acceptance_for_thinking`, as in TensorRT-LLM.

    Between the tokens that begin and end a thinking phase, accept token x if it is among the target's `relaxed_topk`
    most probable tokens and its probability is within `relaxed_delta` of the largest. Probabilities are those the
    target draws from; at temperature 0, where the largest would have 1, those of temperature 1.
    """

    def __init__(self, begin_token: int, end_token: int, topk: int, delta: float) -> None:
        self._thinking_after = {begin_token: True, end_token: False}
        self._topk = topk
        self._delta = delta
        self._states: WeakKeyDictionary[History, _ThinkingState] = WeakKeyDictionary()

    def accepts(self, target_NV: Tensor, probs_N: Tensor, tests: Sequence[NodeTest]) -> Tensor:
        largest_NK = target_NV.topk(min(self._topk, target_NV.shape[-1])).values
        return probs_N >= largest_NK[:, -1].maximum(largest_NK[:, 0] - self._delta)

    def tested_nodes(self, request: VerificationInput) -> Sequence[int]:
        """The verified nodes whose parents are in a thinking phase."""
        if not request.verified:
            return ()
        tree, thinks = request.tree, {ROOT: self._is_thinking(request)}
        inside = []
        for node in request.verified:
            if (parent := tree.parents[node]) in thinks:
                thinks[node] = self._thinking_after.get(tree.tokens[node], thinks[parent])
                inside += [node] if thinks[parent] else []
        return inside

    def distribution_row(self, row: SamplingRow) -> SamplingRow:
        if not row.params.greedy:
            return row
        return row._replace(params=row.params.model_copy(update={"temperature": 1.0}))

    def _is_thinking(self, request: VerificationInput) -> bool:
        """Whether the request is in a thinking phase at the root."""
        state = self._states.setdefault(request.rows[0].history, _ThinkingState())
        for token in request.tokens[state.seen :]:
            state.thinks = self._thinking_after.get(token, state.thinks)
        state.seen = len(request.tokens)
        return state.thinks


def longest_accepted_path(
    request: VerificationInput, draws: Sequence[int], accepted_probs: Mapping[int, float]
) -> Verdict:
    """`draws`: after the root and after each verified node. `accepted_probs`: target probability by accepted node."""
    tree = request.tree
    draw_after = dict(zip((ROOT, *request.verified), draws, strict=True))
    reached: dict[int, tuple[int, float]] = {ROOT: (0, 0.0)}
    for node in request.verified:
        parent = tree.parents[node]
        if parent not in reached:
            continue
        depth, log_prob = reached[parent]
        if draw_after[parent] == tree.tokens[node]:
            reached[node] = depth + 1, log_prob
        elif node in accepted_probs:
            reached[node] = depth + 1, log_prob + math.log(accepted_probs[node])
    end = max(reached, key=reached.__getitem__)
    return Verdict(tree.path(end), draw_after[end])

"""`residual`: rejection sampling of a chain of draft tokens that were drawn from the draft's distribution.

    accept      draft token x with probability min(1, target_probs[x] / draft_probs[x])
    recovered   the first rejected token is replaced by a draw from max(0, target_probs - draft_probs), normalised
    bonus       a draw from target_probs after the last draft token, if all were accepted

(Leviathan et al. 2023, Chen et al. 2023.) The output has the target's distribution, but unlike that of `coupled` it
depends on the draft tokens. It is exact if draft tokens are drawn from the distributions sent with them; a draft that
sends false distributions biases it.

A token is tested where the target's distribution is known, even if the token's node had no row of its own: the row is
needed only for the token after it. Otherwise the choice of rows would depend on the tokens' values, and the tested
tokens would have another distribution.

Noise is keyed by root, position and purpose, so a token that is drawn or tested again gets fresh noise.

Shapes: R rows of the step, N drawn rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice

import torch
from torch import Tensor

from paceline.core.growth import DraftDistribution
from paceline.core.logits_rules import SamplingRow
from paceline.core.noise import NoisePurpose, gumbel_choice, noise_key, uniform
from paceline.core.sampling import probabilities
from paceline.core.strategies.verifier import VerificationInput, Verifier, sampling_rows
from paceline.core.tree import ROOT
from paceline.core.verify import Verdict

TokenProbs = Mapping[int, float]
"""Probability by token; a missing token has 0."""


@dataclass(frozen=True, slots=True)
class ChainToken:
    """One draft token of a chain, and the two distributions at its position."""

    token: int
    draft_probs: TokenProbs
    target_probs: TokenProbs
    """Of the tokens in `draft_probs`."""


@dataclass(frozen=True, slots=True)
class ChainAcceptance:
    """The first `accepted` tokens of a chain are accepted.

    A token after them is replaced by a draw from max(0, weight * target_probs - draft_probs), normalised.
    """

    accepted: int
    weight: float = 1


AcceptanceRule = Callable[[Sequence[ChainToken], Sequence[float]], ChainAcceptance]
"""Which tokens of a chain are accepted, given a uniform number of [0, 1) for each."""


def accept_each(chain: Sequence[ChainToken], uniforms: Sequence[float]) -> ChainAcceptance:
    """Test each token by its own probabilities, up to the first rejection."""
    for depth, (link, u) in enumerate(zip(chain, uniforms, strict=True)):
        if not u * link.draft_probs[link.token] < link.target_probs[link.token]:
            return ChainAcceptance(depth)
    return ChainAcceptance(len(chain))


@dataclass(frozen=True, slots=True)
class _Chain:
    """A request's draft tokens at positions with a known distribution: those with a row, and the one after them."""

    request: VerificationInput
    first_row: int
    """The request's first row, among all rows of the step."""
    tokens: Sequence[ChainToken]

    def nodes(self, result: ChainAcceptance) -> Sequence[int]:
        """The accepted nodes with rows. A node without one is the bonus token if it is accepted."""
        return range(ROOT + 1, ROOT + 1 + min(result.accepted, len(self.request.verified)))

    def uniforms(self) -> list[float]:
        root = self.request.rows[0]
        keys = (
            noise_key(root.params.seed, NoisePurpose.ACCEPT, root.position, depth) for depth in range(len(self.tokens))
        )
        return [uniform(key) for key in keys]


@dataclass(frozen=True, slots=True)
class _FinalDraw:
    """The distribution of a request's last token: `weight` times a row of the target's, less `subtracted`."""

    row: int
    sampling_row: SamplingRow
    weight: float = 1.0
    subtracted: TokenProbs = field(default_factory=dict)


class Residual(Verifier):
    def __init__(self, rule: AcceptanceRule = accept_each) -> None:
        self._rule = rule

    def verify(self, logits_RV: Tensor, requests: Sequence[VerificationInput]) -> list[Verdict]:
        target_RV = probabilities(logits_RV, sampling_rows(requests))
        chains = _chains(target_RV, requests)
        results = [self._rule(chain.tokens, chain.uniforms()) for chain in chains]
        final_draws = [_final_draw(chain, result) for chain, result in zip(chains, results, strict=True)]
        drawn = iter(_draw(target_RV, [final for final in final_draws if final]))
        return [
            Verdict(chain.nodes(result), next(drawn) if final else chain.tokens[-1].token)
            for chain, result, final in zip(chains, results, final_draws, strict=True)
        ]


def residual_weights(target_NV: Tensor, weights: Sequence[float], subtracted: Sequence[TokenProbs]) -> Tensor:
    """max(0, weight * target - subtracted) of each row, [N, V], not normalised.

    Where rounding leaves nothing, the target's distribution.
    """
    like = partial(torch.tensor, dtype=target_NV.dtype, device=target_NV.device)
    rows = [row for row, probs in enumerate(subtracted) for _ in probs]
    tokens = [token for probs in subtracted for token in probs]
    left_NV = target_NV * like(weights)[:, None]
    if tokens:
        left_NV[rows, tokens] -= like([p for probs in subtracted for p in probs.values()])
    left_NV.clamp_(min=0.0)
    return torch.where(left_NV.sum(-1, keepdim=True) > 0, left_NV, target_NV)


def _chains(target_RV: Tensor, requests: Sequence[VerificationInput]) -> list[_Chain]:
    """The requests' chains. The target's probabilities of all their tokens are read at once."""
    first_rows = list(accumulate((len(each.rows) for each in requests[:-1]), initial=0))
    counts = [min(each.tree.size, len(each.rows)) for each in requests]
    tests = [
        (first + depth, token, _normalised(each.tree.distributions.get(ROOT + 1 + depth, {token: 1})))
        for each, first, count in zip(requests, first_rows, counts, strict=True)
        for depth, token in enumerate(each.tree.tokens[1 : 1 + count])
    ]
    rows = [row for row, _, draft_probs in tests for _ in draft_probs]
    tokens = [token for _, _, draft_probs in tests for token in draft_probs]
    probs = iter(target_RV[rows, tokens].tolist() if tokens else ())
    links = iter([ChainToken(token, draft, {other: next(probs) for other in draft}) for _, token, draft in tests])
    return [
        _Chain(each, first, list(islice(links, count)))
        for each, first, count in zip(requests, first_rows, counts, strict=True)
    ]


def _normalised(distribution: DraftDistribution) -> TokenProbs:
    total = sum(distribution.values())
    return {token: weight / total for token, weight in distribution.items()}


def _final_draw(chain: _Chain, result: ChainAcceptance) -> _FinalDraw | None:
    """None if all tokens were accepted and the last one had no row."""
    accepted, rows = result.accepted, chain.request.rows
    if accepted == len(rows):
        return None
    if accepted == len(chain.tokens):
        return _FinalDraw(chain.first_row + accepted, rows[accepted])
    draft_probs = chain.tokens[accepted].draft_probs
    return _FinalDraw(chain.first_row + accepted, rows[accepted], result.weight, draft_probs)


def _draw(target_RV: Tensor, finals: Sequence[_FinalDraw]) -> list[int]:
    if not finals:
        return []
    target_NV = target_RV[[each.row for each in finals]]
    left_NV = residual_weights(target_NV, [each.weight for each in finals], [each.subtracted for each in finals])
    seeds = [noise_key(each.sampling_row.params.seed, NoisePurpose.REPLACE) for each in finals]
    drawn: list[int] = gumbel_choice(left_NV, seeds, [each.sampling_row.position for each in finals]).tolist()
    return drawn

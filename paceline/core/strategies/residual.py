"""`residual`: rejection sampling of a chain of guesses that were drawn from the draft's own law.

    accept      a guess x with probability min(1, target_probs[x] / draft_probs[x])
    replace     the first guess that is refused by a draw from max(0, target_probs - draft_probs), normalised
    bonus       a draw from target_probs after the last guess, if all were accepted

(Leviathan et al. 2023, Chen et al. 2023.) The output has the target's law, but unlike that of `coupled` it depends on
what was guessed. It is exact if guesses do come from the laws that are sent with them; a draft that lies biases it.

A guess whose place is known is tested, even if it had no row of its own: a row is needed only for what comes after it.
Otherwise what is verified would be chosen by the guesses themselves, and those chosen have another law.

Noise is keyed by root, position and purpose, so a guess that is drawn or tested anew has noise nobody has looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice

import torch
from torch import Tensor

from paceline.core.growth import DraftDistribution
from paceline.core.sampling import NoisePurpose, SamplingRow, gumbel_choice, noise_key, probabilities, uniform
from paceline.core.strategies.verifier import VerificationInput, Verifier, sampling_rows
from paceline.core.tree import ROOT

TokenProbs = Mapping[int, float]
"""By token; what is not there counts as 0."""


@dataclass(frozen=True, slots=True)
class ChainToken:
    """One guess of a chain, and the two laws at its place."""

    token: int
    draft_probs: TokenProbs
    target_probs: TokenProbs
    """Of the tokens that the draft's law has."""


@dataclass(frozen=True, slots=True)
class ChainAcceptance:
    """The first `accepted` guesses stand. If there is another, it is replaced by a draw from what is left of `weight`
    times the target's law when the draft's law is taken away."""

    accepted: int
    weight: float = 1


AcceptanceRule = Callable[[Sequence[ChainToken], Sequence[float]], ChainAcceptance]
"""Which guesses of a chain are accepted, by a uniform number of [0, 1) for each."""


def accept_each(links: Sequence[ChainToken], uniforms: Sequence[float]) -> ChainAcceptance:
    """Each guess is accepted or refused by its own probabilities."""
    for depth, (link, u) in enumerate(zip(links, uniforms, strict=True)):
        if not u * link.draft_probs[link.token] < link.target_probs[link.token]:
            return ChainAcceptance(depth)
    return ChainAcceptance(len(links))


@dataclass(frozen=True, slots=True)
class _Chain:
    """A request's guesses at places whose law is known: those with a row, and the one after them."""

    guessed: VerificationInput
    first_row: int
    """Of the request, in all rows of the step."""
    links: Sequence[ChainToken]

    def uniforms(self) -> list[float]:
        root = self.guessed.rows[0]
        keys = (
            noise_key(root.params.seed, NoisePurpose.ACCEPT, root.position, depth) for depth in range(len(self.links))
        )
        return [uniform(key) for key in keys]


@dataclass(frozen=True, slots=True)
class _FinalDraw:
    """What a request's last token is drawn from: a row of the target's law, times `weight`, without `taken`."""

    row: int
    sampling_row: SamplingRow
    weight: float = 1.0
    subtracted: TokenProbs = field(default_factory=dict)


class Residual(Verifier):
    def __init__(self, rule: AcceptanceRule = accept_each) -> None:
        self._rule = rule

    def verify(self, logits_RV: Tensor, guessed: Sequence[VerificationInput]) -> list[list[int]]:
        target_RV = probabilities(logits_RV, sampling_rows(guessed))
        chains = _chains(target_RV, guessed)
        verdicts = [self._rule(each.links, each.uniforms()) for each in chains]
        endings = [_final_draw(each, verdict) for each, verdict in zip(chains, verdicts, strict=True)]
        drawn = iter(_draw(target_RV, [ending for ending in endings if ending]))
        return [
            [*(link.token for link in each.links[: verdict.accepted]), *islice(drawn, int(ending is not None))]
            for each, verdict, ending in zip(chains, verdicts, endings, strict=True)
        ]


def residual_weights(target_NV: Tensor, weights: Sequence[float], taken: Sequence[TokenProbs]) -> Tensor:
    """What rows of the target's law, times their weights, have above what is taken, [N, V]: not negative, no law yet.

    Where rounding leaves nothing, the target's law.
    """
    like = partial(torch.tensor, dtype=target_NV.dtype, device=target_NV.device)
    rows = [row for row, probs in enumerate(taken) for _ in probs]
    tokens = [token for probs in taken for token in probs]
    left_NV = target_NV * like(weights)[:, None]
    if tokens:
        left_NV[rows, tokens] -= like([p for probs in taken for p in probs.values()])
    left_NV.clamp_(min=0.0)
    return torch.where(left_NV.sum(-1, keepdim=True) > 0, left_NV, target_NV)


def _chains(target_RV: Tensor, guessed: Sequence[VerificationInput]) -> list[_Chain]:
    """Reads the target's probabilities of all laws' tokens at once."""
    first_rows = list(accumulate((len(each.rows) for each in guessed[:-1]), initial=0))
    counts = [min(each.tree.size, len(each.rows)) for each in guessed]
    places = [
        (first + depth, token, _normalised(each.tree.distributions.get(ROOT + 1 + depth, {token: 1})))
        for each, first, count in zip(guessed, first_rows, counts, strict=True)
        for depth, token in enumerate(each.tree.tokens[1 : 1 + count])
    ]
    rows = [row for row, _, law in places for _ in law]
    tokens = [token for _, _, law in places for token in law]
    values = iter(target_RV[rows, tokens].tolist() if tokens else ())
    links = iter([ChainToken(guess, law, {token: next(values) for token in law}) for _, guess, law in places])
    return [
        _Chain(each, first, list(islice(links, count)))
        for each, first, count in zip(guessed, first_rows, counts, strict=True)
    ]


def _normalised(law: DraftDistribution) -> TokenProbs:
    total = sum(law.values())
    return {token: weight / total for token, weight in law.items()}


def _final_draw(chain: _Chain, verdict: ChainAcceptance) -> _FinalDraw | None:
    """None if all guesses were accepted and the last one had no row."""
    place, rows = verdict.accepted, chain.guessed.rows
    if place == len(rows):
        return None
    if place == len(chain.links):
        return _FinalDraw(chain.first_row + place, rows[place])
    return _FinalDraw(chain.first_row + place, rows[place], verdict.weight, chain.links[place].draft_probs)


def _draw(target_RV: Tensor, endings: Sequence[_FinalDraw]) -> list[int]:
    if not endings:
        return []
    target_NV = target_RV[[each.row for each in endings]]
    left_NV = residual_weights(target_NV, [each.weight for each in endings], [each.subtracted for each in endings])
    seeds = [noise_key(each.sampling_row.params.seed, NoisePurpose.REPLACE) for each in endings]
    return [
        int(token) for token in gumbel_choice(left_NV, seeds, [each.sampling_row.position for each in endings]).tolist()
    ]

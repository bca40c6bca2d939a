"""Block verification: a chain of guesses is accepted or refused jointly (Sun et al. 2024, "Block Verification
Accelerates Speculative Decoding", algorithm 2). It accepts at least as many as one test after another, in expectation.

The probability that the first i guesses stand, given what they are, is the running weight

    weight_i = min(1, weight_{i-1} * target_probs[x_i] / draft_probs[x_i])

A guess far likelier under the target makes up for one before it that is less likely: the weight is what has to hold in
the end, not at each place. Of all i for which a test succeeds the largest counts, and what replaces the guess after it
comes from max(0, weight_i * target_probs - draft_probs), normalised.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.strategies.residual import ChainAcceptance, ChainToken


def accept_block(links: Sequence[ChainToken], uniforms: Sequence[float]) -> ChainAcceptance:
    """Where the chain ends may follow from what comes before a guess, never from the guess itself or from what comes
    after it: those that are looked at would have another law."""
    verdict, weight = ChainAcceptance(0), ChainAcceptance(0).weight
    for depth, (link, u) in enumerate(zip(links, uniforms, strict=True), 1):
        weight = min(1, weight * link.target_probs[link.token] / link.draft_probs[link.token])
        if u < (weight if depth == len(links) else _block_end_probability(weight, links[depth])):
            verdict = ChainAcceptance(depth, weight)
    return verdict


def _block_end_probability(weight: float, following: ChainToken) -> float:
    """The probability that guesses of this weight stand, if the following one turns out not to.

    `spare` is how much of the weight the following guess cannot use, whatever it is.
    """
    shared = [min(weight * p, following.draft_probs[token]) for token, p in following.target_probs.items()]
    spare = max(0, weight - sum(shared))
    return spare / (spare + 1 - weight) if spare else 0

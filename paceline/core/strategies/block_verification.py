"""Block verification: accept or reject a chain of draft tokens jointly.

Sun et al. 2024, "Block Verification Accelerates Speculative Decoding", algorithm 2. In expectation it accepts at least
as many tokens as testing one after another. The probability that the first i tokens are accepted, given the tokens, is
the running weight

    weight_i = min(1, weight_{i-1} * target_probs[x_i] / draft_probs[x_i])

A token that the target finds more probable than the draft makes up for an earlier one that it finds less probable. The
largest i whose test succeeds counts. The token after it is drawn from max(0, weight_i * target_probs - draft_probs),
normalised.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.strategies.residual import ChainAcceptance, ChainToken


def accept_block(chain: Sequence[ChainToken], uniforms: Sequence[float]) -> ChainAcceptance:
    """The longest prefix of the chain whose joint test succeeds.

    Exact only if the chain's end does not depend on the last token's value or on tokens after it.
    """
    result, weight = ChainAcceptance(0), ChainAcceptance(0).weight
    for depth, (link, u) in enumerate(zip(chain, uniforms, strict=True), 1):
        weight = min(1, weight * link.target_probs[link.token] / link.draft_probs[link.token])
        if u < (weight if depth == len(chain) else _block_end_probability(weight, chain[depth])):
            result = ChainAcceptance(depth, weight)
    return result


def _block_end_probability(weight: float, following: ChainToken) -> float:
    """The probability that tokens of this weight are accepted if the following token is not.

    `spare` is the part of the weight that no value of the following token can use.
    """
    shared = [min(weight * p, following.draft_probs[token]) for token, p in following.target_probs.items()]
    spare = max(0, weight - sum(shared))
    return spare / (spare + 1 - weight) if spare else 0

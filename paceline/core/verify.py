"""Verification: which draft tokens the target's own draws confirm.

    draw        the token that the target itself draws at one position, by `paceline.core.sampling`
    verified    a node that had a row in the forward pass, so that the draw *after* it is known
    accepted    a verified node whose token equals the draw after its parent, all along the path from the root
    bonus       the draw after the last accepted node; it ends every commit, so a commit is never empty
    committed   the accepted tokens and the bonus token: final, sent to the user

The target draws after the root and after every verified node as if there were no draft. Verification follows those
draws down the tree while they lead to verified nodes. Draft tokens decide only how many tokens one step commits; each
committed token is the target's draw at its position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.config import SamplingParams, SpeculativeConfig
from paceline.core.tree import ROOT, TokenTree


def follow_draws(tree: TokenTree, verified: Sequence[int], draws: Sequence[int]) -> list[int]:
    """Follow the target's draws from the root down the tree; return the tokens to commit. `coupled` is this rule.

    In: the tree, its `verified` nodes, and one draw for the root and each of them: `draws[0]` comes after the root,
    `draws[i + 1]` after `verified[i]`. Out: the accepted tokens, then the bonus token; never empty. A verified node
    whose parent was not verified is never reached. Raises ValueError unless there is one draw for each.
    """
    draw_after = dict(zip((ROOT, *verified), draws, strict=True))
    committed: list[int] = []
    node: int | None = ROOT
    while node is not None and node in draw_after:
        draw = draw_after[node]
        committed.append(draw)
        node = tree.child(node, draw)
    return committed


@dataclass(frozen=True, slots=True)
class Strategy:
    """A named verification strategy and its promises; `paceline.core.strategies` implements it."""

    name: str
    exact: bool = True
    """Whether the output has the distribution of the request's own parameters. If not, the strategy is lossy."""
    drafter_invariant: bool = False
    """Whether the output tokens do not depend on the draft, so that they are those of plain decoding."""
    greedy: bool = False
    """Whether the target draws at temperature 0, whatever the request asks for."""
    sampled_drafts: bool = False
    """Whether a draft samples each token and sends its distribution along. The tree is a chain then."""

    def effective_params(self, params: SamplingParams) -> SamplingParams:
        """What the target draws with, given the request's parameters."""
        return params.model_copy(update={"temperature": 0.0}) if self.greedy else params

    @property
    def warning(self) -> str:
        """What to log about this strategy; empty for exact and drafter-invariant ones."""
        if not self.exact:
            return f"verification by {self.name} is lossy: the output may not have the target's distribution"
        if not self.drafter_invariant:
            return f"verification by {self.name} is exact, but tokens depend on the draft (not drafter-invariant)"
        return ""


STRATEGIES: Mapping[str, Strategy] = {
    each.name: each
    for each in (
        Strategy("coupled", drafter_invariant=True),
        Strategy("greedy", exact=False, drafter_invariant=True, greedy=True),
        Strategy("residual", sampled_drafts=True),
        Strategy("typical-acceptance", exact=False),
        Strategy("logit-comparison", exact=False, sampled_drafts=True),
    )
}
"""By name in `SpeculativeConfig.rejection_sampling_strategy`."""


def strategy_of(config: SpeculativeConfig) -> Strategy:
    """The strategy of a deployment. Two of them have config keys of their own and modify the named strategy."""
    strategy = STRATEGIES[config.rejection_sampling_strategy]
    if config.synthetic_acceptance_rate is not None:
        return replace(strategy, name="synthetic", exact=False, drafter_invariant=False)
    if config.use_relaxed_acceptance_for_thinking:
        return replace(strategy, name="relaxed-thinking", exact=False, drafter_invariant=False)
    return strategy

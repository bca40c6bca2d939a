"""Verification: which guesses the target's own draws confirm.

    draw        the token that the target itself draws at one place, by `paceline.core.sampling`
    verified    a node that had a row in the forward pass, so that the draw *after* it is known
    accepted    a verified node whose token equals the draw after its parent, all along the path from the root
    bonus       the draw after the last accepted node; it ends every commit, so a commit is never empty
    committed   the accepted tokens and the bonus token: final, sent to the user

The target draws after the root and after every verified node, as if nobody had guessed. Verification follows
those draws down the tree for as long as they lead to verified nodes. Guesses decide only how far one step
gets; what is committed at each place is the target's draw there, whatever was guessed, by whomever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.config import SamplingParams, SpeculativeConfig
from paceline.core.tree import ROOT, TokenTree


def walk(tree: TokenTree, verified: Sequence[int], draws: Sequence[int]) -> list[int]:
    """The tokens to commit: the accepted ones, then the bonus token. Never empty.

    `draws[0]` is the target's draw after the root, `draws[i + 1]` its draw after the node `verified[i]`. A verified
    node whose parent was not verified is never reached. Raises ValueError unless there is one draw for each.
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
    """A named way to verify, and what it promises; `paceline.core.strategies` has the ways themselves."""

    name: str
    exact: bool
    """Whether the output has the law that the request's own parameters describe. If not, the strategy is lossy."""
    drafter_invariant: bool
    """Whether the output is the same tokens whatever was guessed, and so with speculation off."""
    effective_params: Callable[[SamplingParams], SamplingParams]
    """What the target draws with, given what the request asks for."""
    sampled_drafts: bool = False
    """Whether a draft is to draw each guess from its own law and to send that law with it. The tree is a chain then."""

    @property
    def warning(self) -> str:
        """What whoever chose it ought to know; empty for what this project promises."""
        if not self.exact:
            return f"verification by {self.name} is lossy: the output may have another law than the target's"
        if not self.drafter_invariant:
            return f"verification by {self.name} is exact, but not drafter-invariant: tokens depend on what is guessed"
        return ""


def _as_requested(params: SamplingParams) -> SamplingParams:
    return params


def _greedy(params: SamplingParams) -> SamplingParams:
    return params.model_copy(update={"temperature": 0.0})


STRATEGIES: Mapping[str, Strategy] = {
    each.name: each
    for each in (
        Strategy("coupled", exact=True, drafter_invariant=True, effective_params=_as_requested),
        Strategy("greedy", exact=False, drafter_invariant=True, effective_params=_greedy),
        Strategy("residual", exact=True, drafter_invariant=False, effective_params=_as_requested, sampled_drafts=True),
        Strategy("typical-acceptance", exact=False, drafter_invariant=False, effective_params=_as_requested),
        Strategy(
            "logit-comparison",
            exact=False,
            drafter_invariant=False,
            effective_params=_as_requested,
            sampled_drafts=True,
        ),
    )
}
"""By their names in `SpeculativeConfig.rejection_sampling_strategy`."""


def strategy_of(config: SpeculativeConfig) -> Strategy:
    """The strategy of a deployment. Two have keys of their own; drafts are told of the named one that they modify."""
    strategy = STRATEGIES[config.rejection_sampling_strategy]
    if config.synthetic_acceptance_rate is not None:
        return replace(strategy, name="synthetic", exact=False, drafter_invariant=False)
    if config.use_relaxed_acceptance_for_thinking:
        return replace(strategy, name="relaxed-thinking", exact=False, drafter_invariant=False)
    return strategy

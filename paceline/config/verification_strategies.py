"""The table of verification strategies, without code: `paceline.core.strategies` has a verifier for each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.config.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Strategy:
    """One row of `STRATEGIES`: a rule that decides which draft tokens are accepted, and what it promises."""

    name: str
    exact: bool = True
    """Whether the output has the distribution of the request's own parameters. If not, the strategy is lossy."""
    drafter_invariant: bool = False
    """Whether the output tokens do not depend on the draft, so that they are those of plain decoding."""
    greedy: bool = False
    """Whether the target draws at temperature 0, whatever the request asks for."""
    sampled_drafts: bool = False
    """Whether a draft samples each token and sends its distribution along. The tree is a chain then."""
    keys: tuple[str, ...] = ()
    """Keys of `SpeculativeConfig` that the strategy uses, of those that not all do."""

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


RELAXED, SYNTHETIC = "use_relaxed_acceptance_for_thinking", "synthetic_acceptance_rate"

STRATEGIES: Mapping[str, Strategy] = {
    each.name: each
    for each in (
        Strategy("coupled", drafter_invariant=True, keys=(RELAXED, SYNTHETIC)),
        Strategy("greedy", exact=False, drafter_invariant=True, greedy=True, keys=(RELAXED,)),
        Strategy("residual", sampled_drafts=True, keys=("block_verification",)),
        Strategy("typical-acceptance", exact=False, keys=("posterior_threshold", "posterior_alpha")),
        Strategy("logit-comparison", exact=False, sampled_drafts=True, keys=("logit_comparison_eps",)),
    )
}
"""By name in `SpeculativeConfig.rejection_sampling_strategy`."""

if TYPE_CHECKING:  # a type checker cannot evaluate the table
    StrategyName = str
else:
    StrategyName = Literal[*STRATEGIES]

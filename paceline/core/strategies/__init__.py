"""Verification strategies behind `Verifier`. `paceline.config.STRATEGIES` lists them and what each one promises."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceline.config import SpeculativeConfig
from paceline.core.sampling import FindCandidates
from paceline.core.strategies.block_verification import accept_block
from paceline.core.strategies.coupled import Coupled
from paceline.core.strategies.lossy import LogitComparison, RelaxedThinking, TypicalAcceptance
from paceline.core.strategies.residual import Residual, accept_each
from paceline.core.strategies.synthetic import SyntheticAcceptance, conditional_rate
from paceline.core.strategies.verifier import VerificationInput, Verifier

__all__ = ["VerificationInput", "Verifier", "make_verifier"]


def _relaxed(config: SpeculativeConfig) -> Verifier:
    begin, end = config.begin_thinking_phase_token, config.end_thinking_phase_token
    assert begin is not None
    assert end is not None
    return RelaxedThinking(begin, end, config.relaxed_topk, config.relaxed_delta)


def _synthetic(config: SpeculativeConfig) -> Verifier:
    assert config.synthetic_acceptance_rate is not None
    return SyntheticAcceptance(conditional_rate(config.synthetic_acceptance_rate, config.num_speculative_tokens))


BUILDERS: Mapping[str, Callable[[SpeculativeConfig], Verifier]] = {
    "coupled": lambda config: Coupled(),
    "greedy": lambda config: Coupled(),
    "residual": lambda config: Residual(accept_block if config.block_verification else accept_each),
    "typical-acceptance": lambda config: TypicalAcceptance(config.posterior_threshold, config.posterior_alpha),
    "logit-comparison": lambda config: LogitComparison(config.logit_comparison_eps),
    "relaxed-thinking": _relaxed,
    "synthetic": _synthetic,
}
"""By the name of `SpeculativeConfig.strategy`. `greedy` differs by `Strategy.effective_params`."""


def make_verifier(config: SpeculativeConfig, find: FindCandidates | None = None) -> Verifier:
    """The verifier that `config` describes. `find`: see `draw`."""
    verifier = BUILDERS[config.strategy.name](config)
    verifier.find = find
    return verifier

"""Verification strategies, one file each, behind `Verifier`. What all have to know of them is in `paceline.verify`."""

from __future__ import annotations

from paceline.config import SpeculativeConfig
from paceline.strategies.base import Guessed, Verifier
from paceline.strategies.block import as_a_block
from paceline.strategies.coupled import Coupled
from paceline.strategies.logit_comparison import LogitComparison
from paceline.strategies.residual import Residual, one_by_one
from paceline.strategies.synthetic import Synthetic, rate_at_each_depth
from paceline.strategies.thinking import RelaxedThinking
from paceline.strategies.typical import TypicalAcceptance

__all__ = ["Guessed", "Verifier", "verifier"]


def verifier(config: SpeculativeConfig) -> Verifier:
    """The one that `config` describes."""
    if config.synthetic_acceptance_rate is not None:
        return Synthetic(rate_at_each_depth(config.synthetic_acceptance_rate, config.num_speculative_tokens))
    begin, end = config.begin_thinking_phase_token, config.end_thinking_phase_token
    if config.use_relaxed_acceptance_for_thinking and begin is not None and end is not None:
        return RelaxedThinking(begin, end, config.relaxed_topk, config.relaxed_delta)
    match config.rejection_sampling_strategy:
        case "residual":
            return Residual(as_a_block if config.block_verification else one_by_one)
        case "typical-acceptance":
            return TypicalAcceptance(config.posterior_threshold, config.posterior_alpha)
        case "logit-comparison":
            return LogitComparison(config.logit_comparison_eps)
        case "coupled" | "greedy":
            return Coupled()

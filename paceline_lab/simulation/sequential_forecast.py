"""What the simulation says of requests that a target serves one at a time: to be held against a stack that did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config import SamplingParams
from paceline.core.messages import Submission
from paceline_lab.simulation.pair_simulation import SimulatedPair, simulate


@dataclass(frozen=True, slots=True)
class SequentialForecast:
    tokens_per_s: float
    answers: Sequence[Sequence[int]]
    """The tokens of each prompt's answer."""


def forecast_sequential(pair: SimulatedPair, prompts: Sequence[Sequence[int]], tokens: int) -> SequentialForecast:
    """Serve greedily so many tokens after each prompt, one after the other."""
    answers: list[Sequence[int]] = []
    seconds = 0.0
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
    for prompt in prompts:
        outcome = simulate(pair, [(0.0, Submission("alone", list(prompt), sampling))])
        answers.append(outcome.tokens["alone"])
        seconds += outcome.seconds
    return SequentialForecast(sum(map(len, answers)) / seconds, answers)

"""A simulation of requests served one at a time, to compare with a real stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config import SamplingParams
from paceline.messages import GenerationRequest
from paceline_lab.simulation.pair_simulation import SimulatedPair, simulate


@dataclass(frozen=True, slots=True)
class SequentialForecast:
    tokens_per_s: float
    outputs: Sequence[Sequence[int]]
    """New tokens by prompt."""


def forecast_sequential(pair: SimulatedPair, prompts: Sequence[Sequence[int]], tokens: int) -> SequentialForecast:
    """Decode `tokens` tokens greedily after each prompt, one prompt at a time."""
    outputs: list[Sequence[int]] = []
    seconds = 0.0
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
    for prompt in prompts:
        result = simulate(pair, [(0.0, GenerationRequest("alone", list(prompt), sampling))])
        outputs.append(result.tokens["alone"])
        seconds += result.seconds
    return SequentialForecast(sum(map(len, outputs)) / seconds, outputs)

"""The text of a timed model: a hash chain, known without running the model. No torch is imported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import NormalDist

from paceline_lab.fake_models.timed_config import TimedModelConfig

GOLDEN = 0x9E3779B97F4A7C15
MASK = 0xFFFFFFFFFFFFFFFF


def greedy(spec: TimedModelConfig, prompt: Sequence[int]) -> Iterator[int]:
    """The tokens of a target after a prompt at temperature 0, without end."""
    state = mix64(spec.seed)
    for token in prompt:
        state = next_state(state, token)
    while True:
        token = HashStream(state).integer(spec.vocabulary)
        yield token
        state = next_state(state, token)


class HashStream:
    """Pseudorandom numbers derived from one state."""

    def __init__(self, state: int) -> None:
        self._state = state

    def uniform(self) -> float:
        """In the open interval (0, 1)."""
        self._state = (self._state + GOLDEN) & MASK
        return ((mix64(self._state) >> 12) + 0.5) / 2**52

    def integer(self, below: int) -> int:
        return int(self.uniform() * below)

    def normal(self) -> float:
        return _NORMAL.inv_cdf(self.uniform())


def next_state(state: int, token: int) -> int:
    """The state after one more token."""
    return mix64(state ^ (token + 1) * GOLDEN)


def mix64(state: int) -> int:
    """A bijection of 64-bit integers that leaves no pattern (the finaliser of SplitMix64, Steele et al. 2014)."""
    state &= MASK
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return state ^ (state >> 31)


_NORMAL = NormalDist()

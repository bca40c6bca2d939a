"""A simulated accelerator: a model without weights that takes the time of a model with weights.

The state after a token is a hash of the state before it and the token. It is stored in the token's slot, as keys and
values are, so a wrong slot gives wrong text. The state determines the token that the target draws, and how predictable
it is: log-odds vary by position (`spread`) around the value that gives the mean `agreement`. A draft's first choice
is right with that probability, its second with that probability where the first is wrong, and so on; its estimate of
the probability is off by `blur` and `bias`. This holds at temperature 0; sampling noise blurs both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import NormalDist, fmean

import torch

from paceline.model.model import ModelOutput
from paceline.model.rows import Row
from paceline.model.target_weights import TargetWeights
from paceline_lab.fake_models.table_model import token_position_states
from paceline_lab.fake_models.timed_config import TimedModelConfig
from paceline_lab.fake_models.timed_text import HashStream, mix64, next_state

LISTED = 8
"""Tokens with a probability; the draft cannot predict any other token."""
UNLISTED = -30.0
"""Logit of all other tokens."""
CERTAIN = 30.0
"""Mean log-odds at which a probability counts as 0 or 1."""
MOST_LATE_S = 5e-4
"""Upper bound of a timer's usual delay."""


class TimedModel:
    """A `paceline.model.Model` that sleeps until its deadline. The next pass makes up for the timer's delay."""

    def __init__(
        self,
        name: str,
        spec: TimedModelConfig,
        slots: int,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = name
        self.vocabulary_size = spec.vocabulary
        self.max_model_len = max_model_len
        self.layers = 2
        self.slots = slots
        self.eos_token_ids: Sequence[int] = ()
        self.fingerprint = spec.fingerprint
        self.numerics = "no weights"
        self.asynchronous = False
        self.states = None
        self.rows_invariant = True
        self._spec = spec
        self._clock, self._sleep = clock, sleep
        self._states = [mix64(spec.seed)] * (slots + 1)
        self._odds = mean_log_odds(spec.agreement, spec.spread)
        self._listed = min(LISTED, spec.vocabulary)
        self._late_s = 0.0

    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        """Hidden states are the row's token and position, as float32 [rows, layers, 2]."""
        deadline = self._clock() + self._spec.seconds(len(rows)) - self._late_s
        for row in rows:
            before = self._states[_slot_before(row)] if row.position else mix64(self._spec.seed)
            self._states[row.slot] = next_state(before, row.token)
        distributions = [self._distribution(self._states[rows[r].slot]) for r in wanted]
        logits = torch.full((len(wanted), self.vocabulary_size), UNLISTED)
        if distributions:
            tokens, chances = zip(*distributions, strict=True)
            logits.scatter_(1, torch.tensor(tokens), torch.tensor(chances))
        hidden = token_position_states(rows, hidden_layers) if hidden_layers else None
        self._late_s = self._wait(deadline)
        return ModelOutput(logits, hidden)

    def target_weights(self) -> TargetWeights:
        raise ValueError(f"{self.name} has no weights: a head cannot draft for it")

    def _wait(self, deadline: float) -> float:
        """Sleep until the deadline. Returns the delay beyond it."""
        left_s = deadline - self._clock()
        if left_s <= 0:
            return 0.0
        self._sleep(left_s)
        return min(max(0.0, self._clock() - deadline), MOST_LATE_S)

    def _distribution(self, state: int) -> tuple[list[int], list[float]]:
        """Tokens and their logits, best first."""
        draws = HashStream(state)
        first = draws.integer(self.vocabulary_size)
        step = 1 + draws.integer(self.vocabulary_size // self._listed - 1)
        tokens = [(first + i * step) % self.vocabulary_size for i in range(self._listed)]
        if self._spec.agreement == 1.0:
            return tokens, [-4.0 * i for i in range(self._listed)]
        odds = self._odds + self._spec.spread * draws.normal()
        rank = _rank(draws.uniform(), odds)
        tokens[0 : rank + 1] = [*tokens[1 : rank + 1], tokens[0]] if rank < self._listed else tokens[1:]
        tokens += [(first - step) % self.vocabulary_size] * (self._listed - len(tokens))
        believed = odds + self._spec.bias + self._spec.blur * draws.normal()
        hit, miss = -_softplus(-believed), -_softplus(believed)
        return tokens, [hit + i * miss for i in range(self._listed)]


def mean_log_odds(agreement: float, spread: float) -> float:
    """The mean of normally distributed log-odds of deviation `spread` whose mean probability is `agreement`."""
    deviations = [spread * _NORMAL.inv_cdf((i + 0.5) / 400) for i in range(400)]
    low, high = -CERTAIN, CERTAIN
    while high - low > 1e-9:
        middle = (low + high) / 2
        if fmean(math.exp(-_softplus(-middle - d)) for d in deviations) < agreement:
            low = middle
        else:
            high = middle
    return low


def _rank(uniform: float, odds: float) -> int:
    """The rank of a draft's right choice: geometric, each choice with these odds if the earlier ones are wrong."""
    return min(LISTED, int(math.log(uniform) / -_softplus(odds)))


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _slot_before(row: Row) -> int:
    return row.path(row.position - 1)[0]


_NORMAL = NormalDist()

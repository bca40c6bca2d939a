"""A head's network run as `paceline.drafting.best_first` runs it, and compared row by row with a formula."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.drafting.heads.head_network import HeadNetwork
from paceline.model.rows import Row, SlotTable
from tests.helpers.head_formulas import Formula, after

PROMPT = 62  # the guesses of the first round cross a tile border
CHUNK = 11
ROUNDS = (
    [(5,), (9,), (5, 7), (5, 8), (9, 7), (5, 7, 1), (5, 7, 1, 2)],
    [(4,), (3,), (4, 4), (3, 4), (4, 4, 4)],
)
"""Paths of guesses, level by level."""
COMMITTED = (5, 7, 60)
"""Two of the first round's guesses, and a token that was not guessed."""


class Rounds:
    """One request. Slots are in random order and are reused at once."""

    def __init__(self, network: HeadNetwork, formula: Formula, tolerance: float) -> None:
        self._network, self._formula, self._tolerance = network, formula, tolerance
        vocabulary, width = formula.embedding.shape
        generator = torch.Generator().manual_seed(17)
        layers = len(network.description.hidden_state_layers)
        self._states = torch.randn(PROMPT + len(COMMITTED), layers, width, generator=generator)
        self._tokens = torch.randint(vocabulary, (PROMPT + 1,), generator=generator).tolist()
        self._table = SlotTable()
        self._free = (torch.randperm(network.slots, generator=generator) + 1).tolist()
        self._computed = 0

    def run(self) -> None:
        """Two rounds, with a commit between them. Raises AssertionError where network and formula differ."""
        self._compute(CHUNK)
        self._compute(PROMPT)
        self._guess(ROUNDS[0])
        self._tokens += COMMITTED
        self._compute(PROMPT + len(COMMITTED))
        self._guess(ROUNDS[1])

    def _compute(self, stop: int) -> None:
        """Rows with the target's states."""
        start, self._computed = self._computed, stop
        self._table.slots.extend([self._free.pop() for _ in range(start, stop)])
        rows = [self._table.row(self._tokens[i + 1], i) for i in range(start, stop)]
        features = self._network.encode(self._states[start:stop].to(self._dtype))
        logits, fed_back = self._pass(rows, features)
        expected = self._formula(self._tokens[1 : stop + 1], self._formula.encode(self._states[:stop]))
        self._same(logits, expected[0][start:stop])
        self._same(fed_back, expected[1][start:stop])
        self._last = expected[1][-1].to(self._dtype)

    def _guess(self, paths: Sequence[tuple[int, ...]]) -> None:
        """Rows with the network's own features, one level in each pass; then their slots are freed."""
        slots: dict[tuple[int, ...], int] = {}
        features: dict[tuple[int, ...], Tensor] = {(): self._last}
        for depth in range(1, len(paths[-1]) + 1):
            level = [path for path in paths if len(path) == depth]
            slots |= {path: self._free.pop() for path in level}
            branches = [[slots[path[: n + 1]] for n in range(depth)] for path in level]
            rows = [self._table.branch_row(path[-1], branch) for path, branch in zip(level, branches, strict=True)]
            logits, fed_back = self._pass(rows, torch.stack([features[path[:-1]] for path in level]))
            for path, *got in zip(level, logits, fed_back, strict=True):
                expected = after(self._formula, self._tokens, self._states[: self._computed], path)
                for mine, theirs in zip(got, expected, strict=True):
                    self._same(mine, theirs)
                # Not the network's own: in bf16 some seeds made of rounding errors, level by level, errors of the size
                # of the logits (measured: up to 0.8 of the largest with torch's operators, 2.2 with native code).
                features[path] = expected[1].to(self._dtype)
        self._free += slots.values()

    def _pass(self, rows: Sequence[Row], features: Tensor) -> tuple[Tensor, Tensor]:
        """The rows' results. They are asked for in another order."""
        output = self._network.run(rows, features, range(len(rows))[::-1])
        return output.logits.flip(0), output.features.flip(0)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self._tolerance > 1e-2 else torch.float32

    def _same(self, mine: Tensor, formula: Tensor) -> None:
        largest = float(formula.abs().max())
        torch.testing.assert_close(mine.to(formula.dtype), formula, rtol=0, atol=self._tolerance * largest)


@torch.inference_mode()
def compare(network: HeadNetwork, formula: Formula, tolerance: float = 1e-4) -> None:
    Rounds(network, formula, tolerance).run()

"""How probable a guess is, given what its draft says and what was drawn before."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence


class CalibrationCache(dict[tuple[float, int, int], tuple[int, float]]):
    """What a calibration said since the last observation: many guesses come at once, and few are not alike."""

    def __init__(self, ask: Callable[[float, int, int], tuple[int, float]]) -> None:
        self._ask = ask

    def __missing__(self, guess: tuple[float, int, int]) -> tuple[int, float]:
        answer = self[guess] = self._ask(*guess)
        return answer


class Calibration:
    """The probability that the target draws a guess whose parent it drew, learned from what it drew.

    A draft says how likely its guess is; that word is corrected in two steps. Guesses to which it gave about the same
    probability make a *bin*: bin i of `BINS` covers [i/BINS, (i+1)/BINS). Those of a bin that were also the same choice
    at their place (first, second, a later one) and as far from the root when they came (1, 2 to 3, 4 to 7, or more)
    make a *cell*. A bin with few guesses is taken to be what the draft says, a cell with few to be what its bin is. Old
    counts fade, so that it follows a draft or a workload that changes.

    Cells are counted, saved and seeded in one order: by bin, within it by rank, within that by depth.
    """

    BINS = 20
    RANKS = 3
    DEPTH_BUCKETS = (0, 0, 1, 1, 2, 2, 2, 2, 3)
    """Depths that are told apart, by depth; the last is for all beyond."""
    MAX_DEPTH = len(DEPTH_BUCKETS) - 1
    DEPTH_COUNT = DEPTH_BUCKETS[MAX_DEPTH] + 1
    CELLS_PER_BIN = RANKS * DEPTH_COUNT
    CELLS = BINS * CELLS_PER_BIN
    PRIOR_WEIGHT = 8.0
    """Weight of the draft's word in its bin, and of the bin in its cell, in guesses."""
    MAX_COUNT = 64.0
    """Guesses that a bin or a cell counts for, at most. One workload follows another."""

    def __init__(self) -> None:
        self.drafted = [0.0] * self.CELLS
        self.accepted = [0.0] * self.CELLS
        self._bin_drafted = [0.0] * self.BINS
        self._bin_accepted = [0.0] * self.BINS
        self.cache = CalibrationCache(self._calibrated)
        """By a guess's log-probability, whether it was the draft's first choice at its place (rank 0) or a later one,
        and whether it was the root's child when it came (depth 1) or further away: its cell, and the corrected
        log-probability, if its parent is drawn. A table, since this happens to every guess."""

    def seed(self, drafted: Sequence[float], accepted: Sequence[float]) -> None:
        """Start from what was learned elsewhere: counts by cell, of which no more than `MEMORY` are believed.

        Counts of another shape are ignored.
        """
        if len(drafted) == len(accepted) == self.CELLS:
            self.drafted, self.accepted = self._capped(drafted, accepted)
            self.cache.clear()
            self._bin_drafted, self._bin_accepted = self._capped(self.by_bin(drafted), self.by_bin(accepted))

    def _calibrated(self, log_prob: float, rank: int, depth: int) -> tuple[int, float]:
        probability = math.exp(log_prob)
        i = int(probability * self.BINS)
        # Comparing is several times as fast as `min`, and this happens to every guess.
        i = i if i < self.BINS else self.BINS - 1
        place = rank if rank < self.RANKS else self.RANKS - 1
        cell = (i * self.RANKS + place) * self.DEPTH_COUNT + self.DEPTH_BUCKETS[
            depth if depth < self.MAX_DEPTH else self.MAX_DEPTH
        ]
        share = (self._bin_accepted[i] + self.PRIOR_WEIGHT * probability) / (self._bin_drafted[i] + self.PRIOR_WEIGHT)
        share = (self.accepted[cell] + self.PRIOR_WEIGHT * share) / (self.drafted[cell] + self.PRIOR_WEIGHT)
        return cell, math.log(share) if 1e-9 < share < 1.0 else math.log(min(max(share, 1e-9), 1.0))

    def observe(self, cell: int, accepted: bool) -> None:
        """The target drew the guess's parent, and then the guess or another token."""
        self.cache.clear()
        by_cell = self.drafted, self.accepted, cell
        by_bin = self._bin_drafted, self._bin_accepted, cell // self.CELLS_PER_BIN
        for drafted, hits, i in (by_cell, by_bin):
            tried = drafted[i]
            if tried > self.MAX_COUNT - 1:
                hits[i] *= (self.MAX_COUNT - 1) / tried
                tried = self.MAX_COUNT - 1
            drafted[i] = tried + 1
            hits[i] += accepted

    @classmethod
    def by_bin(cls, counts: Sequence[float]) -> list[float]:
        """Sums of counts by cell."""
        return [sum(counts[i : i + cls.CELLS_PER_BIN]) for i in range(0, len(counts), cls.CELLS_PER_BIN)]

    def _capped(self, drafted: Sequence[float], accepted: Sequence[float]) -> tuple[list[float], list[float]]:
        scales = [min(1.0, self.MAX_COUNT / tried) if tried else 0.0 for tried in drafted]
        return list(map(operator.mul, drafted, scales)), list(map(operator.mul, accepted, scales))

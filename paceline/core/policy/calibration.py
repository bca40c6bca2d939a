"""The probability that the target draws a draft token, learned from earlier draws."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence


class CalibrationCache(dict[tuple[float, int, int], tuple[int, float]]):
    """Calibrated values by (log-probability, rank, depth), valid until the next observation.

    One growth has many nodes with few distinct values.
    """

    def __init__(self, calibrate: Callable[[float, int, int], tuple[int, float]]) -> None:
        self._calibrate = calibrate

    def __missing__(self, node: tuple[float, int, int]) -> tuple[int, float]:
        value = self[node] = self._calibrate(*node)
        return value


class Calibration:
    """The probability that the target draws a node's token, given that it drew the parent's.

    The draft's own probability is corrected in two levels. A *bin* holds nodes with about the same draft probability:
    bin i of `BINS` covers [i/BINS, (i+1)/BINS). A *cell* holds the nodes of a bin that also have the same rank among
    the draft's choices (first, second, later) and the same bucket of depth at arrival (1, 2 to 3, 4 to 7, more). The
    draft's probability is the prior of a bin; the bin's acceptance rate is the prior of a cell. Old counts fade, so the
    rates follow a draft or workload that changes.

    Cells are stored in one order: by bin, then by rank, then by depth.
    """

    BINS = 20
    RANKS = 3
    DEPTH_BUCKETS = (0, 0, 1, 1, 2, 2, 2, 2, 3)
    """Bucket by depth; the last one holds all greater depths."""
    MAX_DEPTH = len(DEPTH_BUCKETS) - 1
    DEPTH_COUNT = DEPTH_BUCKETS[MAX_DEPTH] + 1
    CELLS_PER_BIN = RANKS * DEPTH_COUNT
    CELLS = BINS * CELLS_PER_BIN
    PRIOR_WEIGHT = 8.0
    """Weight of each prior, in nodes."""
    MAX_COUNT = 64.0
    """Most nodes that a bin or a cell counts; beyond it old counts fade."""

    def __init__(self) -> None:
        self.drafted = [0.0] * self.CELLS
        """By cell, the nodes whose parent the target drew, whether or not they had a row."""
        self.accepted = [0.0] * self.CELLS
        """Those of them whose token the target drew."""
        self._bin_drafted = [0.0] * self.BINS
        self._bin_accepted = [0.0] * self.BINS
        self.cache = CalibrationCache(self._calibrated)
        """By (draft log-probability, rank from 0, depth from 1): the node's cell and its calibrated log-probability,
        given that its parent is drawn. Looked up for every node that arrives."""

    def start_from(self, drafted: Sequence[float], accepted: Sequence[float]) -> None:
        """Start from counts by cell of another engine, scaled down to `MAX_COUNT`. Other shapes are ignored."""
        if len(drafted) == len(accepted) == self.CELLS:
            self.drafted, self.accepted = self._capped(drafted, accepted)
            self.cache.clear()
            self._bin_drafted, self._bin_accepted = self._capped(self.by_bin(drafted), self.by_bin(accepted))

    def _calibrated(self, log_prob: float, rank: int, depth: int) -> tuple[int, float]:
        probability = math.exp(log_prob)
        i = int(probability * self.BINS)
        i = i if i < self.BINS else self.BINS - 1  # several times as fast as `min`
        rank = rank if rank < self.RANKS else self.RANKS - 1
        depth = depth if depth < self.MAX_DEPTH else self.MAX_DEPTH
        cell = (i * self.RANKS + rank) * self.DEPTH_COUNT + self.DEPTH_BUCKETS[depth]
        rate = (self._bin_accepted[i] + self.PRIOR_WEIGHT * probability) / (self._bin_drafted[i] + self.PRIOR_WEIGHT)
        rate = (self.accepted[cell] + self.PRIOR_WEIGHT * rate) / (self.drafted[cell] + self.PRIOR_WEIGHT)
        return cell, math.log(rate) if 1e-9 < rate < 1.0 else math.log(min(max(rate, 1e-9), 1.0))

    def observe(self, cell: int, drawn: bool) -> None:
        """Count a node of this cell whose parent the target drew. `drawn`: it drew the node's token, too."""
        self.cache.clear()
        by_cell = self.drafted, self.accepted, cell
        by_bin = self._bin_drafted, self._bin_accepted, cell // self.CELLS_PER_BIN
        for drafted, hits, i in (by_cell, by_bin):
            count = drafted[i]
            if count > self.MAX_COUNT - 1:
                hits[i] *= (self.MAX_COUNT - 1) / count
                count = self.MAX_COUNT - 1
            drafted[i] = count + 1
            hits[i] += drawn

    @classmethod
    def by_bin(cls, counts: Sequence[float]) -> list[float]:
        """Sums of counts by cell."""
        return [sum(counts[i : i + cls.CELLS_PER_BIN]) for i in range(0, len(counts), cls.CELLS_PER_BIN)]

    def _capped(self, drafted: Sequence[float], accepted: Sequence[float]) -> tuple[list[float], list[float]]:
        scales = [min(1.0, self.MAX_COUNT / count) if count else 0.0 for count in drafted]
        return list(map(operator.mul, drafted, scales)), list(map(operator.mul, accepted, scales))

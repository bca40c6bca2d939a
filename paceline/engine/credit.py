"""What a request makes of the word of its drafts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from paceline.budget import Calibration, Tendency
from paceline.tree import Node


class Credit:
    """What guesses like this one were worth, of all requests lately (`Calibration`) and of this one (`Tendency`)."""

    def __init__(self, calibrations: Mapping[tuple[int, bool], Calibration], *, greedy: bool) -> None:
        """`calibrations`: by who guesses, and whether the request is greedy. Shared with other requests."""
        self._calibrations = calibrations
        self._greedy = greedy
        self._tendencies: defaultdict[int, Tendency] = defaultdict(Tendency)
        """By who guesses."""

    def weigh(self, node: Node) -> float:
        """The log-probability that a guess counts for, where its parent is right."""
        cell = Calibration.cell_of(node.log_prob, node.rank, node.first_depth)
        of_all = self._calibrations[node.source, self._greedy](cell, node.log_prob)
        return math.log(self._tendencies[node.source](of_all))

    def observe(self, node: Node, accepted: bool) -> int:
        """A guess whose parent was drawn was verified. Returns the cell of `Calibration` that it is in."""
        cell = Calibration.cell_of(node.log_prob, node.rank, node.first_depth)
        calibration = self._calibrations[node.source, self._greedy]
        self._tendencies[node.source].observe(calibration(cell, node.log_prob), accepted)
        calibration.observe(cell, accepted)
        return cell

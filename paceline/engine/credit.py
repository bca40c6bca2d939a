"""What a request makes of the word of its drafts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from paceline.budget import Calibration, Tendency
from paceline.tree import Word


class Credit:
    """What guesses like this one were worth, of all requests lately (`Calibration`) and of this one (`Tendency`)."""

    def __init__(self, calibrations: Mapping[tuple[int, bool], Calibration], *, greedy: bool) -> None:
        """`calibrations`: by who guesses, and whether the request is greedy. Shared with other requests."""
        self._calibrations = calibrations
        self._greedy = greedy
        self._tendencies: defaultdict[int, Tendency] = defaultdict(Tendency)
        """By who guesses."""

    def weigh(self, word: Word) -> float:
        """The log-probability that a word counts for, where the guess's parent is right."""
        cell = Calibration.cell_of(word.log_prob, word.rank, word.depth)
        of_all = self._calibrations[word.source, self._greedy](cell, word.log_prob)
        return math.log(self._tendencies[word.source](of_all))

    def observe(self, word: Word, *, hit: bool) -> int:
        """The guess's parent was drawn, and it or another token after it. Returns the cell of `Calibration` that the
        word is in."""
        cell = Calibration.cell_of(word.log_prob, word.rank, word.depth)
        calibration = self._calibrations[word.source, self._greedy]
        self._tendencies[word.source].observe(calibration(cell, word.log_prob), hit)
        calibration.observe(cell, hit)
        return cell

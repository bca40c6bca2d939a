"""Which guesses are worth a row, and whether to wait for better ones.

A forward pass over R rows takes t(R) seconds, measured when a worker starts. Verifying nodes with path
probabilities p commits one token per request (the target's own draw) and each node's token with probability p. So
a step earns `(requests + sum(p)) / t(rows)` tokens per second, and the best choice takes nodes in falling
order of p for as long as that rises. How deep, how wide, less at high load, none at all: all follow from this.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate, islice


class RowCost:
    """Seconds of a pass by its number of rows: measured points, with straight lines between.

    Whatever disturbs a measurement makes it longer, and fewer rows never take longer than more. So a point counts for
    no more than those after it: noise makes no steps that are not there.
    """

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        """`rows` rise. Raises ValueError unless there is a time, all positive, for each of one or more counts."""
        if not rows or len(rows) != len(seconds) or min(seconds) <= 0 or sorted(set(rows)) != list(rows):
            raise ValueError("a row cost needs rising row counts, each with a positive time")
        self._rows = list(rows)
        self._seconds = [*accumulate(reversed(seconds), min)][::-1]
        self._table: list[float] = []

    def __call__(self, rows: int) -> float:
        """Fewer rows than were measured take as long as the fewest; beyond what was measured time is proportional."""
        i = bisect.bisect_left(self._rows, rows)
        if i == len(self._rows):
            return self._seconds[-1] * rows / self._rows[-1]
        if self._rows[i] == rows or i == 0:
            return self._seconds[i]
        share = (rows - self._rows[i - 1]) / (self._rows[i] - self._rows[i - 1])
        return self._seconds[i - 1] + share * (self._seconds[i] - self._seconds[i - 1])

    def table(self, rows: int) -> Sequence[float]:
        """Of passes over 0, 1, 2, ... rows, up to `rows` or more."""
        if rows >= len(self._table):
            self._table += map(self, range(len(self._table), 2 * rows + 1))
        return self._table


ROUNDING = 1e-9
"""What earns more by no more than this earns the same, and then fewer rows do."""
FREE_ROWS = RowCost([1, 2**20], [1.0, 1.0])
"""As if another row cost nothing: every guess is worth one."""


class StepCost:
    """Seconds of a whole step by its number of rows: the pass, and what the rest of a step takes.

    The rest is a straight line over the guesses among the rows, by least squares over the last steps: each is drawn
    from, walked and committed, and attends to a longer context than passes were measured with. Steps without any draft
    are averaged apart, so that what drafting costs is known: its rows, its waits, its bookkeeping. A single step that
    took much longer than expected counts only in part: machines stall now and then, whatever they do.
    """

    MEMORY = 100.0
    """Steps."""
    RIDGE = 10.0
    """Added to the squared deviations of the numbers of guesses: steps that hardly differ in them tell nothing."""
    SURPRISE = 1.0
    """Twice the expected rest, and this share of the pass, is believed of one step: where a pass is short, the rest is
    known after a few steps all the same."""
    LEARNING = 0.1
    """Weight of a plain step in their average."""
    MOST_LOST = 4.0
    """Plain steps that one step is believed to have cost."""

    def __init__(self, passes: RowCost) -> None:
        self.passes = passes
        self.rest_s = 0.0
        """Of a step without guesses, beside its pass."""
        self.guess_s = 0.0
        """Of each guess."""
        self._plain_rest_s: float | None = None
        self._seen_plain = False
        self._sums = [0.0] * 5  # over steps that fade: 1, guesses, their square, rest, their product

    def __call__(self, rows: int, guesses: int = 0) -> float:
        """`guesses`: how many of the rows are such."""
        return self.passes(rows) + self.rest_s + guesses * self.guess_s

    def observe(self, rows: int, seconds: float, guesses: int = 0) -> None:
        """A step of so many rows, none of them of prompts, took so long."""
        rest = self._rest(rows, seconds, self.rest_s + guesses * self.guess_s)
        fade = 1 - 1 / self.MEMORY
        told = (1.0, guesses, guesses * guesses, rest, guesses * rest)
        self._sums = steps, first, square, rests, product = [
            fade * a + b for a, b in zip(self._sums, told, strict=True)
        ]
        slope = (product - first * rests / steps) / (square - first * first / steps + self.RIDGE)
        self.guess_s = min(max(slope, 0.0), rests / max(first, 1.0))  # the line is nowhere below 0
        self.rest_s = max(0.0, rests - self.guess_s * first) / steps

    def observe_plain(self, requests: int, seconds: float, *, drafted: bool = False) -> None:
        """A step that drew one token for each of these requests took so long. `drafted`: there is a draft, which had
        guessed nothing; such steps count until one without any draft is seen."""
        if drafted and self._seen_plain:
            return
        if self._plain_rest_s is None or not (drafted or self._seen_plain):
            self._plain_rest_s = max(seconds - self.passes(requests), 0.0)
        self._seen_plain = not drafted
        rest = self._rest(requests, seconds, self._plain_rest_s)
        self._plain_rest_s += self.LEARNING * (rest - self._plain_rest_s)

    def lost(self, requests: int, seconds: float) -> float:
        """Tokens that these requests would have drawn without drafts in the time by which a step took longer.

        A plain step is taken to be nothing but its pass until one was seen: so a draft that may not pay is soon
        paused, which shows what plain steps take.
        """
        plain_s = self.passes(requests) + (self._plain_rest_s or 0.0)
        return requests * min(max(seconds / plain_s - 1, 0.0), self.MOST_LOST)

    def _rest(self, rows: int, seconds: float, usual_s: float) -> float:
        expected = self.passes(rows)
        return min(max(seconds - expected, 0.0), 2 * usual_s + self.SURPRISE * expected)


def worthwhile(
    probabilities: Sequence[float],
    requests: int,
    rows: int,
    most: int,
    cost: StepCost,
) -> int:
    """How many of the nodes to verify: those that earn the most tokens per second.

    `probabilities`: path probabilities of all nodes of all requests, falling. `requests`: how many of them draw
    a token in this step. `rows`: rows that the step needs anyway. `most`: rows left in the step.
    """
    seconds = cost.passes.table(rows + min(most, len(probabilities)))
    best, best_rate = 0, requests / (seconds[rows] + cost.rest_s)
    expected = float(requests)
    for count, probability in enumerate(islice(probabilities, most), 1):
        expected += probability
        rate = expected / (seconds[rows + count] + cost.rest_s + count * cost.guess_s)
        if rate > best_rate * (1 + ROUNDING):
            best, best_rate = count, rate
    return best


class Price:
    """What a row is worth: the path probability below which guesses are not verified, as of late.

    With rows to spare it is 0. A draft need not grow what nobody would verify. But what is improbable now may be
    probable once more is known, so that it is wanted from a `SHARE` of the price on. A demand is changed when it is off
    by more than `SLACK`.
    """

    SHARE = 0.3
    SLACK = 2.0
    LEARNING = 0.1

    def __init__(self) -> None:
        self.wanted = 0.0
        """Path probability from which on guesses are wanted."""
        self._price = 0.0

    def observe(self, refused: float) -> bool:
        """The likeliest guess that a step did not verify had this path probability; whether `wanted` has changed."""
        self._price += self.LEARNING * (refused - self._price)
        wanted = self.SHARE * self._price
        if self.wanted / self.SLACK <= wanted <= self.wanted * self.SLACK or max(wanted, self.wanted) < 1e-3:
            return False
        self.wanted = wanted
        return True


class Patience:
    """Whether to hold a step back for guesses that are under way.

    Learned from waiting: when trees are `height` nodes high, waiting for the next growth takes `delay[height]` seconds
    and adds `gain[height]` expected tokens. Growth that comes too late for a step is mostly there for the next, so only
    part of that is lost by going ahead. Waiting pays while the loss, per second of waiting, exceeds what the step earns
    per second as things stand. Both are moving averages that start from a hopeful guess. A height that is not waited
    for teaches nothing, so with every refusal the averages creep back towards that guess: it is tried again now and
    then.
    """

    HORIZON = 12
    """Trees this high are never waited for."""
    KEPT = 0.5
    """Share of a late guess's worth that is not lost: it is there for the next step, if its path still stands."""
    LATE = 1.5
    """Growth is given up after this many times its usual delay."""
    LEARNING = 0.1
    """Weight of a wait in the averages."""
    FORGETTING = 0.001
    """Weight of the first guess, with each refusal."""

    def __init__(self, delay_s: float = 1e-3) -> None:
        """`delay_s`: the guess at a delay to start from."""
        self._first_delay = delay_s
        self._first_gain = [0.6**height for height in range(1, self.HORIZON + 1)]
        self._gain = self._first_gain.copy()
        self._delay = [delay_s] * self.HORIZON

    def wait_s(self, height: int, expected: float, step_s: float) -> float:
        """How long to wait for more, at most; 0: go ahead.

        `expected`: tokens that the step would commit now. `step_s`: what they would take, waits so far included.
        """
        if height >= self.HORIZON:
            return 0.0
        if (1 - self.KEPT) * self._gain[height] * step_s > expected * self._delay[height]:
            return self.LATE * self._delay[height]
        self._move(height, self._first_gain[height], self._first_delay, self.FORGETTING)
        return 0.0

    def observe(self, height: int, gain: float, delay_s: float) -> None:
        """A wait at this height took `delay_s` and brought `gain` expected tokens; 0 if nothing came."""
        self._move(height, gain, delay_s, self.LEARNING)

    def _move(self, height: int, gain: float, delay_s: float, weight: float) -> None:
        self._gain[height] += weight * (gain - self._gain[height])
        self._delay[height] += weight * (delay_s - self._delay[height])


class NextRound:
    """Whether a draft that works on the target's own time gets more of it before a step.

    Nothing grows unless it is waited for, so the whole of what a round would bring is lost by going ahead. For each
    token that the draft's deepest guesses are expected to bring, the next ones bring `gain`, less what others have
    guessed there; a round takes `delay`, and its guesses take rows, in which time the step would have earned tokens.
    Both averages start from a hopeful guess, and creep back to it with every refusal, or else a draft that is refused
    would be for ever.
    """

    HOPE = 0.8
    LEARNING = 0.1
    """Weight of a round in the averages."""
    SURPRISE = 3.0
    """So many times the usual delay is believed of one round."""
    FORGETTING = 0.001
    """Weight of the first guess, with each refusal."""

    def __init__(self, delay_s: float = 1e-5) -> None:
        """`delay_s`: the guess at a delay to start from."""
        self._first_delay = self._delay = delay_s
        self._gain = self.HOPE

    def pays(self, frontier: float, expected: float, step_s: float, beyond: float = 0.0, rows_s: float = 0.0) -> bool:
        """`expected`: tokens that the step would commit now, `frontier` of them by the draft's deepest guesses, and
        `beyond` by what others guess right after these. `step_s`: what all would take, rounds so far included.
        `rows_s`: what the rows of a round's guesses would take."""
        if (frontier * self._gain - beyond) * step_s > expected * (self._delay + rows_s):
            return True
        self._gain += self.FORGETTING * (self.HOPE - self._gain)
        self._delay += self.FORGETTING * (self._first_delay - self._delay)
        return False

    def observe(self, frontier: float, gain: float, delay_s: float) -> None:
        """A round took `delay_s` and brought the draft `gain` expected tokens. What follows unlikely guesses teaches
        little, and a round that takes very long has read a prompt, or been disturbed."""
        if frontier > 0:
            self._gain += self.LEARNING * min(1.0, frontier) * (gain / frontier - self._gain)
        self._delay += self.LEARNING * (min(delay_s, self.SURPRISE * self._delay) - self._delay)


class Worth:
    """Whether a draft pays: what a step commits beyond the token that it would have drawn anyway.

    A draft that brings less than `least` tokens per step and request is *paused*, and *tried* again after some steps:
    for as long as it takes a hopeful average to fall, and after twice as many steps each time that this was in vain. It
    has to bring more than `RESUME` to be as good as new.
    """

    HOPE = 1.0
    PAUSE = 0.05
    """What a draft worker has to bring: others may have a use for it."""
    PAUSE_LOCAL = -0.05
    """And one in the target's process, of which all that it takes is counted: nothing. Lookups find nothing for long,
    at next to no cost, and then much at once."""
    RESUME = 0.15
    LEARNING = 0.1
    LEAST_PAUSE = 32
    MOST_PAUSE = 4096
    """In steps."""

    def __init__(self, least: float | None = None) -> None:
        """None: `PAUSE`."""
        self.least = self.PAUSE if least is None else least
        self.paused = self.tried = False
        self._brings = self.HOPE
        self._pause = self.LEAST_PAUSE
        self._left = 0

    @property
    def pays(self) -> bool:
        return not (self.paused or self.tried)

    def observe(self, accepted: float) -> None:
        """A step committed so many guesses of each request that the draft drafts for; of a paused one, none."""
        if self.paused:
            self._left -= 1
            if self._left <= 0:
                self.paused, self.tried, self._brings = False, True, self.RESUME
            return
        self._brings += self.LEARNING * (accepted - self._brings)
        if self._brings > self.RESUME:
            self.tried, self._pause = False, self.LEAST_PAUSE
        elif self._brings < self.least:
            self.paused, self.tried, self._left = True, False, self._pause
            self._pause = min(2 * self._pause, self.MOST_PAUSE)


class Weighed(dict[tuple[float, int, int], tuple[int, float]]):
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
    DISTANCES = (0, 0, 1, 1, 2, 2, 2, 2, 3)
    """Depths that are told apart, by depth; the last is for all beyond."""
    FAR = len(DISTANCES) - 1
    DEPTHS = DISTANCES[FAR] + 1
    PER_BIN = RANKS * DEPTHS
    CELLS = BINS * PER_BIN
    BELIEF = 8.0
    """Weight of the draft's word in its bin, and of the bin in its cell, in guesses."""
    MEMORY = 64.0
    """Guesses that a bin or a cell counts for, at most. One workload follows another."""

    def __init__(self) -> None:
        self.drafted = [0.0] * self.CELLS
        self.accepted = [0.0] * self.CELLS
        self._bin_drafted = [0.0] * self.BINS
        self._bin_accepted = [0.0] * self.BINS
        self.weighed = Weighed(self._corrected)
        """By a guess's log-probability, whether it was the draft's first choice at its place (rank 0) or a later one,
        and whether it was the root's child when it came (depth 1) or further away: its cell, and the corrected
        log-probability, if its parent is drawn. A table, since this happens to every guess."""

    def seed(self, drafted: Sequence[float], accepted: Sequence[float]) -> None:
        """Start from what was learned elsewhere: counts by cell, of which no more than `MEMORY` are believed.

        Counts of another shape are ignored.
        """
        if len(drafted) == len(accepted) == self.CELLS:
            self.drafted, self.accepted = self._believed(drafted, accepted)
            self.weighed.clear()
            self._bin_drafted, self._bin_accepted = self._believed(self.by_bin(drafted), self.by_bin(accepted))

    def _corrected(self, log_prob: float, rank: int, depth: int) -> tuple[int, float]:
        probability = math.exp(log_prob)
        i = int(probability * self.BINS)
        # Comparing is several times as fast as `min`, and this happens to every guess.
        i = i if i < self.BINS else self.BINS - 1
        place = rank if rank < self.RANKS else self.RANKS - 1
        cell = (i * self.RANKS + place) * self.DEPTHS + self.DISTANCES[depth if depth < self.FAR else self.FAR]
        share = (self._bin_accepted[i] + self.BELIEF * probability) / (self._bin_drafted[i] + self.BELIEF)
        share = (self.accepted[cell] + self.BELIEF * share) / (self.drafted[cell] + self.BELIEF)
        return cell, math.log(share) if 1e-9 < share < 1.0 else math.log(min(max(share, 1e-9), 1.0))

    def observe(self, cell: int, accepted: bool) -> None:
        """The target drew the guess's parent, and then the guess or another token."""
        self.weighed.clear()
        by_cell = self.drafted, self.accepted, cell
        by_bin = self._bin_drafted, self._bin_accepted, cell // self.PER_BIN
        for drafted, hits, i in (by_cell, by_bin):
            tried = drafted[i]
            if tried > self.MEMORY - 1:
                hits[i] *= (self.MEMORY - 1) / tried
                tried = self.MEMORY - 1
            drafted[i] = tried + 1
            hits[i] += accepted

    @classmethod
    def by_bin(cls, counts: Sequence[float]) -> list[float]:
        """Sums of counts by cell."""
        return [sum(counts[i : i + cls.PER_BIN]) for i in range(0, len(counts), cls.PER_BIN)]

    def _believed(self, drafted: Sequence[float], accepted: Sequence[float]) -> tuple[list[float], list[float]]:
        scales = [min(1.0, self.MEMORY / tried) if tried else 0.0 for tried in drafted]
        return list(map(operator.mul, drafted, scales)), list(map(operator.mul, accepted, scales))

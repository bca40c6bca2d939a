"""The figures of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import quantiles

from loadtests.stream_check import StreamRecord


@dataclass(frozen=True, slots=True)
class LatencyGoal:
    """Milliseconds to the first token, and on average to each further one."""

    first_token_ms: float
    token_ms: float

    def met(self, answer: StreamRecord) -> bool:
        return first_token_ms(answer) <= self.first_token_ms and token_ms(answer) <= self.token_ms


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Figures of the answers that ended within `seconds`.

    `errors`: requests that failed, got an unexpected status, or whose counts do not agree. `streams`: mean number at
    once. `goodput`: tokens per second of answers that met the goal. `token_ms`: each answer's mean time between tokens
    after its first chunk. `acceptance_length`: accepted tokens per verification, without the bonus token.
    """

    seconds: float
    answers: int
    abandoned: int
    refused: int
    errors: int
    lost_tokens: int
    changed_tokens: int
    streams: float
    tokens_per_s: float
    goodput: float
    first_token_ms_p50: float
    first_token_ms_p99: float
    token_ms_p50: float
    token_ms_p99: float
    longest_gap_ms_p99: float
    tokens_per_chunk: float
    acceptance_length: float


REFUSED = "malformed"
"""Kind of the requests that must be refused."""


def figures(records: Sequence[StreamRecord], begins: float, ends: float, goal: LatencyGoal) -> LoadFigures:
    """Figures of the answers that ended from `begins` to `ends`, in seconds since the epoch."""
    seconds = ends - begins
    ended = [record for record in records if begins <= record.ended < ends]
    whole = [a for a in ended if a.kind != REFUSED and not (a.fault or a.left or a.lost or a.changed)]
    streamed = [a for a in records if a.kind != REFUSED]
    tokens = sum(a.tokens for a in whole)
    verifications = sum(a.verifications for a in whole)
    firsts, between = [first_token_ms(a) for a in whole], [token_ms(a) for a in whole]
    return LoadFigures(
        seconds=round(seconds, 1),
        answers=len(whole),
        abandoned=sum(a.left for a in ended),
        refused=sum(a.kind == REFUSED and not a.fault for a in ended),
        errors=sum(bool(a.fault) for a in ended),
        lost_tokens=sum(a.lost for a in ended),
        changed_tokens=sum(a.changed for a in ended),
        streams=round(sum(max(0.0, min(a.ended, ends) - max(a.began, begins)) for a in streamed) / seconds, 1),
        tokens_per_s=round(tokens / seconds, 1),
        goodput=round(sum(a.tokens for a in whole if goal.met(a)) / seconds, 1),
        first_token_ms_p50=percentile(firsts, 50),
        first_token_ms_p99=percentile(firsts, 99),
        token_ms_p50=percentile(between, 50),
        token_ms_p99=percentile(between, 99),
        longest_gap_ms_p99=percentile([1e3 * a.longest_gap_s for a in whole], 99),
        tokens_per_chunk=round(tokens / max(1, sum(a.chunks for a in whole)), 2),
        acceptance_length=round(sum(a.accepted for a in whole) / max(1, verifications), 2),
    )


def first_token_ms(answer: StreamRecord) -> float:
    return 1e3 * (answer.first - answer.began)


def token_ms(answer: StreamRecord) -> float:
    """Mean time between two tokens after the first chunk; 0 if everything came in one chunk."""
    after_first = answer.tokens - answer.first_tokens
    return 1e3 * (answer.ended - answer.first) / after_first if after_first else 0.0


def percentile(values: Iterable[float], percent: int) -> float:
    """Rounded to a tenth, interpolated; 0 for no values."""
    known = sorted(values)
    if len(known) < 2:
        return round(known[0], 1) if known else 0.0
    return round(quantiles(known, n=100, method="inclusive")[percent - 1], 1)

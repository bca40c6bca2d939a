"""Which configuration to serve with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config import SpeculativeConfig
from paceline.doctor.measurements import MethodMeasurement

PAYS = 1.02
"""Speed-up below which a draft does not pay."""


@dataclass(frozen=True, slots=True)
class Advice:
    config: SpeculativeConfig
    why: str


def advice(measured: Sequence[MethodMeasurement]) -> Advice:
    """Recommends the fastest method with the output of plain decoding, or none."""
    exact = [each for each in measured if each.identical is not False and each.speeds]
    best = max(exact, key=lambda each: each.speedup, default=None)
    if best is None or pays_up_to(best) == 0:
        return Advice(SpeculativeConfig(method="none"), "no measured method is faster than plain decoding")
    config = best.config
    if "draft_placement" not in config.model_fields_set:
        config = config.model_copy(update={"draft_placement": "target"})  # as it was measured
    fastest = max(best.speeds, key=lambda speed: speed.speedup)
    return Advice(
        config,
        f"{best.name} is the fastest: {fastest.speedup:.2f} × with {_requests(fastest.requests)}; it pays with up to "
        f"{_requests(pays_up_to(best))}",
    )


def pays_up_to(measured: MethodMeasurement) -> int:
    """The largest measured number of requests at once at which it pays; 0: none."""
    return max((speed.requests for speed in measured.speeds if speed.speedup >= PAYS), default=0)


def _requests(count: int) -> str:
    return "one request at a time" if count == 1 else f"{count} requests at once"

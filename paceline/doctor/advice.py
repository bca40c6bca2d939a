"""Which configuration to serve with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config import SpeculativeConfig
from paceline.doctor.measurements import MethodMeasurement

PAYS = 1.02
"""A smaller speed-up is not worth a draft."""


@dataclass(frozen=True, slots=True)
class Advice:
    config: SpeculativeConfig
    why: str


def advice(measured: Sequence[MethodMeasurement]) -> Advice:
    """The fastest whose output is plain decoding's, or none."""
    right = [each for each in measured if each.identical is not False and each.speeds]
    best = max(right, key=lambda each: each.speedup, default=None)
    if best is None or pays_up_to(best) == 0:
        return Advice(SpeculativeConfig(method="none"), "nothing that was measured is faster than plain decoding")
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
    """Requests at once, as far as they were measured; 0: never."""
    return max((speed.requests for speed in measured.speeds if speed.speedup >= PAYS), default=0)


def _requests(count: int) -> str:
    return "one request at a time" if count == 1 else f"{count} requests at once"

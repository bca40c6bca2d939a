"""The diagnosis: measurements, likely causes of low acceptance, memory, and a recommendation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.config import SpeculativeConfig
from paceline.doctor.candidates import CandidateMethod, combined_candidate
from paceline.doctor.causes import Cause, causes
from paceline.doctor.measurement import DraftMemory, MeasurementSettings, measure, need
from paceline.doctor.measurements import MethodMeasurement
from paceline.llm import LLM, VocabularyMismatchError
from paceline.model.device_memory import free_bytes, gigabytes
from paceline.model_names import ModelNotFoundError

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


@dataclass(frozen=True, slots=True)
class DiagnosedMethod:
    """A measured method. `free`: free bytes before it was built; None: unknown."""

    measured: MethodMeasurement
    need: DraftMemory = dataclasses.field(default_factory=DraftMemory)
    free: int | None = None

    @property
    def causes(self) -> list[Cause]:
        return causes(self.measured.acceptances, self.measured.facts)


@dataclass(frozen=True, slots=True)
class RejectedMethod:
    """A method that cannot draft for this target or on this machine. `cause`: a name such as `memory`."""

    name: str
    cause: str
    says: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    cases: Sequence[DiagnosedMethod]
    refused: Sequence[RejectedMethod]
    advice: Advice | None
    left: Sequence[str] = ()
    """Names of the methods that were not measured because of Ctrl-C."""

    @property
    def identical(self) -> bool:
        """False if any exact method changed the output."""
        return all(case.measured.identical is not False for case in self.cases)

    def as_json(self) -> dict[str, Any]:
        return {
            "methods": [_case_json(case) for case in self.cases],
            "refused": [dataclasses.asdict(each) for each in self.refused],
            "identical": self.identical,
            "recommended": None if self.advice is None else config_json(self.advice.config),
            "why": None if self.advice is None else self.advice.why,
        }


def diagnose(
    target: LLM,
    candidates: Sequence[CandidateMethod],
    settings: MeasurementSettings,
    done: Callable[[], None] = lambda: None,
) -> Diagnosis:
    """Measure all candidates, and the combination of the best two. `done` is called after each.

    `target` must not cache prompts. Ctrl-C ends it with the results so far; without any it is raised.
    """
    target.generate([settings.prompts[0]], settings.sampling(settings.temperatures[0]))  # warm up
    cases: list[DiagnosedMethod] = []
    refused: list[RejectedMethod] = []

    def examine(candidate: CandidateMethod) -> None:
        match examined(target, candidate, settings):
            case DiagnosedMethod() as case:
                cases.append(case)
            case RejectedMethod() as rejected:
                refused.append(rejected)
        done()

    try:
        for candidate in candidates:
            examine(candidate)
        both = combined_candidate([case.measured for case in cases])
        if both is not None and both.name not in {candidate.name for candidate in candidates}:
            examine(both)
    except KeyboardInterrupt:
        if not cases:
            raise
    seen = {case.measured.name for case in cases} | {each.name for each in refused}
    left = [candidate.name for candidate in candidates if candidate.name not in seen]
    return Diagnosis(cases, refused, advice([case.measured for case in cases]), left)


def examined(
    target: LLM, candidate: CandidateMethod, settings: MeasurementSettings
) -> DiagnosedMethod | RejectedMethod:
    """Measure one candidate, unless it does not fit in memory or cannot draft for the target."""
    try:
        needed, free = need(target, candidate.config), free_bytes(torch.device(target.config.device))
        if not needed.fits(free):
            return RejectedMethod(candidate.name, "memory", short_of(needed, free or 0))
        return DiagnosedMethod(measure(target, candidate, settings), needed, free)
    except VocabularyMismatchError as error:
        return RejectedMethod(candidate.name, "tokenizer", str(error))
    except (ValueError, OSError, ModelNotFoundError) as error:
        return RejectedMethod(candidate.name, "configuration", str(error))


def short_of(needed: DraftMemory, free: int) -> str:
    return (
        f"it takes {gigabytes(needed.weights)} of weights, {gigabytes(needed.cache)} of keys and values and "
        f"{gigabytes(needed.states)} of hidden states, and {gigabytes(free)} are free: lower `slots`, or choose "
        "a smaller draft"
    )


def config_json(config: SpeculativeConfig) -> dict[str, Any]:
    """As the user would write it: without defaults."""
    given: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    beside = given.pop("beside", ())
    return given | {"method": [*beside, config.method] if beside else config.method}


def _case_json(case: DiagnosedMethod) -> dict[str, Any]:
    this = case.measured
    return {
        "method": this.name,
        "config": config_json(this.config) if this.config.enabled else None,
        "acceptance": [
            {
                "temperature": each.temperature,
                "length": round(each.length, 3),
                "per_step": round(each.per_step, 3),
                "by_depth": [round(share, 3) for share in each.by_depth],
            }
            for each in this.acceptances
        ],
        "speeds": [
            {key: value and round(value, 2) for key, value in dataclasses.asdict(speed).items()}
            | {"speedup": round(speed.speedup, 3)}
            for speed in this.speeds
        ],
        "identical": this.identical,
        "causes": [dataclasses.asdict(cause) for cause in case.causes],
        "memory_bytes": {**dataclasses.asdict(case.need), "free": case.free},
    }

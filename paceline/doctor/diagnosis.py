"""All of it: what was measured, what is wrong with it, what it takes, and what to serve with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.config import SpeculativeConfig
from paceline.doctor.advice import Advice, advice
from paceline.doctor.candidates import CandidateMethod, combined_candidate
from paceline.doctor.causes import Cause, causes
from paceline.doctor.draft_memory import MemoryNeed, free_bytes
from paceline.doctor.measurement import MeasurementSettings, measure, need
from paceline.doctor.measurements import MethodMeasurement
from paceline.llm import LLM, VocabularyMismatchError
from paceline.model_names import ModelNotFoundError


@dataclass(frozen=True, slots=True)
class DiagnosedMethod:
    """One way to draft that was measured. `free`: bytes before it was built; None: unknown."""

    measured: MethodMeasurement
    need: MemoryNeed = dataclasses.field(default_factory=MemoryNeed)
    free: int | None = None

    @property
    def causes(self) -> list[Cause]:
        return causes(self.measured.acceptances, self.measured.facts)


@dataclass(frozen=True, slots=True)
class RejectedMethod:
    """One that cannot draft for this target, or not here. `cause`: its likely name."""

    name: str
    cause: str
    says: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    cases: Sequence[DiagnosedMethod]
    refused: Sequence[RejectedMethod]
    advice: Advice | None
    left: Sequence[str] = ()
    """Names of those that were not measured, since somebody ended it."""

    @property
    def identical(self) -> bool:
        """Whether no output differs that must not."""
        return all(case.measured.identical is not False for case in self.cases)

    def as_json(self) -> dict[str, Any]:
        """For JSON."""
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
    trial: MeasurementSettings,
    done: Callable[[], None] = lambda: None,
) -> Diagnosis:
    """`target`: without cached prompts. `done` is told of each candidate. Ctrl-C ends it with what was
    measured by then, if anything was.
    """
    target.generate([trial.prompts[0]], trial.sampling(trial.temperatures[0]))  # fills caches of operators
    cases: list[DiagnosedMethod] = []
    refused: list[RejectedMethod] = []

    def examine(candidate: CandidateMethod) -> None:
        found = examined(target, candidate, trial)
        if isinstance(found, DiagnosedMethod):
            cases.append(found)
        else:
            refused.append(found)
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


def examined(target: LLM, candidate: CandidateMethod, trial: MeasurementSettings) -> DiagnosedMethod | RejectedMethod:
    try:
        needed, free = need(target, candidate.config), free_bytes(torch.device(target.config.device))
        if not needed.fits(free):
            return RejectedMethod(candidate.name, "memory", short_of(needed, free or 0))
        return DiagnosedMethod(measure(target, candidate, trial), needed, free)
    except VocabularyMismatchError as error:
        return RejectedMethod(candidate.name, "tokenizer", str(error))
    except (ValueError, OSError, ModelNotFoundError) as error:
        return RejectedMethod(candidate.name, "configuration", str(error))


def short_of(needed: MemoryNeed, free: int) -> str:
    return (
        f"it takes {gigabytes(needed.weights)} of weights, {gigabytes(needed.cache)} of keys and values and "
        f"{gigabytes(needed.states)} of hidden states, and {gigabytes(free)} are free: lower `slots`, or choose "
        "a smaller draft"
    )


def gigabytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def config_json(config: SpeculativeConfig) -> dict[str, Any]:
    """As the user would write it: what is not the default."""
    said: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    beside = said.pop("beside", ())
    return said | {"method": [*beside, config.method] if beside else config.method}


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

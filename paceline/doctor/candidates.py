"""The methods to measure for a target: all that fit it, and those that the user gives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config import DETECT, SpeculativeConfig
from paceline.doctor.measurements import MethodMeasurement
from paceline.drafting.auto_method import has_mtp_layer, shipped_drafts
from paceline.model_names import resolve_model

LEAST_SUFFIX_GAIN = 0.1
"""Accepted tokens per step of suffix decoding, below which it is not combined with another method."""


@dataclass(frozen=True, slots=True)
class CandidateMethod:
    """`name` is unique among the candidates."""

    name: str
    config: SpeculativeConfig


def candidates(model: str, given: Sequence[SpeculativeConfig]) -> list[CandidateMethod]:
    """Raises `ModelNotFoundError`, or `CheckpointError` if the target's checkpoint cannot be read."""
    folder = resolve_model(model)
    found = [SpeculativeConfig(method="ngram"), SpeculativeConfig.model_validate({"method": "suffix"})]
    if has_mtp_layer(folder):
        found.append(SpeculativeConfig(method="mtp"))
    drafts = shipped_drafts(folder).items()
    found += [SpeculativeConfig.model_validate({"method": method, "model": draft}) for method, draft in drafts]
    return named([*found, *(config for config in given if config.enabled)])


def named(configs: Iterable[SpeculativeConfig]) -> list[CandidateMethod]:
    """Named by method; if that is taken, with the checkpoint's name too, and then with a number."""
    taken: dict[str, CandidateMethod] = {}
    for config in configs:
        name = method = method_of(config)
        if name in taken and config.model is not None:
            name = method = f"{method} {Path(config.model).name}"
        number = 2
        while name in taken:
            name, number = f"{method} ({number})", number + 1
        taken[name] = CandidateMethod(name, config)
    return list(taken.values())


def method_of(config: SpeculativeConfig) -> str:
    """The methods of a configuration; for a checkpoint whose method is not detected yet, its folder's name."""
    method = Path(config.model or "").name if config.method == DETECT else config.method
    return " + ".join((*config.beside, method))


def combined_candidate(measured: Sequence[MethodMeasurement]) -> CandidateMethod | None:
    """The best trained draft combined with suffix decoding, if suffix decoding alone accepts enough."""
    suffix = next((each for each in measured if each.name == "suffix"), None)
    trained = [each for each in measured if each.facts.trained and not each.config.beside]
    if suffix is None or not trained or suffix.acceptances[0].per_step < LEAST_SUFFIX_GAIN:
        return None
    best = max(trained, key=lambda each: each.speedup)
    return CandidateMethod(f"suffix + {best.name}", best.config.model_copy(update={"beside": ("suffix",)}))

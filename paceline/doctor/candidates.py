"""What is worth measuring for a target: all that fits without a question, and what the user names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline import family
from paceline.config import DETECT, SpeculativeConfig
from paceline.doctor.measurements import MethodMeasurement
from paceline.drafting.auto_method import has_mtp_layer, is_shipped_target
from paceline.model_names import resolve_model

LEAST_SUFFIX_GAIN = 0.1
"""Tokens per step that suffix decoding has to bring to be tried beside another."""


@dataclass(frozen=True, slots=True)
class CandidateMethod:
    """`name`: no other one's."""

    name: str
    config: SpeculativeConfig


def candidates(model: str, given: Sequence[SpeculativeConfig]) -> list[CandidateMethod]:
    """Raises `ModelNotFoundError`, or `CheckpointError` if the target's checkpoint cannot be read."""
    place = resolve_model(model)
    found = [SpeculativeConfig(method="ngram"), SpeculativeConfig.model_validate({"method": "suffix"})]
    if has_mtp_layer(place):
        found.append(SpeculativeConfig(method="mtp"))
    if is_shipped_target(place):
        drafts = {"draft_model": family.NAMES[1], **family.HEADS}
        found += [SpeculativeConfig.model_validate({"method": m, "model": folder}) for m, folder in drafts.items()]
    return named([*found, *(config for config in given if config.enabled)])


def named(configs: Iterable[SpeculativeConfig]) -> list[CandidateMethod]:
    """By method; where that is taken by the checkpoint's name too, then by a number."""
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
    """What it is called by; a checkpoint that is still to be looked at, by its own name."""
    method = Path(config.model or "").name if config.method == DETECT else config.method
    return " + ".join((*config.beside, method))


def combined_candidate(measured: Sequence[MethodMeasurement]) -> CandidateMethod | None:
    """The best draft with suffix decoding beside it, if that alone brings something."""
    suffix = next((each for each in measured if each.name == "suffix"), None)
    trained = [each for each in measured if each.facts.trained and not each.config.beside]
    if suffix is None or not trained or suffix.acceptances[0].per_step < LEAST_SUFFIX_GAIN:
        return None
    best = max(trained, key=lambda each: each.speedup)
    return CandidateMethod(f"suffix + {best.name}", best.config.model_copy(update={"beside": ("suffix",)}))

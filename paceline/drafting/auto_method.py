"""Method `auto`: what drafts for a target, by what there is to draft with.

Nothing is measured beforehand. Whatever is picked is tried on the requests themselves: a draft that does not pay is
paused (`paceline.engine.worker_gate`), and a guess that is not worth its row gets none
(`paceline.core.policy.step_cost`). So what costs little may always draft, and `paceline doctor` says more.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from paceline import family
from paceline.config import AUTO, DETECT, MAX_DEPTH, ModelFree, SpeculativeConfig
from paceline.drafting.heads.mtp_layouts import MTP_FAMILIES
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model_names import is_fake_model, resolve_model

log = logging.getLogger(__name__)

AUTO_MODEL_FREE: tuple[ModelFree, ...] = ("suffix", "ngram")
"""They need no checkpoint, and next to no time."""


@dataclass(frozen=True, slots=True)
class MethodChoice:
    """What drafts, and why."""

    method: str
    model: str | None
    why: str


def resolve_auto(config: SpeculativeConfig, target: str | None) -> SpeculativeConfig:
    """With a method for the target of this name in the place of `auto`; a checkpoint's method is still to be detected.

    Raises `CheckpointError` or `ModelNotFoundError` if the target cannot be looked at.
    """
    if config.method != AUTO:
        return config
    pick = choose_method(config.model, target)
    beside = tuple(method for method in AUTO_MODEL_FREE if method != pick.method)
    log.info("method auto: %s, since %s; beside it %s", pick.method, pick.why, " and ".join(beside))
    return config.model_copy(
        update={"method": pick.method, "model": pick.model, "beside": beside, **_suffix_defaults(config, pick)}
    )


def choose_method(model: str | None, target: str | None) -> MethodChoice:
    """The user's own checkpoint first, then what was trained for this target, then what needs no training.

    Raises as `resolve_auto` does.
    """
    if model is not None:
        return MethodChoice(DETECT, model, f"{model} was given")
    if target is None:
        raise CheckpointError("method auto without a `model` looks at the target's checkpoint: say which one it is")
    place = resolve_model(target)
    if has_mtp_layer(place):
        return MethodChoice("mtp", None, "the target's checkpoint holds a multi-token-prediction layer")
    if is_shipped_target(place):
        return MethodChoice("draft_model", str(family.path(family.NAMES[1])), "the shipped target comes with a draft")
    return MethodChoice("suffix", None, "no draft for this target is known")


def is_shipped_target(place: str) -> bool:
    """`place`: as `resolve_model` gives it."""
    return place == str(family.path(family.NAMES[0]).resolve())


def has_mtp_layer(place: str) -> bool:
    """Whether a target's checkpoint holds a multi-token-prediction layer that can draft for it.

    Raises `CheckpointError` if it cannot be read.
    """
    return not is_fake_model(place) and bool(mtp_layer_names(Checkpoint(place)))


def mtp_layer_names(checkpoint: Checkpoint) -> list[str]:
    """Its tensors; none if there is no whole layer, or of no family that is known."""
    settings = checkpoint.config.get("text_config", checkpoint.config)
    kind = MTP_FAMILIES.get(settings.get("model_type", ""))
    if kind is None or kind.layout is None:
        return []
    layers = int(settings["num_hidden_layers"])
    if kind.layout.name("projection.weight", layers) not in checkpoint.names:
        return []
    return [name for name in checkpoint.names if name.startswith(kind.layout.prefix.format(layers=layers))]


def _suffix_defaults(config: SpeculativeConfig, pick: MethodChoice) -> dict[str, Any]:
    """Alone it guesses as deep as it counts, in the target's process; unless told otherwise."""
    own = {
        "num_speculative_tokens": min(config.suffix_decoding_max_tree_depth, MAX_DEPTH),
        "draft_placement": "target",
    }
    if pick.method != "suffix":
        return {}
    return {key: value for key, value in own.items() if key not in config.model_fields_set}

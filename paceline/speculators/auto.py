"""Method `auto`: what drafts for a target, by what there is to draft with.

Nothing is measured beforehand. Whatever is picked is tried on the requests themselves: a draft that does not pay is
paused (`paceline.engine.trial`), and a guess that is not worth its row gets none (`paceline.budget`). So what costs
little may always draft, and `paceline doctor` says more.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from paceline import family
from paceline.config import AUTO, DETECT, MOST_DEPTH, ModelFree, SpeculativeConfig
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.models import is_weightless, resolve_model
from paceline.speculators.mtp_layouts import FAMILIES

log = logging.getLogger(__name__)

BESIDE: tuple[ModelFree, ...] = ("suffix", "ngram")
"""They need no checkpoint, and next to no time."""


@dataclass(frozen=True, slots=True)
class Pick:
    """What drafts, and why."""

    method: str
    model: str | None
    why: str


def picked(config: SpeculativeConfig, target: str | None) -> SpeculativeConfig:
    """With a method for the target of this name in the place of `auto`; a checkpoint's method is still to be detected.

    Raises `CheckpointError` or `ModelNotFoundError` if the target cannot be looked at.
    """
    if config.method != AUTO:
        return config
    pick = pick_for(config.model, target)
    beside = tuple(method for method in BESIDE if method != pick.method)
    log.info("method auto: %s, since %s; beside it %s", pick.method, pick.why, " and ".join(beside))
    return config.model_copy(
        update={"method": pick.method, "model": pick.model, "beside": beside, **_of_suffix(config, pick)}
    )


def pick_for(model: str | None, target: str | None) -> Pick:
    """The user's own checkpoint first, then what was trained for this target, then what needs no training.

    Raises as `picked` does.
    """
    if model is not None:
        return Pick(DETECT, model, f"{model} was given")
    if target is None:
        raise CheckpointError("method auto without a `model` looks at the target's checkpoint: say which one it is")
    place = resolve_model(target)
    if has_own_layer(place):
        return Pick("mtp", None, "the target's checkpoint holds a multi-token-prediction layer")
    if is_shipped_target(place):
        return Pick("draft_model", str(family.path(family.NAMES[1])), "the shipped target comes with a draft")
    return Pick("suffix", None, "no draft for this target is known")


def is_shipped_target(place: str) -> bool:
    """`place`: as `resolve_model` gives it."""
    return place == str(family.path(family.NAMES[0]).resolve())


def has_own_layer(place: str) -> bool:
    """Whether a target's checkpoint holds a multi-token-prediction layer that can draft for it.

    Raises `CheckpointError` if it cannot be read.
    """
    return not is_weightless(place) and bool(own_layer_names(Checkpoint(place)))


def own_layer_names(checkpoint: Checkpoint) -> list[str]:
    """Its tensors; none if there is no whole layer, or of no family that is known."""
    settings = checkpoint.config.get("text_config", checkpoint.config)
    kind = FAMILIES.get(settings.get("model_type", ""))
    if kind is None or kind.layout is None:
        return []
    layers = int(settings["num_hidden_layers"])
    if kind.layout.name("projection.weight", layers) not in checkpoint.names:
        return []
    return [name for name in checkpoint.names if name.startswith(kind.layout.prefix.format(layers=layers))]


def _of_suffix(config: SpeculativeConfig, pick: Pick) -> dict[str, Any]:
    """Alone it guesses as deep as it counts, in the target's process; unless told otherwise."""
    own = {
        "num_speculative_tokens": min(config.suffix_decoding_max_tree_depth, MOST_DEPTH),
        "draft_placement": "target",
    }
    if pick.method != "suffix":
        return {}
    return {key: value for key, value in own.items() if key not in config.model_fields_set}

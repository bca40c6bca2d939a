"""Methods `auto` and `detect`: choose a method by what there is to draft with, and by what a checkpoint is for.

Nothing is measured beforehand. The choice is tried on the requests themselves: a draft that does not pay is paused
(`paceline.engine.draft_gate`), and a draft token that is not worth its row is not verified
(`paceline.core.policy.step_cost`). So cheap methods may always draft. `paceline doctor` measures.

A checkpoint's method is told by its tensors and by keys that only this kind of checkpoint has. `architectures` in
config.json is no evidence: published heads name the class of a plain Llama.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from paceline import family
from paceline.config import AUTO, DETECT, LOOKUP_METHODS, MAX_DEPTH, METHODS, SpeculativeConfig
from paceline.drafting.heads.mtp_layouts import MTP_FAMILIES
from paceline.drafting.method_registry import method_hook
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model_names import downloaded, is_fake_model, resolve_model

log = logging.getLogger(__name__)

SPECULATORS_LIBRARY_TYPES = ("eagle", "eagle3", "peagle", "dflash", "dflash2", "dspark", "xpress", "mtp")
"""The speculators library's names for the type of a checkpoint, which are those of methods."""


@dataclass(frozen=True, slots=True)
class MethodChoice:
    method: str
    model: str | None
    why: str


def resolve_auto(config: SpeculativeConfig, target: str | None) -> SpeculativeConfig:
    """The configuration with a method in place of `auto`, and the lookup methods beside it.

    The method is `detect` if the user names a checkpoint. Raises `CheckpointError` or `ModelNotFoundError` if the
    target's checkpoint cannot be read.
    """
    if config.method != AUTO:
        return config
    choice = choose_method(config.model, target)
    beside = tuple(name for name in LOOKUP_METHODS if name != choice.method and not METHODS[name].needs)
    log.info("method auto: %s, since %s; beside it %s", choice.method, choice.why, " and ".join(beside))
    update = {"method": choice.method, "model": choice.model, "beside": beside}
    return config.model_copy(update=update | _suffix_defaults(config, choice))


def choose_method(model: str | None, target: str | None) -> MethodChoice:
    """The user's checkpoint, else a draft trained for the target, else a method without weights. Raises as
    `resolve_auto` does."""
    if model is not None:
        return MethodChoice(DETECT, model, f"{model} was given")
    if target is None:
        raise CheckpointError("method auto without a `model` looks at the target's checkpoint: say which one it is")
    folder = resolve_model(target)
    if has_mtp_layer(folder):
        return MethodChoice("mtp", None, "the target's checkpoint holds a multi-token-prediction layer")
    if drafts := shipped_drafts(folder):
        method, name = next(iter(drafts.items()))
        return MethodChoice(method, str(family.path(name)), f"{name} ships for this target")
    return MethodChoice("suffix", None, "no draft for this target is known")


def shipped_drafts(folder: str) -> dict[str, str]:
    """By method, best first, the names of the drafts that ship for a target.

    `folder`: as `resolve_model` returns it.
    """
    if folder == str(family.path(family.NAMES[0]).resolve()):
        return {"draft_model": family.NAMES[1], **family.HEADS}
    name = next((each for each in family.PUBLISHED_HEADS if folder == str(downloaded(each))), None)
    return {} if name is None else {"eagle3": family.PUBLISHED_HEADS[name]}


def has_mtp_layer(folder: str) -> bool:
    """Whether a target's checkpoint holds a multi-token-prediction layer that can draft for it.

    Raises `CheckpointError` if it cannot be read.
    """
    return not is_fake_model(folder) and bool(mtp_layer_names(Checkpoint(folder)))


def mtp_layer_names(checkpoint: Checkpoint) -> list[str]:
    """The tensors of a multi-token-prediction layer; none if the layer is incomplete or its family unknown."""
    settings = checkpoint.config.get("text_config", checkpoint.config)
    mtp_family = MTP_FAMILIES.get(settings.get("model_type", ""))
    if mtp_family is None or mtp_family.layout is None:
        return []
    layers = int(settings["num_hidden_layers"])
    if mtp_family.layout.name("projection.weight", layers) not in checkpoint.names:
        return []
    return [name for name in checkpoint.names if name.startswith(mtp_family.layout.prefix.format(layers=layers))]


def _suffix_defaults(config: SpeculativeConfig, choice: MethodChoice) -> dict[str, Any]:
    """Suffix decoding without a draft model runs in the target's process, and drafts as deep as it counts."""
    if choice.method != "suffix":
        return {}
    depth = min(config.suffix_decoding_max_tree_depth, MAX_DEPTH)
    defaults = {"num_speculative_tokens": depth, "draft_placement": "target"}
    return {key: value for key, value in defaults.items() if key not in config.model_fields_set}


def detect_method(config: SpeculativeConfig) -> SpeculativeConfig:
    """The configuration with the checkpoint's method in place of `detect`.

    Raises `CheckpointError` if the method is unknown, `ModelNotFoundError` if there is no checkpoint.
    """
    if config.method != DETECT or config.model is None:
        return config
    folder = resolve_model(config.model)
    method = "draft_model" if is_fake_model(folder) else method_of_checkpoint(Checkpoint(folder))
    log.info("%s is a checkpoint for method %s", folder, method)
    return config.model_copy(update={"method": method})


def method_of_checkpoint(checkpoint: Checkpoint) -> str:
    """The method of a checkpoint. Raises `CheckpointError` if a file cannot be read, or if its type is unknown."""
    library_type = checkpoint.config.get("speculators_model_type")
    if library_type is None:
        return _matching_method(checkpoint)
    if library_type not in SPECULATORS_LIBRARY_TYPES:
        raise CheckpointError(
            f"{checkpoint} is of type {library_type!r} of the speculators library, which is not known here"
        )
    return str(library_type)


def _matching_method(checkpoint: Checkpoint) -> str:
    """The first method that matches; without a match the checkpoint is a language model."""
    for method in METHODS:
        matches = method_hook(method, "matches")
        if matches and matches(checkpoint):
            return method
    return "draft_model"

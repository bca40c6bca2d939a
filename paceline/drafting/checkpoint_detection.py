"""Which method a checkpoint is for: by its tensors and by keys of its own, never by the class that it names.

Uploads of heads name the class of a plain Llama, which would be built from them without a complaint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import get_args

from paceline.config import DETECT, Method, SpeculativeConfig
from paceline.drafting.heads.medusa_heads import is_medusa
from paceline.drafting.heads.mlp_network import is_mlp_speculator
from paceline.drafting.methods.eagle import is_eagle
from paceline.drafting.methods.eagle3 import is_eagle3
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model_names import is_fake_model, resolve_model

log = logging.getLogger(__name__)


def detect_method(config: SpeculativeConfig) -> SpeculativeConfig:
    """With the method that the checkpoint is for, where the configuration names none.

    Raises `CheckpointError` if that cannot be told or served, `ModelNotFoundError` if there is no checkpoint.
    """
    if config.method != DETECT or config.model is None:
        return config
    folder = resolve_model(config.model)
    method = "draft_model" if is_fake_model(folder) else method_of_checkpoint(Checkpoint(folder))
    if method not in get_args(Method):
        raise CheckpointError(f"{folder} is a checkpoint for method {method!r}, which is planned but not built yet")
    log.info("%s is a checkpoint for method %s", folder, method)
    return config.model_copy(update={"method": method})


def method_of_checkpoint(checkpoint: Checkpoint) -> str:
    """The method, whether it can be served or not. Raises `CheckpointError` for a file that cannot be read."""
    said = checkpoint.config.get("speculators_model_type")
    if said is None:
        return next((method for is_one, method in FORMATS if is_one(checkpoint)), "draft_model")
    if said not in SPECULATORS_LIBRARY_TYPES:
        raise CheckpointError(f"{checkpoint} is of type {said!r} of the speculators library, which is not known here")
    return SPECULATORS_LIBRARY_TYPES[said]


SPECULATORS_LIBRARY_TYPES = {name: name for name in ("eagle", "eagle3", "peagle", "dflash", "dspark", "mtp")} | {
    "dflash2": "dflash"
}
"""By what the speculators library calls a checkpoint, the method."""


def _is_dflash(checkpoint: Checkpoint) -> bool:
    return "dflash_config" in checkpoint.config


def _is_dspark(checkpoint: Checkpoint) -> bool:
    return "markov_rank" in checkpoint.config


def _has_mask(checkpoint: Checkpoint) -> bool:
    """P-EAGLE: EAGLE-3 with something to feed the rows of tokens that are not even guessed."""
    return "mask_hidden" in checkpoint.names


def _is_pard(checkpoint: Checkpoint) -> bool:
    return any(key in checkpoint.config for key in ("pard_token", "ptd_token_id"))


def _has_mtp_layers(checkpoint: Checkpoint) -> bool:
    """A target that holds modules for multi-token prediction."""
    keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
    return any(checkpoint.config.get(key) for key in keys) or any(n.startswith("mtp.") for n in checkpoint.names)


FORMATS: Sequence[tuple[Callable[[Checkpoint], bool], str]] = (
    (is_mlp_speculator, "mlp_speculator"),
    (is_medusa, "medusa"),
    (_is_dflash, "dflash"),
    (_is_dspark, "dspark"),
    (_has_mask, "peagle"),
    (_is_pard, "pard"),
    (is_eagle3, "eagle3"),
    (is_eagle, "eagle"),
    (_has_mtp_layers, "mtp"),
)
"""The first whose marks a checkpoint has; one without any is a language model of its own."""

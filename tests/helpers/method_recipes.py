"""A small checkpoint, a target and a configuration for every drafting method."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.drafting import Speculator
from tests.helpers.checkpoints import save_checkpoint, save_tokenizer
from tests.helpers.drafts import ngram_draft
from tests.helpers.head_methods import HEAD_METHODS, save_method
from tests.helpers.llamas import VOCABULARY
from tests.helpers.mtp_checkpoints import layer_tensors
from tests.helpers.mtp_checkpoints import save_target as save_mtp_target
from tests.helpers.parallel import MASK


@dataclass(frozen=True, slots=True)
class Recipe:
    target: Path
    """Folder of the target's checkpoint."""
    config: Mapping[str, Any]
    """`SpeculativeConfig` without `method`."""


def custom_speculator(config: SpeculativeConfig, engine: EngineConfig) -> Speculator:
    return ngram_draft(1, 3, 2)


def _draft_model(folder: Path) -> Recipe:
    target = save_checkpoint(folder)
    return Recipe(target, {"model": str(target)})


def _other_vocabulary(mapping: str) -> Callable[[Path], Recipe]:
    """The draft's token i is the target's token i + 3, except token 0; the last three are unknown to the target."""

    def recipe(folder: Path) -> Recipe:
        draft = save_checkpoint(folder / "draft")
        save_tokenizer(draft, [0, *range(4, VOCABULARY + 3)])
        config = {"model": str(draft), "vocabulary_mapping": mapping}
        return Recipe(save_checkpoint(folder / "target"), config)

    return recipe


def _pard(folder: Path) -> Recipe:
    target = save_checkpoint(folder)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"pard_token": MASK}))
    return Recipe(target, {"model": str(target)})


def _head(method: str) -> Callable[[Path], Recipe]:
    def recipe(folder: Path) -> Recipe:
        head = save_method(folder / "head", method)
        return Recipe(save_checkpoint(folder / "target"), {"model": str(head)})

    return recipe


def _without_model(**config: Any) -> Callable[[Path], Recipe]:
    return lambda folder: Recipe(save_checkpoint(folder), config)


def _extraction(folder: Path) -> Recipe:
    config = {"hidden_states_path": str(folder / "states"), "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    return Recipe(save_checkpoint(folder), config)


RECIPES: Mapping[str, Callable[[Path], Recipe]] = {
    "draft_model": _draft_model,
    "draft_model intersection": _other_vocabulary("intersection"),
    "draft_model strings": _other_vocabulary("strings"),
    "pard": _pard,
    **{method: _head(method) for method in HEAD_METHODS},
    "mtp of the target": lambda folder: Recipe(save_mtp_target(folder, "mimo", layer_tensors("mimo")), {}),
    "suffix": _without_model(),
    "ngram": _without_model(),
    "custom_class": _without_model(speculator="tests.helpers.method_recipes.custom_speculator"),
    "extract_hidden_states": _extraction,
}
"""By method, and behind it the variant."""

"""A checkpoint that `speculators` 0.9 writes loads by its folder alone and guesses what the package's model guesses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.drafting import build_speculator, complete_config
from paceline.drafting.speculator import Context, Speculator
from paceline.model.loading import build
from paceline.model.target_weights import TargetWeights
from tests.speculators_library import cases
from tests.speculators_library.cases import CASES, DEPTH
from tests.speculators_library.recorded import read, save_recorded, target_network
from tests.unit.drafting.drafted import DraftedRequest

RECORDED = read()
WIDTH = 3


@pytest.fixture(scope="module")
def target() -> TargetWeights:
    return build(target_network(), "target", EngineConfig(slots=256), "", []).target_weights()


def head(name: str, target: TargetWeights, folder: Path, **options: Any) -> tuple[SpeculativeConfig, Speculator]:
    """By the folder alone."""
    saved = save_recorded(folder, name, RECORDED["heads"][name])
    config = complete_config(SpeculativeConfig(model=str(saved), **options))
    return config, build_speculator(config, EngineConfig(slots=256), lambda: target)


def test_every_case_is_recorded() -> None:
    assert RECORDED["speculators"] == "0.9.0"
    assert RECORDED["heads"].keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_the_method_is_the_packages(name: str, target: TargetWeights, tmp_path: Path) -> None:
    assert head(name, target, tmp_path)[0].method == CASES[name].kind


@pytest.mark.parametrize("length", cases.PROMPTS)
@pytest.mark.parametrize("name", CASES)
def test_guesses_are_the_packages(name: str, length: int, target: TargetWeights, tmp_path: Path) -> None:
    """Along the likeliest path, and along the one that begins with the second token."""
    _, speculator = head(name, target, tmp_path, tree_width=WIDTH, least_path_probability=0)
    request = DraftedRequest(speculator, cases.prompt(length), depth=DEPTH)
    states = cases.states(length - 1, len(speculator.description.hidden_state_layers))
    speculator.context(Context(1, 0, states))
    request.grow()
    guesses = request.guesses()
    for path, likeliest in RECORDED["heads"][name]["guesses"][str(length)]:
        children = {guess[-1]: log_prob for guess, log_prob in guesses.items() if guess[:-1] == tuple(path)}
        assert children == pytest.approx(dict(likeliest[:WIDTH]), abs=1e-3), path

"""Method `auto`: which method it chooses for a target."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from paceline import family
from paceline.cli.deployment import DeploymentOptions, plan_deployment
from paceline.config import SUFFIX_DEPTH, EngineConfig, SpeculativeConfig
from paceline.drafting import complete_config
from paceline.drafting.auto_method import has_mtp_layer
from paceline.launcher import StartError
from paceline.llm import LLM
from paceline.model.checkpoint import CheckpointError
from paceline_services.draft.speculator_process import load_speculator as load_draft
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.mtp_checkpoints import layer_tensors, save_target

TARGET, DRAFT = family.NAMES
AUTO = SpeculativeConfig(method="auto")


def test_an_mtp_layer_in_the_targets_checkpoint_is_chosen(tmp_path: Path) -> None:
    target = save_target(tmp_path, "mimo", layer_tensors("mimo"))
    found = complete_config(AUTO, str(target))
    assert (found.method, found.model, found.beside) == ("mtp", None, ("suffix", "ngram"))
    assert found.num_speculative_tokens == AUTO.num_speculative_tokens
    [answer] = LLM(str(target), {"method": "auto"}, {"slots": 512}).generate([[1, 2, 3]])
    assert answer.speculation.drafted_tokens > 0


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "mimo"])
def test_an_mtp_layer_without_tensors_is_not_chosen(kind: str, tmp_path: Path) -> None:
    """Its config.json still names the layer."""
    assert has_mtp_layer(str(save_target(tmp_path / "whole", kind, layer_tensors(kind))))
    assert not has_mtp_layer(str(save_target(tmp_path / "less", kind, {})))


def test_the_shipped_target_has_its_draft(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found = complete_config(AUTO, TARGET)
    assert "method auto: draft_model, since pydoc-draft ships for this target" in caplog.text
    assert (found.method, found.model) == ("draft_model", str(family.path(DRAFT)))
    assert complete_config(AUTO, str(family.path(TARGET))) == found


def test_the_users_checkpoint_and_keys_come_first(tmp_path: Path) -> None:
    draft = str(save_checkpoint(tmp_path))
    found = complete_config(AUTO.model_copy(update={"model": draft}), TARGET)
    assert (found.method, found.model, found.beside) == ("draft_model", draft, ("suffix", "ngram"))
    given = SpeculativeConfig(method="auto", num_speculative_tokens=5, draft_placement="worker", tree_width=2)
    found = complete_config(given, "table:64")
    assert (found.num_speculative_tokens, found.draft_placement, found.tree_width) == (5, "worker", 2)


def test_without_a_checkpoint_suffix_decoding_is_chosen(tmp_path: Path) -> None:
    for target in ("table:64", str(save_checkpoint(tmp_path))):
        found = complete_config(AUTO, target)
        assert (found.method, found.beside, found.draft_placement) == ("suffix", ("ngram",), "target")
        assert found.num_speculative_tokens == SUFFIX_DEPTH


def test_a_deployment_chooses_before_anything_starts() -> None:
    planned = plan_deployment(DeploymentOptions(TARGET, AUTO))
    assert planned.speculation.method == "draft_model"
    assert len(planned.drafts) == 1
    assert not plan_deployment(DeploymentOptions("table:64", AUTO)).drafts  # lookup methods draft in the target


def test_a_draft_worker_chooses_what_its_target_chooses() -> None:
    speculator = load_draft(AUTO, EngineConfig(), TARGET)
    assert (speculator.description.method, Path(speculator.description.model).name) == ("draft_model", DRAFT)
    with pytest.raises(StartError, match="the speculator cannot be built: method auto without a `model`"):
        load_draft(AUTO, EngineConfig(), None)


def test_without_a_target_it_is_refused() -> None:
    with pytest.raises(CheckpointError, match="say which one it is"):
        complete_config(AUTO)

"""The method of a checkpoint. Published heads of all kinds name the class of a Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.cli.deployment import DeploymentOptions, plan_deployment
from paceline.config import SpeculativeConfig
from paceline.drafting.auto_method import detect_method, method_of_checkpoint
from paceline.launcher import StartError
from paceline.llm import LLM
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model_names import ModelNotFoundError
from tests.helpers.head_checkpoints import (
    eagle3_tensors,
    eagle_tensors,
    llama_config,
    reduced,
    renamed,
    save_bin,
    save_head,
    save_target,
)

ONE = torch.zeros(1)
PLAIN = {"model.embed_tokens.weight": ONE, "model.layers.0.self_attn.q_proj.weight": ONE, "lm_head.weight": ONE}
MEDUSA = {"0.0.linear.weight": ONE, "0.0.linear.bias": ONE, "0.1.weight": ONE}


def in_the_library(name: str) -> str:
    return name.replace("midlayer.", "layers.0.")


def with_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return renamed(tensors, lambda name: f"model.{name}")


@pytest.mark.parametrize(
    ("tensors", "config", "method"),
    [
        (eagle_tensors(), {}, "eagle"),
        (with_prefix(eagle_tensors(bias=True)), {}, "eagle"),
        (renamed(eagle_tensors(norms=True), lambda name: name.replace("layers.0.", "transformer.")), {}, "eagle"),
        (eagle3_tensors(), {}, "eagle3"),
        (with_prefix(eagle3_tensors()), {}, "eagle3"),
        (renamed(eagle3_tensors(columns=3), in_the_library) | reduced([1, 5, 7]), {}, "eagle3"),
        (eagle3_tensors() | {"mask_hidden": ONE}, {"ptd_token_id": 5}, "peagle"),
        (PLAIN, {}, "draft_model"),
        (PLAIN, {"conv_kernel_size": 4}, "draft_model"),
        (PLAIN, {"pard_token": 31}, "pard"),
        (PLAIN, {"num_nextn_predict_layers": 0}, "draft_model"),
        (PLAIN, {"num_nextn_predict_layers": 1}, "mtp"),
        (PLAIN | {"mtp.fc.weight": torch.zeros(2, 4)}, {}, "mtp"),
        (MEDUSA, {}, "medusa"),
        (PLAIN | renamed(MEDUSA, lambda name: f"medusa_head.{name}"), {}, "medusa"),
        (PLAIN, {"medusa_num_heads": 2}, "medusa"),
        ({"blocks.0.layers.0.weight": ONE, "lm_heads.0.weight": ONE}, {}, "medusa"),
        (PLAIN, {"architectures": ["ArcticMLPSpeculatorPreTrainedModel"]}, "mlp_speculator"),
        (PLAIN, {"model_type": "mlp_speculator"}, "mlp_speculator"),
        (PLAIN, {"method": "sum_lstm"}, "mlp_speculator"),
        (PLAIN, {"dflash_config": {"target_layer_ids": [1]}}, "dflash"),
        (PLAIN, {"markov_rank": 8}, "dspark"),
        (eagle3_tensors(), {"speculators_model_type": "peagle"}, "peagle"),
        (eagle_tensors(), {"speculators_model_type": "eagle"}, "eagle"),
        (PLAIN, {"speculators_model_type": "eagle3"}, "eagle3"),
        (PLAIN, {"dflash_config": {"selector_rank": 8}}, "dflash2"),
        (PLAIN | {"markov_head.markov_w1.weight": ONE}, {"dflash_config": {}}, "dspark"),
        (PLAIN, {"speculators_model_type": "dflash2"}, "dflash2"),
        (PLAIN, {"speculators_model_type": "dspark", "markov_rank": 0}, "dspark"),
        (PLAIN, {"speculators_model_type": "xpress", "xpress_rank": 256}, "xpress"),  # as speculators 0.9 writes it
        (PLAIN, {"speculators_model_type": "mtp"}, "mtp"),
    ],
)
def test_the_method_follows_from_tensors_and_keys(
    tensors: dict[str, Tensor], config: dict[str, Any], method: str, tmp_path: Path
) -> None:
    assert method_of_checkpoint(Checkpoint(save_head(tmp_path, tensors, llama_config() | config))) == method


def test_torchs_own_format(tmp_path: Path) -> None:
    assert method_of_checkpoint(Checkpoint(save_bin(tmp_path, eagle_tensors(), llama_config()))) == "eagle"


def test_a_type_of_a_later_library(tmp_path: Path) -> None:
    save_head(tmp_path, PLAIN, {"speculators_model_type": "eagle9"})
    with pytest.raises(CheckpointError, match="is of type 'eagle9' of the speculators library, which is not known"):
        method_of_checkpoint(Checkpoint(tmp_path))


class TestConfiguration:
    """`model` without `method`."""

    def test_a_model_alone_is_looked_at(self, tmp_path: Path) -> None:
        config = SpeculativeConfig(model=str(save_head(tmp_path, eagle_tensors(), llama_config())), tree_width=2)
        assert config.method == "detect"
        found = detect_method(config)
        assert found == config.model_copy(update={"method": "eagle"})
        assert found.enabled

    def test_a_named_method_is_not_checked(self, tmp_path: Path) -> None:
        save_head(tmp_path, eagle_tensors(), llama_config())
        for method in ("none", "draft_model", "eagle3"):
            config = SpeculativeConfig(method=method, model=str(tmp_path))  # type: ignore[arg-type]
            assert detect_method(config) is config

    @pytest.mark.parametrize("name", ["table:64", "pydoc-draft"])
    def test_models_that_ship_with_the_package(self, name: str) -> None:
        assert detect_method(SpeculativeConfig(model=name)).method == "draft_model"

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFoundError, match="no model at"):
            detect_method(SpeculativeConfig(model=str(tmp_path)))


def test_deployment_and_library_use_the_detected_method(tmp_path: Path) -> None:
    head, target = (
        save_head(tmp_path / "head", eagle3_tensors(), llama_config()),
        str(save_target(tmp_path / "target")),
    )
    options = DeploymentOptions(model=target, speculation=SpeculativeConfig(model=str(head)))
    planned = plan_deployment(options)
    assert planned.speculation.method == "eagle3"
    assert all('"method":"eagle3"' in " ".join(p.argv) for p in planned.programs("redis://")[1])
    [answer] = LLM(target, {"model": str(head), "row_budget": False}, {"slots": 1024}).generate([[1, 2, 3]])
    assert answer.speculation.drafted_tokens > 0
    (head / "model.safetensors").write_bytes(b"short")
    with pytest.raises(StartError, match=r"model.safetensors cannot be read \(.*\): download it again"):
        plan_deployment(options)

"""From a target's options to vLLM's arguments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.deployment import DeploymentOptions, plan_deployment
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.config.vllm_options import VllmOptions
from paceline.launcher import StartError
from paceline.vllm.engine_arguments import OURS, engine_arguments
from paceline.vllm.remote_drafts_settings import RemoteDraftsSettings
from paceline_services.target.vllm_process import cpu_binding, visible_device

PLAIN = SpeculativeConfig()
POOL = SpeculativeConfig(
    method="pool", beside=("suffix",), num_speculative_tokens=7, suffix_decoding_max_spec_factor=2.0
)


def arguments(
    engine: EngineConfig | None = None,
    speculation: SpeculativeConfig = PLAIN,
    tls: Any = None,
    redis_url: str | None = "redis://host:1",
    **given: Any,
) -> dict[str, Any]:
    options = VllmOptions(engine_args=given)
    return engine_arguments("MODEL", engine or EngineConfig(), speculation, options, redis_url, tls)


def test_what_is_not_asked_for_is_left_to_vllm() -> None:
    assert arguments() == {"model": "MODEL", "structured_outputs_config": {"backend": "guidance"}, **OURS}


def test_settings_with_the_same_meaning_are_passed_on() -> None:
    engine = EngineConfig(dtype="float32", max_num_batched_rows=512, tensor_parallel_size=2, threads=3)
    asked = arguments(engine, quantization="fp8")
    assert {key: asked[key] for key in ("dtype", "max_num_batched_tokens", "tensor_parallel_size", "quantization")} == {
        "dtype": "float32",
        "max_num_batched_tokens": 512,
        "tensor_parallel_size": 2,
        "quantization": "fp8",
    }
    assert arguments(engine, dtype="bfloat16")["dtype"] == "bfloat16"


def test_drafts_come_from_the_pool() -> None:
    asked = arguments(speculation=POOL, tls=("cert", "key", "ca"))
    assert asked["speculative_config"]["num_speculative_tokens"] == 7
    files = {"tls_cert": "cert", "tls_key": "key", "tls_ca": "ca"}
    settings = asked["additional_config"]["paceline"]
    assert settings.items() >= {"redis_url": "redis://host:1", "lookups": ("suffix",), **files}.items()
    read = RemoteDraftsSettings.read(asked["additional_config"])
    assert read.lookup_settings["suffix_decoding_max_spec_factor"] == 2.0


@pytest.mark.parametrize("row_budget", [True, False])
def test_drafts_have_the_row_budget_of_the_configuration(row_budget: bool) -> None:
    asked = arguments(speculation=SpeculativeConfig(method="pool", row_budget=row_budget))
    assert RemoteDraftsSettings.read(asked["additional_config"]).row_budget is row_budget


def test_a_head_reads_the_layers_that_are_named() -> None:
    options = VllmOptions(hidden_state_layers=(2, 13, 23))
    head = SpeculativeConfig(method="eagle3", model="head")
    asked = engine_arguments("MODEL", EngineConfig(), head, options, "redis://host:1", None)
    assert RemoteDraftsSettings.read(asked["additional_config"]).hidden_state_layers == (2, 13, 23)


def test_other_additional_settings_stay() -> None:
    asked = arguments(speculation=POOL, additional_config={"other": 1})["additional_config"]
    assert asked.keys() == {"paceline", "other"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"engine": EngineConfig(slots=512)}, "slots in --engine-config means nothing to vLLM"),
        ({"engine": EngineConfig(cpus=(0, 1), tensor_parallel_size=2)}, "cpus in --engine-config is for one rank"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size belongs into --engine-config"),
        ({"worker_cls": "mine"}, "worker_cls is paceline.vllm"),
        ({"async_scheduling": True}, "async_scheduling is False"),
        (
            {"speculation": SpeculativeConfig(method="eagle3", model="head")},
            "eagle3 needs hidden states: name its hidden_state_layers",
        ),
        ({"speculation": SpeculativeConfig(method="pool", rejection_sampling_strategy="residual")}, "not by residual"),
        ({"speculation": SpeculativeConfig(method="pool", synthetic_acceptance_rate=0.5)}, "not by synthetic"),
        ({"speculation": SpeculativeConfig(method="pool", draft_schedule="lockstep")}, "draft_schedule in --spec"),
        ({"speculation": SpeculativeConfig(method="pool"), "redis_url": None}, "no draft workers: give --redis-url"),
        ({"speculation": SpeculativeConfig(method="ngram", draft_placement="target")}, "--vllm-options"),
    ],
    ids=lambda value: value.split(" ")[0] + str(len(value)) if isinstance(value, str) else "",
)
def test_what_vllm_cannot_do_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        arguments(**given)


def test_the_python_of_vllm_is_a_program(tmp_path: Path) -> None:
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert VllmOptions(python=str(link)).python == str(link)  # the environment is where the link is
    for wrong in (tmp_path / "none", tmp_path):
        with pytest.raises(ValueError, match="is not a program"):
            VllmOptions(python=str(wrong))


def test_vllm_starts_its_ranks_itself() -> None:
    options = DeploymentOptions("pydoc", engine=EngineConfig(tensor_parallel_size=2), vllm=VllmOptions())
    _, targets, _ = plan_deployment(options).programs("redis://host:1")
    [target] = targets
    assert target.argv[target.argv.index("--engine") + 1] == "vllm"
    engine = EngineConfig.model_validate_json(target.argv[target.argv.index("--engine-config") + 1])
    assert engine.tensor_parallel_size == 2
    assert engine.rendezvous is None
    assert engine.cpus is None, "vLLM binds its threads itself"


def test_devices_and_cores_as_vllm_takes_them() -> None:
    assert (cpu_binding((0, 2)), cpu_binding(())) == ("0,2", "nobind")
    assert (visible_device(1, None), visible_device(1, "5,7")) == ("1", "7")
    with pytest.raises(StartError, match="cuda:2"):
        visible_device(2, "5,7")

"""From a target's options to vLLM's arguments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.deployment import DeploymentOptions, plan_deployment
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.config.vllm_options import VllmOptions
from paceline.vllm.engine_arguments import OURS, engine_arguments

PLAIN = SpeculativeConfig()
POOL = SpeculativeConfig(method="pool", beside=("suffix",), num_speculative_tokens=7)


def arguments(
    engine: EngineConfig | None = None, speculation: SpeculativeConfig = PLAIN, tls: Any = None, **given: Any
) -> dict[str, Any]:
    options = VllmOptions(engine_args=given)
    return engine_arguments("MODEL", engine or EngineConfig(), speculation, options, "redis://host:1", tls)


def test_what_is_not_asked_for_is_left_to_vllm() -> None:
    assert arguments() == {"model": "MODEL", "structured_outputs_config": {"backend": "guidance"}, **OURS}


def test_settings_with_the_same_meaning_are_passed_on() -> None:
    engine = EngineConfig(dtype="float32", max_num_batched_rows=512, tensor_parallel_size=2, threads=3, cpus=(1, 2))
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
    settings = {"redis_url": "redis://host:1", "lookups": ("suffix",), **files}
    assert asked["additional_config"] == {"paceline": settings}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"engine": EngineConfig(slots=512)}, "slots in --engine-config means nothing to vLLM"),
        ({"worker_cls": "mine"}, "worker_cls is paceline.vllm"),
        ({"async_scheduling": True}, "async_scheduling is False"),
        ({"speculation": SpeculativeConfig(method="eagle3", model="head")}, "eagle3 needs hidden states"),
        ({"speculation": SpeculativeConfig(method="pool", rejection_sampling_strategy="residual")}, "not by residual"),
        ({"speculation": SpeculativeConfig(method="ngram", draft_placement="target")}, "--vllm-options"),
    ],
    ids=["slots", "worker", "async", "hidden states", "strategy", "placement"],
)
def test_what_vllm_cannot_do_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        arguments(**given)


def test_the_python_of_vllm_is_a_program(tmp_path: Path) -> None:
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert VllmOptions(python=str(link)).python == str(link)  # the environment is where the link is
    with pytest.raises(ValueError, match="is not a program"):
        VllmOptions(python=str(tmp_path / "none"))


def test_vllm_starts_its_ranks_itself() -> None:
    options = DeploymentOptions("pydoc", engine=EngineConfig(tensor_parallel_size=2), vllm=VllmOptions())
    _, targets, _ = plan_deployment(options).programs("redis://host:1")
    [target] = targets
    assert target.argv[target.argv.index("--engine") + 1] == "vllm"
    engine = EngineConfig.model_validate_json(target.argv[target.argv.index("--engine-config") + 1])
    assert engine.tensor_parallel_size == 2
    assert engine.rendezvous is None

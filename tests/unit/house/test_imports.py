"""What a process imports before it loads a model: importing takes seconds, and a start waits for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"grpc", "httpx", "ray", "redis", "torch", "torch._dynamo", "transformers", "triton", "vllm"}
MODEL_PROCESS = {"torch"}


@pytest.mark.parametrize(
    ("module", "needed"),
    [
        ("paceline.model", MODEL_PROCESS),
        ("paceline.model.loading", MODEL_PROCESS),
        ("paceline.llm", MODEL_PROCESS),
        ("paceline_services.target.engine_process", MODEL_PROCESS),
        ("paceline_services.draft.speculator_process", MODEL_PROCESS),
        ("paceline.drafting.methods.draft_model", MODEL_PROCESS),
        ("paceline.drafting.methods.eagle3", MODEL_PROCESS),
        ("paceline.gguf.gguf_file", set()),
    ],
)
def test_a_module_imports_no_more_than_it_needs(module: str, needed: set[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert HEAVY & set(output.split()) == needed

"""What our engine around vLLM asks vLLM for."""

from __future__ import annotations

import subprocess

import pytest

from tests.vllm.engines import PYTHON

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SUBMIT = """
from unittest.mock import MagicMock

from paceline.config import SamplingParams
from paceline.core.messages import GenerationRequest
from paceline.vllm.extra_arguments import ExtraArguments
from paceline.vllm.vllm_engine import VllmEngine

engine = MagicMock()
config = engine.vllm_config
config.model_config.get_vocab_size.return_value = config.model_config.max_model_len = 64
config.cache_config.num_gpu_blocks, config.cache_config.block_size = 8, 16
engine.get_tokenizer.return_value.eos_token_id = 0
VllmEngine(engine).submit(GenerationRequest("r", [1, 2], SamplingParams(), cache_salt="one"))
_, prompt, params = engine.add_request.call_args.args
print(prompt["cache_salt"], ExtraArguments.read(params.extra_args).cache_salt)
"""


def test_the_cache_and_the_drafts_get_a_request_s_salt() -> None:
    asked = subprocess.run([PYTHON, "-c", SUBMIT], capture_output=True, text=True, check=True)
    assert asked.stdout.split()[-2:] == ["one", "one"]

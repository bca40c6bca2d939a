"""What our engine around vLLM asks vLLM for."""

from __future__ import annotations

import subprocess

import pytest

from tests.vllm.engines import PYTHON

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ENGINE = """
from unittest.mock import MagicMock

from paceline.config import SamplingParams
from paceline.messages import GRAMMAR_ERROR, GenerationRequest
from paceline.vllm.extra_arguments import ExtraArguments
from paceline.vllm.vllm_engine import VllmEngine

engine = MagicMock()
config = engine.vllm_config
config.model_config.get_vocab_size.return_value = config.model_config.max_model_len = 64
config.cache_config.num_gpu_blocks, config.cache_config.block_size = 8, 16
engine.get_tokenizer.return_value.eos_token_id = 0
engine.has_unfinished_requests.return_value = False
target = VllmEngine(engine)
target._scheduler.take_scheduled.return_value = {}, {}
target._scheduler.get_request_counts.return_value = 0, 0
target._scheduler.kv_cache_manager.usage = 0.0
"""
SUBMIT = """
target.submit(GenerationRequest("r", [1, 2], SamplingParams(), cache_salt="one"))
_, prompt, params = engine.add_request.call_args.args
print(prompt["cache_salt"], ExtraArguments.read(params.extra_args).cache_salt)
"""
REPLAY = """
for grammar in ("", "start: /a*/"):
    target.submit(GenerationRequest("r", [1] * 60, SamplingParams(max_tokens=9, grammar=grammar), committed=[1] * 4))
    [delta] = target.step()
    print(delta.error.removeprefix(GRAMMAR_ERROR))
"""


def printed(program: str) -> list[str]:
    asked = subprocess.run([PYTHON, "-c", ENGINE + program], capture_output=True, text=True, check=True)
    return asked.stdout.splitlines()


def test_the_cache_and_the_drafts_get_a_request_s_salt() -> None:
    assert printed(SUBMIT)[-1] == "one one"


def test_a_replay_without_room_is_refused_as_that() -> None:
    error = "the prompt has 60 tokens, and 4 were committed after it; there is room for 1 to 63"
    assert printed(REPLAY)[-2:] == [error, error]

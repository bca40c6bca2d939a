"""The same tokens with heads that draft from one hidden state, inside the target; and that their guesses are good.

The target is one whose next token depends on the last alone, so that heads can be built that know what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.core.messages import Delta, GenerationRequest
from paceline.core.policy.step_cost import RowCost
from paceline.drafting.heads.medusa_heads import load_medusa
from paceline.drafting.heads.mlp_network import load_mlp_speculator
from paceline.drafting.methods.medusa import MedusaSpeculator
from paceline.drafting.methods.mlp_speculator import MlpSpeculator
from paceline.drafting.speculator import Speculator
from paceline.engine.draft_client import LocalDraftClient, NoDraftClient
from paceline.engine.engine import Engine
from paceline.llm import LLM, Completion
from paceline.model.checkpoint import Checkpoint
from tests.helpers.llamas import LAWS
from tests.helpers.markov import markov_model, save_markov, save_seeing

FREE = RowCost([8, 256], [1.0, 1.001])
METHODS = ["medusa", "mlp_speculator"]


def speculator(method: str, folder: Path, dtype: torch.dtype) -> Speculator:
    target = markov_model(dtype).target_weights()
    if method == "medusa":
        return MedusaSpeculator(load_medusa(Checkpoint(folder), target), target, 3)
    return MlpSpeculator(load_mlp_speculator(Checkpoint(folder), target), target, 3)


def submissions() -> list[GenerationRequest]:
    """All sampling rules; prompts of one token, across a tile's border, and longer than a step."""
    lengths = (1, 2, 63, 64, 65, 300, 7, 7)
    prompts = [[(i + 5 * j) % 60 for j in range(n)] for i, n in enumerate(lengths)]
    return [
        GenerationRequest(f"r{i}", prompt, params) for i, (prompt, params) in enumerate(zip(prompts, LAWS, strict=True))
    ]


def served(
    dtype: torch.dtype, guessing: Speculator | None, requests: Sequence[GenerationRequest], slots: int = 2048
) -> tuple[dict[str, Delta], int, int]:
    """The outputs, the number of accepted draft tokens, and the number of preemptions."""
    config = EngineConfig(slots=slots, max_num_batched_rows=64)
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=4, max_tree_nodes=16)
    drafting = LocalDraftClient(guessing) if guessing else NoDraftClient()
    engine = Engine(markov_model(dtype, slots), config, speculation, drafting, FREE)
    answers = {request.request_id: Delta(request.request_id) for request in requests}
    accepted = preemptions = 0
    for request in requests:
        engine.submit(request)
    while engine.busy:
        for delta in engine.step():
            answers[delta.request_id].tokens += delta.tokens
            answers[delta.request_id].log_probs += delta.log_probs
            answers[delta.request_id].finish_reason = delta.finish_reason
        accepted += engine.last_step.speculation.accepted_tokens
        preemptions += engine.last_step.preemptions
        engine.check_integrity()
    return answers, accepted, preemptions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_equal_those_of_plain_decoding(tmp_path: Path, method: str, dtype: torch.dtype) -> None:
    plain, _, _ = served(dtype, None, submissions())
    guessing = speculator(method, save_seeing(method, tmp_path, 0.0), dtype)
    guessed, accepted, _ = served(dtype, guessing, submissions())
    assert guessed == plain
    assert accepted > 50


@pytest.mark.parametrize("method", METHODS)
def test_preempted_requests_give_the_same_tokens(tmp_path: Path, method: str) -> None:
    requests = submissions()
    plain, _, _ = served(torch.float32, None, requests)
    guessing = speculator(method, save_seeing(method, tmp_path, 0.0), torch.float32)
    guessed, accepted, preemptions = served(torch.float32, guessing, requests, slots=380)
    assert guessed == plain
    assert preemptions > 0
    assert accepted > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", METHODS)
def test_configured_by_method_name(tmp_path: Path, method: str, temperature: float) -> None:
    head = save_seeing(method, tmp_path / "head", temperature)
    # Whether drafting pays on a model this small is the machine's to say: without the budget it is not asked.
    speculation = {"method": method, "model": str(head), "num_speculative_tokens": 3, "row_budget": False}
    llm = LLM(str(save_markov(tmp_path / "target")), speculation, {"slots": 512})
    sampling = SamplingParams(temperature=temperature, seed=4, max_tokens=60)
    prompts = [[11], [3, 1, 4], [5] * 70]

    def answers(*, speculative: bool) -> list[Completion]:
        return llm.generate(prompts, sampling, speculative=speculative)

    guessed = answers(speculative=True)
    assert [each.tokens for each in guessed] == [each.tokens for each in answers(speculative=False)]
    accepted = sum(each.speculation.accepted_tokens for each in guessed)
    steps = sum(each.speculation.steps for each in guessed)
    assert accepted > (1.5 if temperature == 0 else 0.5) * steps, "heads that know the target are not one position off"

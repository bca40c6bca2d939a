"""The same tokens with a head in the target's process as without one; and that heads which know the target are right.

Markov targets' next token depends on the last alone, so that a Medusa head or an MLP speculator can know what it says.
Of a multi-token-prediction layer an oracle passes on one of its two inputs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.drafting import Speculator, build_speculator
from paceline.drafting.speculator import Context, Opening
from paceline.engine.draft_client import LocalDraftClient, NoDraftClient
from paceline.engine.engine import Engine
from paceline.llm import LLM
from paceline.messages import GenerationRequest
from paceline.model import Model, load
from paceline.model.rows import SlotTable
from tests.helpers.engine_runs import EngineRun
from tests.helpers.llamas import LAWS
from tests.helpers.markov import markov_model, save_markov, save_seeing
from tests.helpers.mtp_checkpoints import VOCABULARY, oracle_tensors, save_speculators, save_target
from tests.helpers.targets import FREE

FAMILIES = ("deepseek_v3", "glm4_moe", "mimo")
STATELESS = ("medusa", "mlp_speculator")
TOKEN, HIDDEN = 0, 1
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
DRAWN = SamplingParams(temperature=0.8, seed=3, max_tokens=40)


def mtp_target(folder: Path, family: str, sees: int, dtype: str = "float32") -> Model:
    """With an oracle that passes on its token's embedding or its hidden state: the first half of MiMo's input."""
    half = 1 - sees if family == "mimo" else sees
    save_target(folder, family, oracle_tensors(family, half=half))
    return load(str(folder), EngineConfig(slots=2048, dtype=dtype))  # type: ignore[arg-type]


def head(method: str, folder: Path, target: Model, width: int = 3) -> Speculator:
    config = SpeculativeConfig(
        method=method,  # type: ignore[arg-type]
        model=str(folder),
        num_speculative_tokens=4,
        tree_width=width,
        least_path_probability=0.0,
    )
    return build_speculator(config, EngineConfig(slots=2048), target.target_weights)


def drawn(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=count)


def mtp_requests() -> list[GenerationRequest]:
    params = [GREEDY, DRAWN]
    return [GenerationRequest(f"r{i}", drawn(n, n), params[i % 2]) for i, n in enumerate((1, 3, 40, 64, 65, 130))]


def all_laws() -> list[GenerationRequest]:
    """All sampling rules; prompts of one token, across a tile's border, and longer than a step."""
    lengths = (1, 2, 63, 64, 65, 300, 7, 7)
    prompts = [[(i + 5 * j) % 60 for j in range(n)] for i, n in enumerate(lengths)]
    return [GenerationRequest(f"r{i}", *each) for i, each in enumerate(zip(prompts, LAWS, strict=True))]


def serve(
    model: Model, speculator: Speculator | None, requests: Sequence[GenerationRequest], **settings: int
) -> EngineRun:
    config = EngineConfig(**{"slots": 2048, "max_num_batched_rows": 64, **settings})
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=4, max_tree_nodes=16)
    drafting = LocalDraftClient(speculator) if speculator else NoDraftClient()
    return EngineRun().run(Engine(model, config, speculation, drafting, FREE), *requests)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_targets_own_layer_changes_no_token(family: str, dtype: str, tmp_path: Path) -> None:
    """Greedy and drawn, with a layer that drafts well: it looks up the last token, as its target nearly does."""
    model = mtp_target(tmp_path, family, TOKEN, dtype)
    plain = serve(model, None, mtp_requests())
    guessed = serve(model, head("mtp", tmp_path, model, 2), mtp_requests(), max_num_batched_rows=256)
    assert guessed.outputs == plain.outputs
    assert guessed.accepted > 80, "of 240 tokens"
    chain = serve(model, head("mtp", tmp_path, model, 1), mtp_requests(), max_num_batched_rows=16)
    assert chain.outputs == plain.outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("method", STATELESS)
def test_a_head_without_a_cache_changes_no_token(tmp_path: Path, method: str, dtype: torch.dtype) -> None:
    model = markov_model(dtype)
    folder = save_seeing(method, tmp_path, 0.0)
    plain = serve(model, None, all_laws())
    guessed = serve(model, head(method, folder, model), all_laws())
    assert guessed.outputs == plain.outputs
    assert guessed.accepted > 50
    if dtype is torch.float32:
        small = markov_model(dtype, 380)
        preempted = serve(small, head(method, folder, small), all_laws(), slots=380)
        assert preempted.outputs == plain.outputs
        assert preempted.preemptions > 0
        assert preempted.accepted > 0


ALWAYS: dict[str, Any] = {"num_speculative_tokens": 3, "draft_schedule": "lockstep", "row_budget": False}
"""Draft at every step and verify every draft token, on machines of any speed."""


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", [*STATELESS, "deepseek_mtp", "mtp"])
def test_the_library_drafts_with_a_head_by_its_methods_name(tmp_path: Path, method: str, temperature: float) -> None:
    """An MTP layer is found in the target's checkpoint, or is one of the speculators library for a Qwen3 target."""
    target, settings = tmp_path / "target", {"method": method, **ALWAYS}
    if method == "deepseek_mtp":
        save_target(target, "deepseek_v3", oracle_tensors("deepseek_v3", half=TOKEN))
    elif method == "mtp":
        save_target(target, "qwen3", {})
        settings["model"] = str(save_speculators(tmp_path / "own", oracle_tensors("qwen3", half=TOKEN)))
    else:
        save_markov(target)
        settings["model"] = str(save_seeing(method, tmp_path / "head", temperature))
    llm = LLM(str(target), settings, {"slots": 512})
    sampling = SamplingParams(temperature=temperature, seed=4, max_tokens=60)
    prompts = [[11], [3, 1, 4], drawn(70, 1) if "mtp" in method else [5] * 70]
    guessed = llm.generate(prompts, sampling)
    plain = llm.generate(prompts, sampling, speculative=False)
    assert [each.tokens for each in guessed] == [each.tokens for each in plain]
    accepted = sum(each.speculation.accepted_tokens for each in guessed)
    steps = sum(each.speculation.steps for each in guessed)
    if "mtp" in method:
        assert accepted > 15
    else:
        assert accepted > (1.5 if temperature == 0 else 0.5) * steps, "heads that know the target"


@pytest.mark.parametrize("sees", [HIDDEN, TOKEN], ids=["the state", "the token"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_row_of_a_position_has_its_state_and_the_next_token(family: str, sees: int, tmp_path: Path) -> None:
    """A layer that passes its state on predicts what the target did: the state is the one after the final norm.

    A layer that looks up its token looks up the root, and then each draft token.
    """
    model = mtp_target(tmp_path, family, sees)
    weights, tokens, table = model.target_weights(), drawn(40, 5), SlotTable()
    table.slots = list(range(1, 41))
    rows = [table.row(token, i) for i, token in enumerate(tokens)]
    output = model.run(rows, range(40), (weights.final_layer,))
    assert output.hidden is not None
    speculator = head("mtp", tmp_path, model, 1)
    for length in (7, 23, 40):
        expected, token = [int(output.logits[length - 2].argmax())] * 3, tokens[length - 1]
        for depth in range(3 if sees == TOKEN else 0):
            embedded = weights.embedding()[[token]]
            token = int(weights.output(embedded * embedded.square().mean(-1, keepdim=True).rsqrt()).argmax())
            expected[depth] = token
        assert first_guesses(speculator, tokens[:length], output.hidden) == expected


def first_guesses(speculator: Speculator, tokens: Sequence[int], states: Tensor) -> list[int]:
    """A chain of three, from all states but the root's."""
    speculator.open(Opening(1, tokens, 0, GREEDY, max_depth=3, max_nodes=3))
    speculator.context(Context(1, 0, states[: len(tokens) - 1]))
    guesses: list[int] = []
    while len(guesses) < 3:
        guesses += [token for growth in speculator.grow().values() for token in growth.tokens]
    return guesses

"""Drafting with a target's own multi-token-prediction layer changes no token, and reads the right states."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.core.messages import Delta, GenerationRequest
from paceline.core.policy.step_cost import RowCost
from paceline.drafting.heads.head_network import HeadNetwork
from paceline.drafting.heads.head_speculator import HeadSpeculator
from paceline.drafting.methods.mtp import load_mtp
from paceline.drafting.speculator import Context, Opening
from paceline.engine.draft_client import DraftClient, LocalDraftClient, NoDraftClient
from paceline.engine.engine import Engine
from paceline.llm import LLM
from paceline.model import load
from paceline.model.checkpoint import Checkpoint
from paceline.model.model import TransformersModel
from paceline.model.rows import SlotTable
from tests.helpers.mtp_checkpoints import VOCABULARY, layer_tensors, oracle_tensors, save_speculators, save_target

FAMILIES = ["deepseek_v3", "glm4_moe", "mimo"]
FREE = RowCost([8, 256], [1.0, 1.001])
TOKEN, HIDDEN = 0, 1
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
DRAWN = SamplingParams(temperature=0.8, seed=3, max_tokens=40)


def half(family: str, sees: int) -> int:
    """The half of the projection's input with what an oracle reads: MiMo's has the hidden state first."""
    return 1 - sees if family == "mimo" else sees


def target(folder: Path, family: str, tensors: Mapping[str, Tensor], dtype: str = "float32") -> TransformersModel:
    model = load(str(save_target(folder, family, tensors)), EngineConfig(slots=1024, dtype=dtype))  # type: ignore[arg-type]
    assert isinstance(model, TransformersModel)
    return model


def layer_of(model: TransformersModel) -> HeadNetwork:
    weights = model.target_weights()
    return load_mtp(Checkpoint(weights.folder), weights, slots=1024)


def head(model: TransformersModel, width: int = 2) -> HeadSpeculator:
    weights = model.target_weights()
    return HeadSpeculator(
        "mtp", layer_of(model), weights.fingerprint, weights.vocabulary_size, width, least_path_probability=0.0
    )


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=count)


def submissions() -> list[GenerationRequest]:
    params = [GREEDY, DRAWN]
    return [GenerationRequest(f"r{i}", tokens(n, n), params[i % 2]) for i, n in enumerate((1, 3, 40, 64, 65, 130))]


def serve(model: TransformersModel, drafting: DraftClient, **settings: int) -> dict[str, Delta]:
    """The whole outputs by request."""
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=4, max_tree_nodes=16)
    engine = Engine(model, EngineConfig(slots=1024, **settings), speculation, drafting, FREE)
    outputs = {}
    for submission in submissions():
        outputs[submission.request_id] = Delta(submission.request_id)
        engine.submit(submission)
    while engine.busy:
        for delta in engine.step():
            outputs[delta.request_id].tokens += delta.tokens
            outputs[delta.request_id].speculation = delta.speculation
        engine.check_integrity()
    return outputs


def texts(outputs: Mapping[str, Delta]) -> dict[str, Sequence[int]]:
    return {key: output.tokens for key, output in outputs.items()}


def accepted(outputs: Mapping[str, Delta]) -> int:
    return sum(sum(output.speculation.accepted_by_depth) for output in outputs.values() if output.speculation)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_targets_own_layer_changes_no_token(family: str, dtype: str, tmp_path: Path) -> None:
    """Greedy and drawn, with a layer that drafts well: it looks up the last token, as its target nearly does."""
    model = target(tmp_path, family, oracle_tensors(family, half=half(family, TOKEN)), dtype)
    plain = serve(model, NoDraftClient())
    drafted = serve(model, LocalDraftClient(head(model)))
    assert texts(drafted) == texts(plain)
    assert accepted(drafted) > 80, "of 240 tokens"
    assert texts(serve(model, LocalDraftClient(head(model, width=1)), max_num_batched_rows=16)) == texts(plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_layer_changes_no_token(family: str, tmp_path: Path) -> None:
    model = target(tmp_path, family, layer_tensors(family))
    assert texts(serve(model, LocalDraftClient(head(model)))) == texts(serve(model, NoDraftClient()))


ALWAYS = {"draft_schedule": "lockstep", "row_budget": False}
"""Draft at every step and verify every draft token, on machines of any speed."""


def test_the_library_finds_the_layer_in_the_targets_checkpoint(tmp_path: Path) -> None:
    folder = save_target(tmp_path, "deepseek_v3", oracle_tensors("deepseek_v3", half=TOKEN))
    llm = LLM(str(folder), {"method": "deepseek_mtp", "num_speculative_tokens": 3, **ALWAYS}, {"slots": 512})
    for params in (GREEDY, DRAWN):
        [drafted] = llm.generate([tokens(70, 1)], params)
        [plain] = llm.generate([tokens(70, 1)], params, speculative=False)
        assert drafted.tokens == plain.tokens
        assert sum(drafted.speculation.accepted_by_depth) > 5


def test_a_layer_of_the_speculators_library_drafts_for_a_qwen3_target(tmp_path: Path) -> None:
    folder = save_target(tmp_path / "target", "qwen3", {})
    own = save_speculators(tmp_path / "own", oracle_tensors("qwen3", half=TOKEN))
    llm = LLM(str(folder), {"method": "mtp", "model": str(own), **ALWAYS}, {"slots": 512})
    [drafted] = llm.generate([tokens(70, 1)], DRAWN)
    [plain] = llm.generate([tokens(70, 1)], DRAWN, speculative=False)
    assert drafted.tokens == plain.tokens
    assert sum(drafted.speculation.accepted_by_depth) > 5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_that_passes_on_its_state_predicts_what_the_target_did(family: str, tmp_path: Path) -> None:
    """So row i reads the state of position i, after the final norm."""
    model = target(tmp_path, family, oracle_tensors(family, half=half(family, HIDDEN)))
    network, sequence, table = layer_of(model), tokens(40, 5), SlotTable()
    table.slots = list(range(1, 41))
    rows = [table.row(token, i) for i, token in enumerate(sequence)]
    predicted = model.run(rows, range(40), network.hidden_state_layers)
    assert predicted.hidden is not None
    output = network.run(rows, network.encode(predicted.hidden), range(40))
    assert (output.logits - predicted.logits).abs().max() < 1e-3 * predicted.logits.abs().max()
    drafted = first_guesses(head(model, width=1), sequence, predicted.hidden)
    assert drafted == predicted.logits[38:39].argmax(-1).tolist() * 3, "each draft token passes on its feature"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_that_looks_up_its_token_looks_up_the_next_one(family: str, tmp_path: Path) -> None:
    """So row i reads the token of position i + 1: the first prediction follows from the root, and so on."""
    model = target(tmp_path, family, oracle_tensors(family, half=half(family, TOKEN)))
    weights, sequence, table = model.target_weights(), tokens(40, 5), SlotTable()
    table.slots = list(range(1, 41))
    rows = [table.row(token, i) for i, token in enumerate(sequence)]
    predicted = model.run(rows, [], (weights.final_layer,))
    assert predicted.hidden is not None
    expected, token = [], sequence[-1]
    for _ in range(3):
        embedded = weights.embedding()[[token]]
        token = int(weights.output(embedded * embedded.square().mean(-1, keepdim=True).rsqrt()).argmax())
        expected.append(token)
    assert first_guesses(head(model, width=1), sequence, predicted.hidden) == expected


def first_guesses(drafter: HeadSpeculator, sequence: Sequence[int], states: Tensor) -> list[int]:
    """A chain of three, from all states but the root's."""
    drafter.open(Opening(1, sequence, 0, GREEDY, max_depth=3, max_nodes=3))
    drafter.context(Context(1, 0, states[: len(sequence) - 1]))
    guesses: list[int] = []
    while len(guesses) < 3:
        guesses += [token for growth in drafter.grow().values() for token in growth.tokens]
    return guesses

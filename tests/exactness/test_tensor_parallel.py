"""A model shared by two, three and four ranks: a row depends on its own path alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.drafting import build_speculator
from paceline.engine.draft_client import LocalDraftClient, NoDraftClient
from paceline.engine.drafted_request import OWN_DRAFT_SOURCE
from paceline.model.model_loader import load
from paceline.model.parallel.sharding import tp_plan_for
from paceline.model.rows import TILE, SlotTable
from paceline.model.target_weights import TargetWeights
from tests.exactness.test_engine import accepted, drafting, engine, generation_requests, llama, same
from tests.exactness.test_rows import (
    VOCABULARY,
    assert_same,
    chunks,
    lockstep,
    network,
    one_by_one,
    random_trees,
    tokens,
)
from tests.helpers.checkpoints import save_checkpoint, save_tokenizer
from tests.helpers.engine_runs import run
from tests.helpers.ranks import RankProcesses

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPES: dict[int, dict[str, int]] = {
    2: {},
    3: {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3},  # does not divide the vocabulary
    4: {"num_key_value_heads": 4},
}
"""By number of ranks, changes to the sizes of `test_rows`."""
LAYERED = ["gemma2", "phi3", "olmo2", "qwen3_moe", "deepseek_v3"]
"""One architecture for each kind of plan that transformers has, apart from Llama's."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with RankProcesses() as processes:
        yield processes


def saved(folder: Path, family: str, dtype: str = "float32", **changes: int) -> Path:
    network(family, DTYPES[dtype], **changes).save_pretrained(folder)
    save_tokenizer(folder, range(VOCABULARY))
    return folder


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (3, "float32"),
        (2, "bfloat16"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, "float32"), (3, "bfloat16"))),
        *(pytest.param(4, dtype, marks=pytest.mark.slow) for dtype in DTYPES),
    ],
)
def test_rows_of_a_shared_model_do_not_depend_on_other_rows(
    ranks: RankProcesses, size: int, dtype: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path, "llama", dtype, **SHAPES[size])
    sequence = tokens(2 * TILE + 9)
    with ranks.load(folder, size, dtype) as model:
        assert model.rows_invariant
        alone = one_by_one(model, sequence)
        assert_same(random_trees(model, sequence), alone)
        assert_same(chunks(model, sequence, 61), alone)
        others = lockstep(model, [sequence[:n] for n in (20, TILE + 1, 40, 7, 33)])
        for logits in others:
            assert_same(logits, alone[: len(logits)])
    unshared = load(str(folder), EngineConfig(slots=2048))
    assert model.numerics == f"{unshared.numerics}; {size} ranks"
    whole = torch.stack(one_by_one(unshared, sequence)).float()
    tolerance = 2e-4 if dtype == "float32" else 0.05
    assert (torch.stack(alone).float() - whole).abs().max() < tolerance * whole.abs().max()


@pytest.mark.parametrize(
    "family", [*(pytest.param(name, marks=pytest.mark.slow) for name in LAYERED[:-1]), LAYERED[-1]]
)
def test_every_kind_of_plan_computes_what_the_whole_model_does(
    ranks: RankProcesses, family: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path, family)
    sequence = tokens(TILE + 20)
    with ranks.load(folder, 2) as model:
        assert model.rows_invariant
        parts = torch.stack(one_by_one(model, sequence))
    whole = torch.stack(one_by_one(load(str(folder), EngineConfig(slots=1024)), sequence))
    assert (parts - whole).abs().max() < 2e-4 * whole.abs().max()


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_sum_whose_order_depends_on_the_index_is_caught(ranks: RankProcesses, size: int, tmp_path: Path) -> None:
    """With two ranks there is only one order: a + b is b + a."""
    with ranks.load(saved(tmp_path, "llama", **SHAPES[size]), size, sums="by index") as model:
        assert not model.rows_invariant
        sequence = tokens(2 * TILE)
        alone, together = one_by_one(model, sequence), random_trees(model, sequence)
    assert any(not torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_speculation_changes_no_token_of_a_shared_model(ranks: RankProcesses, dtype: str, tmp_path: Path) -> None:
    """Greedy and sampled, under every rule; one at a time and all at once."""
    folder, requests = save_checkpoint(tmp_path), generation_requests()
    with ranks.load(folder, 2, dtype) as model:
        plain = run(engine(model, NoDraftClient()), requests, together=1)
        for method in ("draft_model", "liar"):
            assert same(run(engine(model, drafting(method, DTYPES[dtype], 3)), requests), plain)


def test_a_draft_of_several_processes_drafts_for_a_target_of_one(ranks: RankProcesses, tmp_path: Path) -> None:
    folder, requests = save_checkpoint(tmp_path), generation_requests()
    speculation = SpeculativeConfig(method="draft_model", model=str(folder), draft_tensor_parallel_size=2)
    plain = run(engine(llama(torch.float32), NoDraftClient()), requests, together=1)
    with ranks.ready(2) as rendezvous:
        speculator = build_speculator(speculation, EngineConfig(slots=2048, rendezvous=rendezvous), no_target_weights)
        target = engine(llama(torch.float32), LocalDraftClient(speculator))
        assert same(run(target, requests), plain)
        assert accepted(target, OWN_DRAFT_SOURCE) > 300


def no_target_weights() -> TargetWeights:
    raise AssertionError("a draft model needs no target weights")


def test_target_weights_are_those_of_the_whole_model(ranks: RankProcesses, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    whole = load(str(folder), EngineConfig(slots=256)).target_weights()
    with ranks.load(folder, 2) as model:
        weights = model.target_weights()
        assert torch.equal(weights.embedding(), whole.embedding())
        assert torch.allclose(weights.output(weights.embedding()), whole.output(whole.embedding()))
        assert (weights.layers, weights.vocabulary_size, weights.fingerprint) == (2, 64, whole.fingerprint)


def test_hidden_states_are_whole(ranks: RankProcesses, tmp_path: Path) -> None:
    folder, layers = save_checkpoint(tmp_path), (0, 1, 3)
    sequence = tokens(40)
    rows = [SlotTable().branch_row(token % 64, [*range(1, i + 2)]) for i, token in enumerate(sequence)]
    whole = load(str(folder), EngineConfig(slots=256)).run(rows, [39], layers).hidden
    with ranks.load(folder, 2) as model:
        parts = model.run(rows, [39], layers).hidden
    assert whole is not None
    assert parts is not None
    assert (parts - whole).abs().max() < 1e-4 * whole.abs().max()


@pytest.mark.parametrize(
    ("family", "size", "why"),
    [
        ("llama", 3, "2 key-value heads cannot be shared by 3 ranks: choose a tensor_parallel_size that divides 2"),
        ("gpt2", 2, "no tensor-parallel plan for gpt2"),
    ],
)
def test_what_cannot_be_shared_is_refused_in_one_sentence(family: str, size: int, why: str) -> None:
    config = AutoConfig.for_model(family) if family == "gpt2" else network(family, torch.float32).config
    with pytest.raises(ValueError, match=why):
        tp_plan_for(config, size)

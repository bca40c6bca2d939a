"""A row's logits depend on its own path alone, bit for bit: the basis of exactness."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from paceline.config import EngineConfig
from paceline.model.attention import SPARE_SLOTS, Heads, KVCache, TorchPass, attention_interface, use_pass
from paceline.model.loading import build
from paceline.model.model import TransformersModel
from paceline.model.native.native_library import NativeLibrary
from paceline.model.network_factory import make_attention
from paceline.model.row_probe import is_row_invariant
from paceline.model.rows import GROUP, TILE, Row, SlotTable
from tests.helpers.gpu_kernels import use_stand_ins
from tests.helpers.row_runs import assert_same, chunks, lockstep, one_by_one, random_trees

VOCABULARY = 256
LONGEST = 3 * TILE + 11
"""Length of the reference sequence."""
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "head_dim": 16,
}
FAMILIES = {
    "llama": {},
    "llama-tied-rope3": {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4,
        "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}},
    "mistral": {"sliding_window": 96},
    "mistral-narrow": {"sliding_window": 24},  # a window within the last tile
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 96, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 1},
    "gemma3_text": {"sliding_window": 96},
    "phi3": {"num_key_value_heads": 4},
    "olmo2": {},
    # Latent attention, whose values and keys differ in size, and experts, whose rows depend on the router.
    "deepseek_v3": {**LATENT, **EXPERTS, "v_head_dim": 32},
    "deepseek_v3-wide-values": {**LATENT, **EXPERTS, "v_head_dim": 48},
    "glm4_moe": {"use_qk_norm": True, "attention_bias": True, **EXPERTS},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48},
    "mimo": {},
    "gpt_oss": {"sliding_window": 96, "num_local_experts": 8, "num_experts_per_tok": 3},
}  # fmt: skip
BY_TORCH, BY_KERNELS = " by torch", " by kernels"
"""Suffixes of families whose model is made without native code. The second has the stand-ins of a GPU's kernels and of
CUDA graphs."""
IN_INT8 = " in int8"
"""The suffix of families whose keys and values have 8 bits."""
WITHOUT_NATIVE = ("llama", "mistral", "mistral-narrow", "gemma2", "olmo2", "deepseek_v3", "gpt_oss")
ALL = (
    *FAMILIES,
    *(family + BY_TORCH for family in WITHOUT_NATIVE),
    *(family + BY_KERNELS for family in ("llama", "mistral", "gemma2", "deepseek_v3", "gpt_oss")),
    *(family + IN_INT8 for family in ("llama", "gemma2", "gpt_oss")),
)
WAYS = ("llama", "llama" + IN_INT8, "olmo2", "olmo2" + BY_TORCH, "llama" + BY_KERNELS)
"""A family that runs as native code, also with keys and values of 8 bits, one whose attention does, one with attention
by torch's operators, and one with kernels and CUDA graphs."""


def network(family: str, dtype: torch.dtype, **changes: int) -> PreTrainedModel:
    family = family.removesuffix(BY_TORCH).removesuffix(BY_KERNELS).removesuffix(IN_INT8)
    config = AutoConfig.for_model(family.partition("-")[0], **{**SIZES, **FAMILIES[family], **changes})
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()


def model(family: str, dtype: torch.dtype, slots: int = 1024, **changes: Any) -> TransformersModel:
    if family.endswith(IN_INT8) and os.environ.get("PACELINE_NATIVE") == "0":
        pytest.skip("native code is switched off")
    with pytest.MonkeyPatch.context() as patch:
        if family.endswith((BY_TORCH, BY_KERNELS)):
            patch.setenv("PACELINE_NATIVE", "0")
            patch.setattr(NativeLibrary, "_instance", None)
        if family.endswith(BY_KERNELS):
            use_stand_ins(patch)
        engine = EngineConfig(slots=slots, kv_cache_dtype="int8" if family.endswith(IN_INT8) else "auto")
        return build(network(family, dtype, **changes), family, engine, "", [])


def tokens(count: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=count)


@cache
def reference(family: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """The logits of `tokens(LONGEST)`, one row at a time. A shorter sequence of the same seed is a prefix of it."""
    return one_by_one(model(family, dtype), tokens(LONGEST))


@pytest.mark.parametrize("family", ALL)
def test_rows_compute_what_transformers_computes(family: str) -> None:
    """With keys and values of 8 bits logits are off by 0.0103 of the largest at most, where no expert is chosen."""
    if family == "gpt_oss" + IN_INT8:
        pytest.skip("other experts are chosen for some rows")
    with torch.inference_mode():
        expected = network(family, torch.float32)(torch.tensor([tokens(LONGEST)])).logits[0]
    ours = torch.stack(reference(family, torch.float32))
    tolerance = 0.02 if family.endswith(IN_INT8) else 2e-4
    assert (ours - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("family", ["llama", "olmo2", "gemma3_text"])
def test_the_target_s_embedding_is_the_first_layer_s_input(family: str) -> None:
    """Gemma scales it."""
    target, sequence = model(family, torch.bfloat16), tokens(20)
    table = SlotTable(range(1, 21))
    given = target.run([table.row(token, i) for i, token in enumerate(sequence)], [], (0,)).hidden
    assert given is not None
    assert torch.equal(target.target_weights().embedding()[sequence], given[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ALL)
def test_trees_of_guesses_equal_one_row_at_a_time(family: str, dtype: torch.dtype) -> None:
    assert_same(random_trees(model(family, dtype), tokens(LONGEST)), reference(family, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [3, 8, 61, 150])
@pytest.mark.parametrize("family", WAYS)
def test_chunked_prefill_equals_one_row_at_a_time(family: str, dtype: torch.dtype, chunk: int) -> None:
    assert_same(chunks(model(family, dtype), tokens(LONGEST), chunk), reference(family, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", WAYS)
def test_other_requests_change_nothing(family: str, dtype: torch.dtype) -> None:
    sequences = [tokens(n, seed=n) for n in (20, TILE + 1, 150, 2 * TILE, 7)]
    shared = model(family, dtype, slots=2048)
    together = lockstep(shared, sequences)
    for sequence, logits in zip(sequences, together, strict=True):
        assert_same(logits, one_by_one(model(family, dtype), sequence))


@pytest.mark.parametrize("family", WAYS)
def test_a_truncated_path_leaves_nothing_behind(family: str) -> None:
    before, after = tokens(2 * TILE + 9), tokens(2 * TILE + 9, seed=9)
    sequence = [*before[: TILE + 3], *after[TILE + 3 :]]
    runner, table, free = model(family, torch.float32), SlotTable(), iter(range(1, 1000))
    logits: list[torch.Tensor] = []
    for each in (before, sequence):
        table.truncate(TILE + 3)
        del logits[TILE + 3 :]
        for position in range(len(table), len(each)):
            table.slots.append(next(free))
            logits.append(runner.run([table.row(each[position], position)], [0]).logits[0])
    assert_same(logits, one_by_one(model(family, torch.float32), sequence))


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (14, 2)])
@pytest.mark.parametrize("family", WAYS)
def test_heads_that_do_not_fill_vectors_change_nothing(family: str, heads: tuple[int, int]) -> None:
    """The last few rows of a pass once had the weights of their two parts by another formula."""
    changes = {"hidden_size": 112, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    sequence = tokens(2 * TILE)

    ours = random_trees(model(family, torch.float32, **changes), sequence)
    assert_same(ours, one_by_one(model(family, torch.float32, **changes), sequence))


@pytest.mark.parametrize("window", [1, 8, 32, TILE - 1, TILE, TILE + 1, 96])
@pytest.mark.parametrize("family", [f + way for f in ("mistral", "gemma2") for way in ("", BY_TORCH, BY_KERNELS)])
def test_a_window_of_any_size_hides_earlier_positions(family: str, window: int) -> None:
    """A window within a tile may hide the whole prefix, to which kernels then give a weight of 1."""
    sequence = tokens(2 * TILE + 5)
    with torch.inference_mode():
        theirs = network(family, torch.float32, sliding_window=window)(torch.tensor([sequence])).logits[0]
    ours = torch.stack(chunks(model(family, torch.float32, sliding_window=window), sequence, 61))
    assert (ours - theirs).abs().max() < 2e-4 * theirs.abs().max()


@pytest.mark.parametrize("family", [f + way for f in ("llama", "olmo2") for way in ("", BY_TORCH, BY_KERNELS)])
def test_nan_stays_within_its_request(family: str) -> None:
    """A request with NaN leaves it in its slots, and in those of padding rows."""
    sequence, runner = tokens(20), model(family, torch.float32)
    poison = next(token for token in range(VOCABULARY) if token not in sequence)
    runner.target_weights().embedding()[poison] = float("nan")
    other, table = SlotTable([900]), SlotTable()
    logits = []
    for position, token in enumerate(sequence):
        table.slots.append(position + 1)
        both = runner.run([other.row(poison, 0), table.row(token, position)], [0, 1]).logits
        assert both[0].isnan().all()
        logits.append(both[1])
    assert_same(logits, one_by_one(model(family, torch.float32), sequence))


@pytest.mark.parametrize(
    ("queries", "keys", "size", "arguments", "error"),
    [
        (4, 2, 32, {"indices": torch.zeros(1)}, "not known here: indices"),
        # Native code would read beyond them, and torch would truncate them.
        (4, 1, 32, {}, "layers differ in their attention heads"),
        (2, 2, 32, {}, "layers differ in their attention heads"),
        (4, 2, 64, {}, "layers differ in their attention heads"),
    ],
)
def test_attention_that_rows_cannot_have_is_refused(
    queries: int, keys: int, size: int, arguments: dict[str, torch.Tensor], error: str
) -> None:
    begin, _ = make_attention(1, Heads(2, 2, 32), 16, 16, torch.empty(0))
    query, key = torch.zeros(1, queries, 8, size), torch.zeros(1, keys, 8, size)
    layer: Any = SimpleNamespace(layer_idx=0)
    with use_pass(begin([SlotTable([1]).row(5, 0)])), pytest.raises(ValueError, match=error):
        attention_interface(layer, query, key, key, None, **arguments)


def test_padding_rows_write_beside_the_slots_of_tokens() -> None:
    cache = KVCache(1, 16, Heads(2, 2, 32), torch.float32, torch.device("cpu"))
    written = TorchPass.of(cache, [SlotTable([16]).row(5, 0)]).batch.slots.tolist()
    assert written == [16, *[17] * (GROUP - 1)]
    assert len(cache.data[0]) == 16 + SPARE_SLOTS == 18


def test_the_probe_notices_a_row_that_depends_on_other_rows() -> None:
    broken = model("llama", torch.float32)
    assert is_row_invariant(broken)
    run = broken.run

    @torch.inference_mode()
    def leaky(rows: list[Row], *rest: object) -> object:
        output = run(rows, *rest)  # type: ignore[arg-type]
        if len(rows) > 1:
            output.logits[..., 0] = torch.nextafter(output.logits[..., 0], torch.tensor(torch.inf))
        return output

    broken.run = leaky  # type: ignore[method-assign, assignment]
    assert not is_row_invariant(broken)


def test_the_probe_notices_keys_that_depend_on_other_rows() -> None:
    broken = model("llama", torch.float32)
    run, passes = broken.run, []

    def leaky(rows: list[Row], *rest: object) -> object:
        output = run(rows, *rest)  # type: ignore[arg-type]
        passes.append(len(rows))
        if len(rows) == max(passes) > TILE:
            broken.cache.data[:, :, rows[-1].slot] *= 1.001
        return output

    broken.run = leaky  # type: ignore[method-assign, assignment]
    assert not is_row_invariant(broken)
    assert len(passes) == 12


def shuffled(row: Row) -> Row:
    """The row with the slots of its last tile, except its own, reversed."""
    border = row.position // TILE * TILE
    *tile, own = row.path(border)
    return SlotTable([*row.path()[:border], *tile[::-1], own]).row(row.token, row.position)


def repositioned(row: Row, depth: int) -> Row:
    """The row with a position that counts from the root within the last tile, and the same path."""
    return row._replace(position=row.position // TILE * TILE + depth)


MUTANTS: dict[str, Callable[[SlotTable, int, list[int]], Row]] = {
    # The key of a guess is in the column of its index in the batch, not of its position.
    "column by arrival": lambda table, token, branch: shuffled(table.branch_row(token, branch)),
    # A branch sees another branch's node instead of its own.
    "sibling visible": lambda table, token, branch: table.branch_row(token, [s + 1 for s in branch[:-1]] + branch[-1:]),
    # Position counted from the root instead of the tile's border.
    "relative position": lambda table, token, branch: repositioned(table.branch_row(token, branch), len(branch)),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("family", WAYS)
def test_mutants_are_caught(family: str, mutant: str) -> None:
    mutated = random_trees(model(family, torch.float32), tokens(LONGEST), MUTANTS[mutant])
    assert any(not torch.equal(a, b) for a, b in zip(reference(family, torch.float32), mutated, strict=True))

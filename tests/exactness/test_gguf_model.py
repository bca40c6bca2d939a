"""A packed model computes what its file says, and a row depends on its own path alone."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.config import EngineConfig, SamplingParams
from paceline.gguf.gguf_file import GgufError
from paceline.llm import LLM
from paceline.model import gguf_weights, packed_model
from paceline.model.gguf_model import load_packed
from paceline.model.layer_weights import QuantizedWeight
from paceline.model.native.native_library import NativeLibrary
from paceline.model.packed_model import PackedModel
from paceline.model.rope import fix_rope_frequencies
from paceline.model.rows import SlotTable
from paceline_lab.training.heads.eagle3_module import Eagle3Module
from paceline_lab.training.heads.target_reader import TargetReader, draft_loss
from paceline_lab.training.heads.train_head import RECIPES, head_config, save_head
from tests.helpers.gguf_files import YARN, tiny_config, write_gguf
from tests.helpers.row_runs import assert_same, chunks, lockstep, one_by_one, random_trees

pytestmark = pytest.mark.skipif(os.environ.get("PACELINE_NATIVE") == "0", reason="native code is switched off")

LONGEST = 150
KINDS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "granite", "qwen3_5_text")
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}
"""Widths that formats with blocks of 256 take."""
INT8_ROWS = 0.06
"""Difference from float32 rows, relative to the logits; seen: up to 0.043. A wrong order of rows shows as 0.3."""
SHALLOW = {
    "gemma3_text": {"num_hidden_layers": 2},
    "qwen3_5_text": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}
"""Kinds of more layers in floats: seven of the first one differ by 0.17 from float32 rows, and by 1e-6 in floats; three
of the other by 0.079, and by 2e-6."""
ROPES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0}},
    "phi3": {
        "original_max_position_embeddings": 128,
        "rope_parameters": {
            **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128},
            **{"short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]},
        },
    },
}
"""Frequencies by other formulas."""


class Written:
    """A tiny file, and the network that computes what it says."""

    def __init__(self, folder: Path, kind: str, quantization: str, **changes: Any) -> None:
        self.path = folder / "tiny.gguf"
        self.network: nn.Module = write_gguf(self.path, tiny_config(kind, **changes), quantization)

    def load(self, dtype: str = "float32", slots: int = 2048) -> PackedModel:
        model = load_packed(str(self.path), "tiny", EngineConfig(slots=slots, dtype=dtype))
        assert model is not None
        return model

    def expected(self, sequence: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self.network(torch.tensor([sequence])).logits[0]
        return logits


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def write(kind: str, quantization: str, *, wide: bool = False, shallow: bool = False) -> Written:
        changes = (WIDE if wide else {}) | (SHALLOW.get(kind, {}) if shallow else {})
        return Written(tmp_path_factory.mktemp(kind), kind, quantization, **changes)

    return write


def tokens(count: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(3, 259), k=count)


def difference(file: Written, model: PackedModel) -> float:
    """Of logits, relative to them: roots of the sums of squares."""
    sequence = tokens(60)
    expected = file.expected(sequence)
    return float((torch.stack(one_by_one(model, sequence)) - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_0", "Q5_1", "F32", "F16"])
def test_a_packed_model_computes_what_transformers_computes_with_its_numbers(
    kind: str, quantization: str, written: Any
) -> None:
    floats = quantization.startswith("F")
    file = written(kind, quantization, shallow=not floats)
    assert difference(file, file.load()) < (1e-3 if floats else INT8_ROWS)


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_frequencies_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    file = Written(tmp_path, kind, "F32", **ROPES[kind])
    fix_rope_frequencies(file.network, 256)
    assert difference(file, file.load()) < 1e-3


@pytest.mark.parametrize("quantization", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_formats_with_two_levels_of_scales_compute_the_same(quantization: str, written: Any) -> None:
    file = written("llama", quantization, wide=True)
    assert difference(file, file.load()) < INT8_ROWS


def test_weights_stay_packed(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[type] = []
    monkeypatch.setattr(
        packed_model,
        "NativeNetwork",
        lambda layers, *_, **options: seen.extend(
            type(each) for layer in layers for each in (layer.query, layer.value, layer.gate, layer.up, layer.down)
        ),
    )
    written("qwen2", "Q8_0").load()
    assert set(seen) == {QuantizedWeight}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "quantization"),
    [
        ("llama", "Q8_0"),
        ("qwen2", "Q4_K"),
        ("qwen3", "Q6_K"),
        ("gemma3_text", "Q8_0"),
        ("phi3", "Q4_0"),
        ("granite", "Q5_1"),
        ("qwen3_5_text", "Q8_0"),
        ("qwen3_5_text", "Q4_K"),
    ],
)
def test_rows_equal_one_row_at_a_time(kind: str, quantization: str, dtype: str, written: Any) -> None:
    file, sequence = written(kind, quantization, wide=quantization.endswith("_K")), tokens(LONGEST)
    alone = one_by_one(file.load(dtype), sequence)
    assert_same(random_trees(file.load(dtype), sequence), alone)
    for size in (3, 17, 61, 150):
        assert_same(chunks(file.load(dtype), sequence, size), alone)
    others = [tokens(n, seed=n) for n in (20, 65, 7)]
    assert_same(lockstep(file.load(dtype), [*others, sequence])[-1], alone)


def test_bits_do_not_depend_on_the_number_of_threads(written: Any) -> None:
    file, sequence, before = written("llama", "Q4_K", wide=True), tokens(40), NativeLibrary.instance()
    runs = []
    try:
        for threads in (1, 2, 3):
            NativeLibrary.set_instance(NativeLibrary(threads))
            runs.append(chunks(file.load("bfloat16"), sequence, 16))
    finally:
        NativeLibrary.set_instance(before)
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[2])


def test_rows_of_queries_and_keys_in_the_order_of_the_file_are_noticed(
    written: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written("llama", "Q8_0")
    monkeypatch.setattr(gguf_weights, "unpermuted_rows", lambda heads, size: np.arange(heads * size))
    assert difference(file, file.load()) > 5 * INT8_ROWS


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    def cut(name: str, data: Any) -> Any:
        return data[:-32] if name == "blk.1.ffn_up.weight" else data

    write_gguf(tmp_path / "tiny.gguf", tiny_config("llama"), change=cut)
    with pytest.raises(GgufError, match=r"blk\.1\.ffn_up\.weight"):
        load_packed(str(tmp_path / "tiny.gguf"), "tiny", EngineConfig(slots=256))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "granite"])
def test_hidden_states_and_the_embedding_are_those_of_the_network(kind: str, written: Any) -> None:
    file, sequence = written(kind, "Q8_0"), tokens(20)
    model = file.load()
    with torch.inference_mode():
        states = file.network(torch.tensor([sequence]), output_hidden_states=True).hidden_states
    table = SlotTable(range(1, 21))
    hidden = model.run([table.row(token, i) for i, token in enumerate(sequence)], [], (0, 1)).hidden
    assert hidden is not None
    assert torch.equal(hidden[:, 0], states[0][0])
    assert torch.equal(model.embedding()[sequence], states[0][0])
    assert (hidden[:, 1] - states[1][0]).norm() < INT8_ROWS * states[1].norm()


def taught_head(network: nn.Module, rows: Sequence[Sequence[int]], folder: Path) -> Path:
    """An EAGLE-3 head that has learned these rows, which predicts half of the tokens by the target's output matrix."""
    vocabulary = torch.arange(0, network.config.vocab_size, 2)
    reader = TargetReader(network, RECIPES["eagle3"].layers(network.config.num_hidden_layers), vocabulary)
    config = head_config(network.config)
    torch.manual_seed(6)
    head = Eagle3Module(config, 3, reader.output)
    head.restrict(vocabulary)
    head.share_output()
    reading = reader.read(torch.tensor(rows))
    optimizer = torch.optim.AdamW(head.parameters(), 3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        draft_loss(head(reading, 3), reading).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    config.draft_vocab_size = len(vocabulary)
    save_head(head, RECIPES["eagle3"], config, folder)
    return folder


@pytest.mark.parametrize("quantization", ["Q4_1", "Q8_0"])
def test_a_head_drafts_for_a_packed_file(quantization: str, tmp_path: Path) -> None:
    """Drafts change no token, whether the head learned the text or not, and the ones it learned are accepted."""
    file = Written(tmp_path, "llama", quantization, num_hidden_layers=8)
    plain = LLM(str(file.path), None, {"slots": 1024, "dtype": "float32", "enable_prefix_caching": False})
    prompts, greedy = [tokens(9, n) for n in range(4)], SamplingParams(temperature=0.0, min_tokens=40, max_tokens=40)
    answers = plain.generate(prompts, greedy)
    rows = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, answers, strict=True)]
    head = taught_head(file.network, rows, tmp_path / "head")
    always = {"num_speculative_tokens": 3, "draft_schedule": "lockstep", "row_budget": False}
    llm = plain.with_speculation({"method": "eagle3", "model": str(head), **always})
    guessed = llm.generate(prompts, greedy)
    assert [each.tokens for each in guessed] == [each.tokens for each in answers]
    assert sum(each.speculation.accepted_tokens for each in guessed) > 20
    drawn = SamplingParams(temperature=0.8, seed=5, max_tokens=40)
    assert [each.tokens for each in llm.generate(prompts, drawn)] == [
        each.tokens for each in plain.generate(prompts, drawn)
    ]

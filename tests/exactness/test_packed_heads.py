"""Heads with `quantization`: their matrices are packed, and a row depends on its own path alone."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from paceline import family
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.config.engine_config import Quantization
from paceline.drafting import build_speculator
from paceline.drafting.heads.head_network import HeadNetwork
from paceline.drafting.methods.eagle import EagleNetwork
from paceline.drafting.methods.eagle3 import Eagle3Network
from paceline.drafting.methods.mtp import load_mtp
from paceline.memory_plan import draft_memory
from paceline.model.checkpoint import Checkpoint
from paceline.model.layer_weights import MATRICES, LayerWeights, QuantizedWeight
from paceline.model.native import native_network
from paceline.model.rows import SlotTable
from paceline.model.target_weights import load_target_weights
from tests.helpers import head_methods
from tests.helpers.head_checkpoints import (
    HIDDEN,
    VOCABULARY,
    eagle3_tensors,
    eagle_tensors,
    llama_config,
    save_head,
    target_weights,
)
from tests.helpers.head_methods import save_method
from tests.helpers.mtp_checkpoints import layer_tensors, save_matrices

pytestmark = pytest.mark.skipif(os.environ.get("PACELINE_NATIVE") == "0", reason="native code is switched off")

HEADS: dict[str, tuple[Any, dict[str, Tensor]]] = {
    "eagle": (EagleNetwork, eagle_tensors(norms=True)),
    "eagle3": (Eagle3Network, eagle3_tensors()),
}
ENCODED = "fc.weight"
"""EAGLE-3's: it makes features of states, once for a token, and is not packed."""
INT8_ROWS = 0.06
"""Difference from float32 rows, relative to the logits."""
COUNT = 70


def saved(folder: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    folder.mkdir()
    return Checkpoint(save_head(folder, tensors, llama_config()))


def rounded(name: str, tensors: dict[str, Tensor], quantization: str) -> dict[str, Tensor]:
    """With the numbers that the package `gguf` makes of every matrix of a layer, of the output by Q8_0."""
    result = dict(tensors)
    for part, tensor in tensors.items():
        if tensor.dim() < 2 or "o_proj" in part or (name == "eagle3" and part == ENCODED):
            continue  # heads of 16 numbers are padded: o_proj is not packed
        kind = gguf.GGMLQuantizationType["Q8_0" if part == "lm_head.weight" else quantization.upper()]
        result[part] = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind))
    return result


@torch.inference_mode()
def logits(network: HeadNetwork, at_once: int, hidden: int = HIDDEN) -> Tensor:
    """Of COUNT rows. `hidden`: size of a state."""
    random = torch.Generator().manual_seed(9)
    tokens = torch.randint(VOCABULARY, (COUNT,), generator=random).tolist()
    states = torch.randn(COUNT, len(network.description.hidden_state_layers), hidden, generator=random)
    features, table = network.encode(states), SlotTable(range(1, COUNT + 1))
    parts = []
    for start in range(0, COUNT, at_once):
        span = range(start, min(start + at_once, COUNT))
        rows = [SlotTable(table.slots[: i + 1]).row(tokens[i], i) for i in span]
        parts.append(network.run(rows, features[span.start : span.stop], range(len(rows))).logits)
    return torch.cat(parts)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """Types of the matrices that native code has got, but the one after attention."""
    types: list[type] = []
    give = native_network._LayerFeed._give

    def noted(feed: Any, layer: LayerWeights[Any]) -> None:
        types.extend(type(getattr(layer, part)) for part in MATRICES if part != "output")
        give(feed, layer)

    monkeypatch.setattr(native_network._LayerFeed, "_give", noted)
    return types


@pytest.mark.parametrize("quantization", ["q8_0", "q4_0"])
@pytest.mark.parametrize("name", HEADS)
def test_a_packed_head_computes_what_the_plain_one_computes_with_its_numbers(
    name: str, quantization: Quantization, tmp_path: Path, seen: list[type]
) -> None:
    (build, tensors), target = HEADS[name], target_weights()
    plain = build(saved(tmp_path / "rounded", rounded(name, tensors, quantization)), target, 256)
    seen.clear()  # the target's and the plain head's
    packed = build(saved(tmp_path / "head", tensors), target, 256, quantization=quantization)
    assert set(seen) == {QuantizedWeight}
    expected, got = logits(plain, COUNT), logits(packed, COUNT)
    assert (got - expected).norm() < INT8_ROWS * expected.norm()
    assert torch.equal(logits(packed, 1), got)
    assert torch.equal(logits(packed, 17), got)


def test_the_layer_of_a_hybrid_is_packed_with_its_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, gates = Checkpoint(family.path(family.HYBRID)), []
    give = native_network._LayerFeed._give
    monkeypatch.setattr(
        native_network._LayerFeed, "_give", lambda *given: (gates.append(type(given[1].output_gate)), give(*given))
    )
    target = load_target_weights(family.HYBRID, torch.float32, "cpu")
    plain, packed = (load_mtp(checkpoint, target, 256, each) for each in (None, "q8_0"))
    assert gates == [Tensor, QuantizedWeight]
    expected, got = (logits(network, COUNT, target.hidden_size) for network in (plain, packed))
    assert 0 < (got - expected).norm() < INT8_ROWS * expected.norm()
    assert torch.equal(logits(packed, 1, target.hidden_size), got)


def test_the_plan_counts_a_packed_head_s_bytes(tmp_path: Path) -> None:
    folder, target = save_method(tmp_path, "eagle3"), head_methods.target_weights()
    config = SpeculativeConfig(method="eagle3", model=str(folder))

    def weights(quantization: Quantization | None) -> int:
        return draft_memory(config, EngineConfig(slots=256, quantization=quantization), target)[0].weights

    tensors = head_methods.HEAD_METHODS["eagle3"].tensors
    packed = sum(each.numel() for name, each in tensors.items() if name.endswith("_proj.weight"))
    output = tensors["lm_head.weight"].numel()
    assert weights(None) - weights("q4_0") == 4 * (packed + output) - packed * 18 // 32 - output * 34 // 32


def test_a_head_s_matrix_that_is_no_whole_blocks_is_refused_by_name(tmp_path: Path) -> None:
    folder = save_matrices(tmp_path, "mimo", layer_tensors("mimo"))
    target = load_target_weights(str(folder), torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.down_proj\.weight has rows of 48 numbers, and q4_0"):
        load_mtp(Checkpoint(folder), target, 256, "q4_0")


@pytest.mark.parametrize("name", ["eagle", "eagle3", "peagle"])
def test_the_engine_s_choice_reaches_a_head(name: str, tmp_path: Path, seen: list[type]) -> None:
    folder, target = save_method(tmp_path, name), head_methods.target_weights()
    config = SpeculativeConfig(method=name, model=str(folder))
    seen.clear()  # the target's
    build_speculator(config, EngineConfig(slots=256, quantization="q8_0"), lambda: target)
    assert set(seen) == {QuantizedWeight}


@pytest.mark.parametrize("name", ["medusa", "dflash", "mlp_speculator"])
def test_a_head_that_torch_computes_says_that_it_stays(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, target = save_method(tmp_path, name), head_methods.target_weights()
    config = SpeculativeConfig(method=name, model=str(folder))
    with caplog.at_level(logging.INFO):
        build_speculator(config, EngineConfig(slots=256, quantization="q8_0"), lambda: target)
    assert f"{name} drafts with weights as they are stored" in caplog.text

"""Modules of one checkpoint that have other bits than its others.

compressed-tensors 0.19 writes a group for each kind of module, GPTQModel 7.7 names the exceptions in `dynamic`. The
shapes of a module's tensors alone tell how many bits it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.config import EngineConfig
from paceline.model import load
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.packed_model import PackedModel
from paceline.model.quantization import dequantized_weights
from tests.helpers.checkpoints import change_config, change_weights, save_tokenizer
from tests.helpers.gguf_files import BASE, tiny_config
from tests.helpers.quantized_checkpoints import Stored, fp8_groups, fp8_rows, gptq, integers_packed, quantise_weights
from tests.helpers.row_runs import one_by_one

SEQUENCE = torch.arange(40).unsqueeze(0)
ROUNDED_ROWS = 0.03
"""Native code rounds a row to 8 bits: the largest difference from float32 rows, relative to the logits."""


class Mixture(NamedTuple):
    makers: Mapping[str, Callable[[int, int], Stored]]
    """By how names of weights end."""
    settings: Mapping[str, Any]


def group(target: str, form: str, bits: int, kind: str = "int", **more: object) -> Mapping[str, Any]:
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "block_structure": None, **more}
    return {"targets": [target], "format": form, "weights": weights}


def compressed(*groups: Mapping[str, Any]) -> Mapping[str, Any]:
    named = {f"group_{i}": each for i, each in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": named, "ignore": []}


FOUR, EIGHT = (partial(integers_packed, bits=bits) for bits in (4, 8))
ACTIVATIONS = {"targets": ["LlamaAttention"], "weights": None, "input_activations": {"num_bits": 8, "type": "float"}}
IN_ORDER = partial(gptq, in_order=True)
MIXTURES = {
    "4 bits beside 8, and an embedding of 8": Mixture(
        {"embed_tokens.weight": EIGHT, "mlp.gate_proj.weight": FOUR, "mlp.up_proj.weight": FOUR, "_proj.weight": EIGHT},
        compressed(
            group("re:.*mlp.*", "pack-quantized", 4),
            group("Linear", "pack-quantized", 8),
            group("Embedding", "pack-quantized", 8),
            ACTIVATIONS,
        ),
    ),
    "4 bits beside FP8": Mixture(
        {"q_proj.weight": fp8_rows, "o_proj.weight": fp8_rows, "_proj.weight": FOUR},
        compressed(group("re:.*attn.*", "float-quantized", 8, "float"), group("re:.*mlp.*", "pack-quantized", 4)),
    ),
    "FP8 by blocks beside FP8 by rows": Mixture(
        {"down_proj.weight": fp8_groups, "o_proj.weight": fp8_rows, "_proj.weight": fp8_groups},
        compressed(
            group("re:.*o_proj", "float-quantized", 8, "float"),
            group("Linear", "float-quantized", 8, "float", block_structure=[128, 128]),
        ),
    ),
    "GPTQ with exceptions": Mixture(
        {"o_proj.weight": partial(IN_ORDER, bits=8), "_proj.weight": IN_ORDER},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {r"+:.*o_proj.*": {"bits": 8}}},
    ),
}


def written(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Returns the weights that the checkpoint stands for."""
    torch.manual_seed(7)
    network = AutoModelForCausalLM.from_config(tiny_config("llama", hidden_size=128, intermediate_size=256)).float()
    network.save_pretrained(folder)
    save_tokenizer(folder, range(BASE["vocab_size"]))
    meant = quantise_weights(folder, MIXTURES[name].makers)
    change_config(folder, quantization_config=MIXTURES[name].settings)
    return meant


@pytest.mark.parametrize("name", MIXTURES)
def test_every_number_is_what_was_written(name: str, tmp_path: Path) -> None:
    meant, checkpoint = written(tmp_path, name), Checkpoint(tmp_path)
    read = dequantized_weights(checkpoint, checkpoint.config["quantization_config"], torch.float32)
    assert read.keys() == meant.keys()
    assert [each for each in meant if not torch.equal(read[each], meant[each])] == []


@pytest.mark.parametrize("name", MIXTURES)
def test_the_model_stays_packed_and_computes_with_them(name: str, tmp_path: Path) -> None:
    meant = written(tmp_path, name)
    network = AutoModelForCausalLM.from_config(tiny_config("llama", hidden_size=128, intermediate_size=256)).float()
    network.load_state_dict(meant, strict=False)
    model = load(str(tmp_path), EngineConfig(slots=256, dtype="float32"))
    assert isinstance(model, PackedModel)
    assert torch.equal(model.embedding(), meant["model.embed_tokens.weight"])
    with torch.inference_mode():
        expected = network.eval()(SEQUENCE).logits[0]
    rows = one_by_one(model, SEQUENCE[0].tolist())
    assert float((torch.stack(rows) - expected).norm() / expected.norm()) < ROUNDED_ROWS


def test_a_weight_that_no_number_of_bits_explains_is_named(tmp_path: Path) -> None:
    written(tmp_path, "4 bits beside FP8")
    module = "model.layers.1.mlp.up_proj"
    change_weights(tmp_path, lambda stored: stored | {f"{module}.weight_packed": torch.zeros(256, 3).int()})
    with pytest.raises(CheckpointError, match=f"{module} has 128 numbers in 3 words of 32 bits"):
        load(str(tmp_path), EngineConfig(slots=256))

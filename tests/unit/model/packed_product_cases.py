"""Runs kernels for packed matrices beside the numbers that files mean, and prints a JSON line.

In a process of its own, with TRITON_INTERPRET=1, see triton_cases.py. The interpreter has no product of bfloat16.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.config import EngineConfig
from paceline.model.gguf_model import load_packed
from paceline.model.gpu.packed_matrix import PackedMatrix, on_device
from paceline.model.gpu.packed_products import PackedProduct
from paceline.model.layer_weights import QuantizedWeight
from paceline.model.layers import Linear
from paceline.model.model import Model
from paceline.model.packed_checkpoint import load_packed_checkpoint
from paceline.model.packed_model import PackedModel
from paceline.model.rows import SlotTable
from tests.exactness.quantized_weights import (
    E4M3_WIDTHS,
    INTEGER_TYPES,
    PACKED_TYPES,
    meant_integers,
    numbers_of,
    random_float8,
    random_integers,
    random_weight,
)
from tests.helpers.checkpoints import save_tokenizer
from tests.helpers.gguf_files import tiny_config, write_gguf
from tests.helpers.quantized_checkpoints import quantise

CPU = torch.device("cpu")
OUTPUTS = 70
"""Two tiles, the second not full."""
TOKENS = [3, 40, 11, 3, 47, 29]
SMALL = {"num_hidden_layers": 1, "vocab_size": 48}


def weights(outputs: int = OUTPUTS) -> Iterator[tuple[str, QuantizedWeight, Tensor]]:
    """Of each format, with what it means. Rows are no whole units."""
    for name, block in PACKED_TYPES.items():
        weight = random_weight(block, outputs, 768 if block.size > 32 else 544)
        yield name, weight, torch.from_numpy(np.array(numbers_of(weight)))
    for name, kind in INTEGER_TYPES.items():
        integers = random_integers(kind, outputs)
        yield name, integers.packed(), torch.from_numpy(meant_integers(integers))
    for name in E4M3_WIDTHS:
        weight, meant = random_float8(name, outputs)
        yield name, weight, torch.from_numpy(meant)


def error(found: Tensor, meant: Tensor) -> float:
    return float((found.float() - meant).abs().max() / meant.abs().max())


def numbers_case(name: str, weight: QuantizedWeight, meant: Tensor) -> dict[str, Any]:
    matrix, rows = (
        PackedMatrix.of(weight, CPU, torch.float32),
        torch.tensor([[0, 1], [39, 1], [3, 1]])[:, 0],
    )  # apart in memory, like tokens of a pass
    x = torch.randn(3, weight.shape[1])
    product = PackedProduct([matrix], None)(x)
    return {
        "case": name,
        "same": torch.equal(matrix.lookup(rows), meant[rows]),
        "error": error(product, x @ meant.T),
        "share": matrix.nbytes / weight.data.nbytes,
    }


def rows_case(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """The same rows in passes of other sizes. Elsewhere in a tile the interpreter's own sums have another order."""
    [weight] = [weight for each, weight, _ in weights() if each == name]
    product = PackedProduct([PackedMatrix.of(weight, CPU, dtype)], torch.randn(OUTPUTS).to(dtype))
    x = torch.randn(130, weight.shape[1]).to(dtype)
    together = product(x)
    counts = [1, 2, 8, 17, 63, 64, 65]
    differing = [n for n in counts if not torch.equal(product(x[:n]), together[:n])]
    return {"case": name, "differing": differing}


def mixed_case() -> dict[str, Any]:
    """Two alike, one of another format, one not packed, with biases, and rows of another's memory."""
    named = {name: (weight, meant) for name, weight, meant in weights()}
    first, second, third = named["Q4_0"], (named["Q4_0"][0][5:37], named["Q4_0"][1][5:37]), named["Q8_0"]
    dense = torch.randn(9, 544)
    placed = on_device([first[0], second[0], third[0], dense], CPU, torch.float32)
    biases = [torch.randn(len(each)) for each in placed]
    x = torch.randn(5, 544)
    meant = x @ torch.cat([first[1], second[1], third[1], dense]).T + torch.cat(biases)
    apart = Linear(placed[1])(x)
    return {
        "error": max(error(Linear(*placed, biases=biases)(x), meant), error(apart, x @ second[1].T)),
        "memories": len({each.codes.untyped_storage().data_ptr() for each in placed[:3]}),
    }


def logits(model: Model) -> Tensor:
    table = SlotTable(range(1, len(TOKENS) + 1))
    return model.run([table.row(token, i) for i, token in enumerate(TOKENS)], range(len(TOKENS))).logits


def as_on_gpu(model: Any, *given: Any) -> Any:
    model.native = model.has_native_attention = False
    return model._on_gpu(CPU, *given)


def model_cases(folder: Path) -> Iterator[dict[str, Any]]:
    """Models by the way of a GPU, beside transformers with the numbers of their files."""
    PackedModel._by_native_code = as_on_gpu  # type: ignore[method-assign]
    tokens, engine = torch.tensor([TOKENS]), EngineConfig(slots=256, dtype="float32")
    path = folder / "qwen2.gguf"
    network = write_gguf(path, tiny_config("qwen2", **SMALL), "Q5_1")
    file = load_packed(str(path), str(path), engine)
    assert file is not None
    embedding = network.get_input_embeddings().weight  # type: ignore[operator]
    yield {
        "error": error(logits(file), network(tokens).logits[0]),
        "embedding": error(file.embedding(), embedding),
    }
    torch.manual_seed(2)
    network = AutoModelForCausalLM.from_config(tiny_config("qwen3", **SMALL)).float()
    network.save_pretrained(folder)
    save_tokenizer(folder, range(SMALL["vocab_size"]))
    network.load_state_dict(quantise(folder, "pack-quantized"), strict=False)
    checkpoint = load_packed_checkpoint(str(folder), engine)
    assert checkpoint is not None
    yield {"error": error(logits(checkpoint), network(tokens).logits[0])}


def main() -> None:
    torch.manual_seed(1)
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        found: Any = {
            "numbers": lambda: [numbers_case(*each) for each in weights(40)],
            "rows": lambda: [rows_case("INT4_ZEROS", torch.float16), rows_case("Q6_K", torch.float32)],
            "mixed": mixed_case,
            "models": lambda: list(model_cases(Path(folder))),
        }[sys.argv[1]]()
    print(json.dumps(found))


if __name__ == "__main__":
    main()

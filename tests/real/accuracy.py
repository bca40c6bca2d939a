"""How near two engines are to the dequantised weights in float32: ours, and llama.cpp's as its program wrote them.

`python -m tests.real.accuracy FILE.gguf LOGITS` prints one line of JSON. A process of its own: the dequantised weights
take up to 7 GB, which end with it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from paceline.config import EngineConfig
from paceline.model import load
from paceline.model.model import Model
from paceline.model.rows import SlotTable

MAGIC = b"_logits_"
RANGE = 16.0
"""The file keeps log-probabilities down to the largest minus this."""
THREADS = 2
ROWS = 256
"""Of a pass."""


class Chunk(NamedTuple):
    """A text that an engine has seen from its beginning; the second half of it is scored."""

    tokens: list[int]
    log_probs: torch.Tensor
    """[positions, vocabulary], float32, of the positions from `first` on."""

    @property
    def first(self) -> int:
        return len(self.tokens) // 2


def chunks(path: Path) -> Iterator[Chunk]:
    """What `llama-perplexity --kl-divergence-base` wrote.

    After the magic word and three numbers (length of a chunk, vocabulary, chunks) come all tokens. Then each position
    has its scale and its least log-probability as float32, and 16 bits per token.
    """
    with path.open("rb") as file:
        assert file.read(len(MAGIC)) == MAGIC
        length, vocabulary, count = np.fromfile(file, np.int32, 3).tolist()
        tokens = np.fromfile(file, np.int32, count * length).reshape(count, length)
        width = (vocabulary + 1) // 2 * 2 + 4
        for chunk in tokens:
            positions = length - 1 - length // 2
            data = np.fromfile(file, np.uint16, positions * width).reshape(positions, width)
            yield Chunk(chunk.tolist(), torch.from_numpy(_log_probs(data, vocabulary)))


def _log_probs(data: np.ndarray, vocabulary: int) -> np.ndarray:
    head = np.ascontiguousarray(data[:, :4]).view(np.float32)
    return head[:, 1:] + head[:, :1] * data[:, 4 : 4 + vocabulary].astype(np.float32)


def own_log_probs(model: Model, chunk: Chunk) -> torch.Tensor:
    """As `Chunk.log_probs`, computed here."""
    table = SlotTable(range(1, len(chunk.tokens) + 1))
    rows = [table.row(token, position) for position, token in enumerate(chunk.tokens)]
    parts = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
    logits = torch.cat([model.run(part, range(len(part))).logits.float().clone() for part in parts])
    return logits[chunk.first : -1].log_softmax(-1)


def reference_log_probs(network: Any, chunk: Chunk) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = network(torch.tensor([chunk.tokens])).logits[0]
    return logits[chunk.first : -1].log_softmax(-1)


def divergences(expected: torch.Tensor, log_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL divergence in nats and agreement of the likeliest token, for each position; log-probabilities are kept as far
    as llama.cpp's file has them."""
    kept = log_probs.maximum(log_probs.amax(-1, keepdim=True) - RANGE).log_softmax(-1)
    kl = (expected.exp() * (expected - kept)).sum(-1)
    return kl, expected.argmax(-1) == log_probs.argmax(-1)


def compare(gguf: Path, written: Path) -> dict[str, dict[str, float]]:
    """Means over all positions, by engine."""
    model = load(str(gguf), EngineConfig(slots=1024, threads=THREADS))
    dequantised = GgufConfig(dequantize=True)
    network = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=dequantised
    )
    found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {"paceline": [], "llama.cpp": []}
    for chunk in chunks(written):
        expected = reference_log_probs(network, chunk)
        found["paceline"].append(divergences(expected, own_log_probs(model, chunk)))
        found["llama.cpp"].append(divergences(expected, chunk.log_probs))
    return {engine: _means(parts) for engine, parts in found.items()}


def _means(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
    kl, agree = (torch.cat(each).double() for each in zip(*parts, strict=True))
    return {"positions": len(kl), "kl": float(kl.mean()), "agreement": float(agree.mean())}


if __name__ == "__main__":
    torch.set_num_threads(THREADS)
    print(json.dumps(compare(Path(sys.argv[1]), Path(sys.argv[2]))))

"""An 8B model: memory while it loads, its logits, its passes by rows and context, a long prompt, and INT4 weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from paceline.config import EngineConfig
from paceline.model import Model, load
from paceline.model.row_probe import measure_row_cost
from paceline.model.rows import Row, SlotTable
from paceline_lab.bench.gpu.device_memory_peak import MemoryPeak
from paceline_lab.bench.gpu.device_times import launch_us
from paceline_lab.bench.gpu.device_trace import traced
from paceline_lab.bench.gpu.model_shapes import LLAMA_8B, shape_for
from paceline_lab.bench.gpu.random_models import build_model, make_network, write_int4

CONTEXTS = {"cuda": (120, 4096, 32768), "cpu": (20, 120)}
PROMPT = {"cuda": 16384, "cpu": 600}
COMPARED = {"cuda": 4096, "cpu": 300}
"""Positions of the prompt whose last logits are compared with transformers'."""
LAST = 8
CHUNK = 256
"""Rows of a pass."""
ROWS = (1, 8, 16, 32, 64, 128, 256)
PROFILED = (8, 64)
REPEATS = 3


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    shape, contexts = shape_for(LLAMA_8B, device), CONTEXTS[device.type]
    engine = EngineConfig(device=str(device), slots=4 * contexts[-1] + 2 * CHUNK)
    network = make_network(shape, device)
    tokens = torch.arange(PROMPT[device.type]) * 7 % shape["vocab_size"]
    expected = _expected(network, tokens[: COMPARED[device.type]].to(device))
    peak = MemoryPeak.of(network, device)
    model = build_model(network, engine)
    yield {"memory": peak.figures(model), "numerics": model.numerics}
    del network
    for context in contexts:
        yield {f"pass_ms after {context}": pass_ms(model, context)}
    rows = prompt_rows(tokens.tolist())
    yield {"error": float(_error(_run(model, rows[: COMPARED[device.type]]), expected))}
    seconds = 1e-6 * launch_us([lambda: _run(model, rows)], device, repeats=1)
    yield {f"prompt of {len(rows)}": {"s": round(seconds, 3), "tokens_per_s": round(len(rows) / seconds)}}
    for count in PROFILED:
        chunk = rows[:count]
        yield {f"kernels of {count} rows": traced(lambda: model.run(chunk, range(count)), device).table()}  # noqa: B023
    del model
    with TemporaryDirectory() as folder:
        name = write_int4(Path(folder), shape, device)
        peak = MemoryPeak.of(None, device)
        model = load(name, engine)
    yield {"int4": {"numerics": model.numerics, **peak.figures(model), "pass_ms": pass_ms(model, contexts[0])}}


def pass_ms(model: Model, context: int) -> dict[int, float]:
    """Milliseconds of passes after `context` positions, by rows."""
    cost = measure_row_cost(model, CHUNK, REPEATS, context)
    return {rows: round(1e3 * cost(rows), 3) for rows in ROWS}


def prompt_rows(tokens: Sequence[int]) -> list[Row]:
    table = SlotTable(range(1, len(tokens) + 1))
    return [table.row(token, position) for position, token in enumerate(tokens)]


def _run(model: Model, rows: Sequence[Row]) -> Tensor:
    """Logits of the last rows of a prompt, which is computed in chunks."""
    for start in range(0, len(rows) - LAST, CHUNK):
        model.run(rows[start : min(start + CHUNK, len(rows) - LAST)], [])
    return model.run(rows[-LAST:], range(LAST)).logits


@torch.inference_mode()
def _expected(network: nn.Module, tokens: Tensor) -> Tensor:
    """Transformers' logits of the last tokens, float32."""
    logits: Tensor = network(tokens.unsqueeze(0), logits_to_keep=LAST, use_cache=False).logits
    return logits[0].float()


def _error(logits: Tensor, expected: Tensor) -> Tensor:
    """The largest difference, relative to the largest logit."""
    return (logits.float() - expected).abs().max() / expected.abs().max()

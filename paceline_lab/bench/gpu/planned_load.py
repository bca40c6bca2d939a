"""A 14B model with as many slots as planned: does it load beside its cache?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.memory_plan import plan_memory
from paceline.model.rows import SlotTable
from paceline_lab.bench.gpu.device_memory_peak import MemoryPeak
from paceline_lab.bench.gpu.model_shapes import QWEN_14B, shape_for
from paceline_lab.bench.gpu.random_models import build_model, make_network, write_config


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    shape = shape_for(QWEN_14B, device)
    with TemporaryDirectory() as folder:
        name = write_config(Path(folder), shape)
        engine = EngineConfig(device=str(device), max_num_seqs=8)
        engine = plan_memory(engine, SpeculativeConfig(method="none"), name, target=True, draft=False)
    yield {"planned_slots": engine.slots}
    network = make_network(shape, device)
    peak = MemoryPeak.of(network, device)
    model = build_model(network, engine)
    rows = [SlotTable([model.slots]).row(0, 0)] * engine.max_num_batched_rows
    model.run(rows, range(len(rows)))
    yield {"memory": peak.figures(model), "numerics": model.numerics}

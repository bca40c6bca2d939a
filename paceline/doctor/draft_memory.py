"""Estimates whether a draft fits in memory beside its target.

Weights are counted as stored, in the target's dtype, including copies of the target's matrices, which loading drops. So
the estimate is an upper bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from paceline.config import METHODS, SpeculativeConfig
from paceline.drafting.auto_method import mtp_layer_names
from paceline.model.attention import Heads
from paceline.model.checkpoint import Checkpoint
from paceline.model.target_weights import TargetWeights
from paceline.model_names import is_fake_model, resolve_model

MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """In bytes. `states`: the target's hidden states, kept by slot."""

    weights: int = 0
    cache: int = 0
    states: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.states

    def fits(self, free: int | None) -> bool:
        """`free`: None if unknown."""
        return free is None or self.total <= free


def memory_need(config: SpeculativeConfig, target: TargetWeights, slots: int, state_layers: int) -> MemoryNeed:
    """Of a speculator in the target's process. `state_layers`: the number of target layers whose output it reads.

    Raises `CheckpointError` or `ModelNotFoundError`.
    """
    row = METHODS.get(config.method)
    if row is None or row.kind not in ("model", "head") or (config.model and is_fake_model(config.model)):
        return MemoryNeed()
    size = target.dtype.itemsize
    own = config.model is None
    checkpoint = Checkpoint(target.folder if own or config.model is None else resolve_model(config.model))
    names = mtp_layer_names(checkpoint) if own else checkpoint.names
    return MemoryNeed(
        weights=sum(math.prod(checkpoint.shape(name)) for name in names) * size,
        cache=cache_positions(config.method, checkpoint.config, target.config.to_dict()) * (slots + 2) * size,
        states=state_layers * target.hidden_size * (slots + 1) * size,
    )


def cache_positions(method: str, config: Any, target: dict[str, Any]) -> int:
    """Numbers in a draft's KV cache per position. Keys missing in its config.json are those of the target."""
    cached_layers = METHODS[method].cached_layers
    if cached_layers == "none":
        return 0
    settings = config.get("transformer_layer_config") or config.get("text_config") or config
    shape = {**target, **settings}
    if "head_dim" not in settings and "hidden_size" in settings:
        shape.pop("head_dim", None)
    heads = Heads.of(SimpleNamespace(**shape))
    layers = int(shape["num_hidden_layers"]) if cached_layers == "all" else 1
    return layers * 2 * heads.kv_heads * heads.head_size


def free_bytes(device: torch.device) -> int | None:
    """Free bytes on this device; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if not MEMINFO.is_file():
        return None
    return available(MEMINFO.read_text())


def available(meminfo: str) -> int | None:
    """MemAvailable in bytes, from the text of /proc/meminfo; None if it is missing."""
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None

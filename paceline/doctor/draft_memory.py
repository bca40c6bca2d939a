"""Whether a draft fits beside its target: bytes that it takes, against bytes that are free.

Weights are counted as stored, in the target's dtype; copies of the target's matrices, which are dropped, among them. So
it is what a draft takes at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from paceline.config import HEADS, SpeculativeConfig
from paceline.drafting.auto_method import mtp_layer_names
from paceline.model.attention import Heads
from paceline.model.checkpoint import Checkpoint
from paceline.model.target_weights import TargetWeights
from paceline.model_names import is_fake_model, resolve_model

WITHOUT_CACHE = ("medusa", "mlp_speculator")
WHOLE_MODELS = ("draft_model", "pard", "dflash")
"""Of as many layers as config.json says; others have one."""
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
        """`free`: None where nobody knows."""
        return free is None or self.total <= free


def memory_need(config: SpeculativeConfig, lent: TargetWeights, slots: int, state_layers: int) -> MemoryNeed:
    """Of a speculator in the target's process. `state_layers`: whose output it is fed with, by number.

    Raises `CheckpointError` or `ModelNotFoundError`.
    """
    if config.method not in (*HEADS, "draft_model", "pard") or (config.model and is_fake_model(config.model)):
        return MemoryNeed()
    size = lent.dtype.itemsize
    own = config.model is None
    checkpoint = Checkpoint(lent.folder if own or config.model is None else resolve_model(config.model))
    names = mtp_layer_names(checkpoint) if own else checkpoint.names
    return MemoryNeed(
        weights=sum(math.prod(checkpoint.shape(name)) for name in names) * size,
        cache=cache_positions(config.method, checkpoint.config, vars_of(lent.config)) * (slots + 2) * size,
        states=state_layers * lent.hidden_size * (slots + 1) * size,
    )


def vars_of(config: Any) -> dict[str, Any]:
    """A transformers configuration as a mapping."""
    values: dict[str, Any] = config.to_dict()
    return values


def cache_positions(method: str, said: Any, target: dict[str, Any]) -> int:
    """Numbers that a draft keeps for each position. What its config.json does not say is as in the target's."""
    if method in WITHOUT_CACHE:
        return 0
    settings = said.get("transformer_layer_config") or said.get("text_config") or said
    shape = {**target, **settings}
    if "head_dim" not in settings and "hidden_size" in settings:
        shape.pop("head_dim", None)
    heads = Heads.of(SimpleNamespace(**shape))
    layers = int(shape["num_hidden_layers"]) if method in WHOLE_MODELS else 1
    return layers * 2 * heads.kv_heads * heads.head_size


def free_bytes(device: torch.device) -> int | None:
    """On this device now; None where that cannot be found out."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if not MEMINFO.is_file():
        return None
    return available(MEMINFO.read_text())


def available(meminfo: str) -> int | None:
    """What Linux says programs may still take, in bytes."""
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None

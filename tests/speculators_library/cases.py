"""The heads that are recorded, and numbers for their tensors that are the same wherever they are drawn.

Both Pythons import this file: the one of the tests and the one that has the package.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 32, 48, 4, 2, 8
VOCABULARY, LAYERS = 64, 6
MASK, BLOCK, WINDOW = 60, 5, 6
DEPTH = 4
"""Guesses of a path."""
PROMPTS = (2, 5, 23)
"""Lengths, root included: shorter and longer than `WINDOW`."""
DRAFT_TOKENS = list(range(1, VOCABULARY, 2))
"""Of a head with a vocabulary of its own."""


@dataclass(frozen=True)
class Case:
    """`options`: arguments of the package's `from_training_args`. `full`: the draft layers that do not slide; its
    trainings let all of them slide by default."""

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    decoder: str = "qwen3"
    layers: int = 2
    full: Sequence[int] = (0, 1)
    reduced: bool = False
    theta: float = 10000.0


EAGLE3 = {"norm_before_residual": False, "target_layer_ids": [2, 3, 5], "ttt_steps": DEPTH}
PEAGLE = EAGLE3 | {"mask_token_id": MASK}
BLOCKS = {"block_size": BLOCK, "target_layer_ids": [1, 4], "mask_token_id": MASK}
CONV = {"conv_group_size": 4, "selector_rank": 6, "selector_top_k": 10}
CASES = {
    "eagle3": Case("eagle3", EAGLE3 | {"norm_output": True}, layers=1, full=(0,)),
    "eagle3, Llama": Case("eagle3", EAGLE3 | {"norm_before_residual": True}, "llama", 1, (0,), reduced=True),
    "eagle3, one norm before fc": Case("eagle3", EAGLE3 | {"norm_before_fc": True}, theta=5e5),
    "eagle3, norms before fc": Case("eagle3", EAGLE3 | {"fc_norm": True, "target_layer_ids": [0, 6]}),
    "eagle3, sliding": Case("eagle3", EAGLE3, layers=1, full=()),
    "eagle3, Llama, one layer slides": Case("eagle3", EAGLE3, "llama", full=(0,)),
    "peagle": Case("peagle", EAGLE3 | {"mask_token_id": MASK}),
    "peagle, sliding": Case(
        "peagle", EAGLE3 | {"mask_token_id": MASK, "fc_norm": True}, "llama", full=(), reduced=True
    ),
    "mtp": Case("mtp"),
    "dflash": Case("dflash", BLOCKS),
    "dflash, sliding": Case("dflash", BLOCKS, full=(1,), reduced=True),
    "dflash, sliding, not causal": Case("dflash", BLOCKS | {"sliding_window_non_causal": True}, full=()),
    "dflash, from the anchor": Case("dflash", BLOCKS | {"sample_from_anchor": True}),
    "dflash2": Case("dflash2", BLOCKS | CONV),
    "dflash2, sliding": Case("dflash2", BLOCKS | CONV | {"conv_kernel_size": 3}, full=()),
    "dflash2, causal": Case("dflash2", BLOCKS | CONV | {"sliding_window_non_causal": False}, full=(1,)),
    "dflash2, from the anchor": Case("dflash2", BLOCKS | CONV | {"sample_from_anchor": True}),
    "dspark": Case("dspark", BLOCKS | {"markov_rank": 6}),
    "dspark, sliding": Case("dspark", BLOCKS | {"markov_rank": 6}, full=(), reduced=True),
    "dspark, after the anchor": Case("dspark", BLOCKS | {"markov_rank": 6, "sample_from_anchor": False}),
    "dspark, gated": Case("dspark", BLOCKS | {"markov_rank": 6, "markov_head_type": "gated"}, reduced=True),
    "dspark, recurrent": Case("dspark", BLOCKS | {"markov_rank": 6, "markov_head_type": "rnn"}),
    "dspark, recurrent, after the anchor": Case(
        "dspark", BLOCKS | {"markov_rank": 6, "markov_head_type": "rnn", "sample_from_anchor": False}
    ),
    "dspark, no Markov head": Case("dspark", BLOCKS | {"markov_rank": 0, "confidence_head_with_markov": False}),
    "xpress": Case("xpress", BLOCKS | {"xpress_rank": 6}),
    "xpress, sliding, from the anchor": Case(
        "xpress", BLOCKS | {"xpress_rank": 6, "sample_from_anchor": True}, full=(), reduced=True
    ),
}


def numbers(name: str, shape: Sequence[int]) -> Tensor:
    """float32 of this name: a norm around 1, a bias around 0, a matrix that about keeps the size of its input."""
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(tuple(shape))
    if name.endswith("bias"):
        return torch.tensor(0.3 * noise, dtype=torch.float32)
    if len(shape) == 1:
        return torch.tensor(1 + 0.3 * noise, dtype=torch.float32)
    scale = 1.0 if "embed" in name or "codebook" in name or "markov_w1" in name else 1.5 / shape[-1] ** 0.5
    return torch.tensor(scale * noise, dtype=torch.float32)


def vocabulary() -> dict[str, Tensor]:
    """d2t and t2d of a head that guesses `DRAFT_TOKENS`."""
    ids = torch.tensor(DRAFT_TOKENS)
    known = torch.zeros(VOCABULARY, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": known}


def prompt(length: int) -> list[int]:
    return [(7 * i + i // 5 + length) % VOCABULARY for i in range(length)]


def states(length: int, layers: int) -> Tensor:
    """[length, layers, hidden]: of a prompt's tokens."""
    return numbers(f"states of {length} tokens, embed", (length, layers, HIDDEN))

"""Runs the kernels that predict and choose beside torch's operators, and prints a JSON line.

`compare` is in a process of its own, with TRITON_INTERPRET=1: Triton reads it when it is imported, which torch does.
`compile` compiles the kernels instead, and says which of them have local memory.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.config import SamplingParams
from paceline.core.noise import position_key
from paceline.drafting import draw_kernels
from paceline.drafting.draw_prediction import SHORTLIST_SIZE, draw_params
from tests.helpers import device_draws

LONGS, FLOATS = "*i64", "*fp32"
KERNELS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "_likeliest": (
        {"logits": "*bf16", "best": LONGS, "columns": "i32", "row_stride": "i32"},
        {"COLUMNS": draw_kernels.COLUMNS, "SHORTLIST": SHORTLIST_SIZE},
    ),
    "_draw": (
        {
            **{"best": LONGS, "noise_keys": LONGS, "params": "*fp64", "ids": LONGS, "tokens": LONGS},
            **{"log_probs": FLOATS, "rows": "i32", "shortlist": "i32", "candidates": "i32"},
        },
        {"CHUNK": draw_kernels.CHUNK, "SHORTLIST": SHORTLIST_SIZE, "WIDTH": 3, "PADDED_WIDTH": 4, "MAPPED": True},
    ),
    "_choose": (
        {
            **{"paths": FLOATS, "tokens": LONGS, "log_probs": FLOATS, "branches": "*i32", "slots": LONGS},
            **{"features": "*bf16", "next_paths": FLOATS, "next_tokens": LONGS, "next_branches": "*i32"},
            **{"next_features": "*bf16", "chosen": LONGS, "level": "i32", "depth": "i32", "size": "i32"},
        },
        {
            **{"WIDTH": 8, "PADDED_WIDTH": 8, "CHILDREN": 3, "CANDIDATES": 32, "PADDED_DEPTH": 4},
            "FEATURES": draw_kernels.FEATURES,
        },
    ),
}
"""Types of arguments, and constants."""
LAWS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(temperature=1.0, seed=2**63 + 1, top_k=5),
    SamplingParams(temperature=0.7, seed=4, top_p=0.9),
    SamplingParams(temperature=1.3, seed=5, min_p=0.02, top_k=40, top_p=0.95),
)


def main() -> None:
    print(json.dumps(compared_cases() if sys.argv[1] == "compare" else [*map(compiled, KERNELS)]))


def compared_cases() -> list[dict[str, Any]]:
    """On torch's default device."""
    cases = [prediction(*given) for given in ((50, 1, True), (1100, 3, False))]
    cases += [choice(*given) for given in ((1, 8, 3, 1030), (3, 4, 1, 0), (2, 1, 1, 30))]
    return cases


def compiled(name: str) -> dict[str, Any]:
    """For compute capability 9.0, with as many warps as at run time."""
    types, constants = KERNELS[name]
    source = ASTSource(getattr(draw_kernels, name), {**types, **dict.fromkeys(constants, "constexpr")}, constants)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    return {"case": name, "local": ".local" in kernel.asm["ptx"]}


def prediction(columns: int, children: int, mapped: bool) -> dict[str, Any]:
    torch.manual_seed(columns)
    rows = len(LAWS)
    logits = 4 * torch.randn(rows, columns + 3)[:, :columns]
    if mapped:  # in bfloat16, and no two are equal: torch's order of those is open
        logits = torch.stack([torch.randperm(columns) / 8 for _ in range(rows)]).bfloat16()
    ids = torch.randperm(5000)[:columns].sort().values if mapped else None
    keys = torch.tensor([divmod(position_key(law.seed or 0, 7 + n), 2**32) for n, law in enumerate(LAWS)])
    params = torch.tensor(draw_params(LAWS)).contiguous()
    results = []
    for draws in (device_draws, draw_kernels):
        tokens = torch.zeros(rows, children, dtype=torch.int64)
        log_probs = torch.zeros(rows, children)
        draws.predict(logits, keys, params, ids, tokens, log_probs)
        results.append((tokens, log_probs))
    return compared(f"predict {columns} {children} {mapped}", results)


def choice(requests: int, width: int, children: int, size: int) -> dict[str, Any]:
    torch.manual_seed(width)
    depth, level = 5, 2
    nodes = requests * width
    paths, log_probs = -torch.rand(requests, width), -3 * torch.rand(requests, width, children)
    paths[:, width // 2 + 1 :] = -torch.inf
    log_probs[0, 0, 0] = -torch.inf
    tokens = torch.randint(1000, (requests, width, children))
    branches = torch.randint(1000, (nodes, depth - 1), dtype=torch.int32)
    slots, features = torch.randint(1000, (nodes,)), torch.randn(nodes, size) if size else None
    results = []
    for draws in (device_draws, draw_kernels):
        chosen = torch.zeros(requests, width, dtype=torch.int64)
        made = draws.choose(paths, tokens, log_probs, branches, slots, level, features, chosen)
        real = made[0] > -torch.inf  # equal ones come in any order
        kept = [made[0][real], made[1][real.flatten()], made[2][real.flatten()], chosen[real]]
        results.append((*kept, made[3][real.flatten()]) if made[3] is not None else tuple(kept))
    return compared(f"choose {requests} {width} {children} {size}", results)


def compared(case: str, results: list[tuple[Tensor, ...]]) -> dict[str, Any]:
    same = all(
        torch.equal(a, b) if a.dtype != torch.float32 else torch.allclose(a, b, rtol=0, atol=1e-5)
        for a, b in zip(*results, strict=True)
    )
    return {"case": case, "same": same}


if __name__ == "__main__":
    main()

"""Runs the kernels that predict and choose beside torch's operators, and prints a JSON line.

In a process of its own, with TRITON_INTERPRET=1: Triton reads it when it is imported, which torch does.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from paceline.config import SamplingParams
from paceline.core.noise import position_key
from paceline.drafting import device_draws, draw_kernels

LAWS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(temperature=1.0, seed=2**63 + 1, top_k=5),
    SamplingParams(temperature=0.7, seed=4, top_p=0.9),
    SamplingParams(temperature=1.3, seed=5, min_p=0.02, top_k=40, top_p=0.95),
)


def main() -> None:
    cases = [prediction(*given) for given in ((50, 1, True), (1100, 3, False))]
    cases += [choice(*given) for given in ((1, 8, 3, 1030), (3, 4, 1, 0), (2, 1, 1, 30))]
    print(json.dumps(cases))


def prediction(columns: int, children: int, mapped: bool) -> dict[str, Any]:
    torch.manual_seed(columns)
    rows = len(LAWS)
    logits = 4 * torch.randn(rows, columns + 3)[:, :columns]
    if mapped:  # in bfloat16, and no two are equal: torch's order of those is open
        logits = torch.stack([torch.randperm(columns) / 8 for _ in range(rows)]).bfloat16()
    ids = torch.randperm(5000)[:columns].sort().values if mapped else None
    keys = torch.tensor([divmod(position_key(law.seed or 0, 7 + n), 2**32) for n, law in enumerate(LAWS)])
    params = torch.from_numpy(device_draws.draw_params(LAWS)).contiguous()
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

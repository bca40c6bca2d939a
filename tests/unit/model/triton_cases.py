"""Runs our Triton kernel beside flash-attn's stand-in, and prints a JSON line.

In a process of its own, with TRITON_INTERPRET=1: Triton reads it when it is imported, which torch does.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import torch
from torch import Tensor

from paceline.model.triton_attention import flash_attn_with_kvcache as ours
from tests.helpers.flash_attention import flash_attn_with_kvcache as expected

SLOTS = 300
KV_HEADS = 2
LENGTHS = [0, 1, 63, 64, 65, 150, 7]
STARTS = [0, 3, 3, 4, 21, 22, 25, 25]
"""Of runs: the second and the last have no rows, and the fourth has more query heads than a program."""


def main() -> None:
    print(json.dumps([case(*given) for given in product((16, 80), (3, 40), (0.0, 0.7))]))


def case(size: int, queries_per_kv: int, softcap: float) -> dict[str, Any]:
    """The largest error, and whether each sequence alone has the same bits."""
    torch.manual_seed(1)
    pages = torch.randn(SLOTS, 1, 2 * KV_HEADS, size)
    pages[0] = torch.nan  # the slot after the end of a table
    keys, values = pages[:, :, :KV_HEADS], pages[:, :, KV_HEADS:]
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    table = torch.randint(1, SLOTS, (len(LENGTHS), max(LENGTHS) + 5), dtype=torch.int32)
    table[torch.arange(table.shape[1]) >= lengths.unsqueeze(1)] = 0
    heads, rows = KV_HEADS * queries_per_kv, STARTS[-1]
    options = {"softmax_scale": size**-0.5, "softcap": softcap, "num_splits": 1, "return_softmax_lse": True}
    tails, runs = torch.randn(len(LENGTHS), 1, heads, size), torch.randn(rows, heads, size)

    def tail(kernel: Any, these: slice) -> tuple[Tensor, Tensor]:
        chosen = {"page_table": table[these], "cache_seqlens": lengths[these]}
        out, weight = kernel(tails[these], keys, values, **chosen, **options)
        return out, weight

    def run(kernel: Any, this: int | None) -> tuple[Tensor, Tensor]:
        first, last = (0, len(LENGTHS)) if this is None else (this, this + 1)
        start, stop = STARTS[first], STARTS[last]
        chosen = {
            "page_table": table[first:last],
            "cache_seqlens": lengths[first:last],
            "cu_seqlens_q": torch.tensor(STARTS[first : last + 1], dtype=torch.int32) - start,
            "max_seqlen_q": stop - start,
        }
        out, weight = kernel(runs[start:stop], keys, values, **chosen, **options)
        return out, weight.T

    together = [tail(ours, slice(None)), run(ours, None)]
    errors = [error(a, b) for a, b in zip(together, [tail(expected, slice(None)), run(expected, None)], strict=True)]
    same = True
    for n in range(len(LENGTHS)):
        same &= all(map(torch.equal, tail(ours, slice(n, n + 1)), [t[n : n + 1] for t in together[0]]))
        if STARTS[n] < STARTS[n + 1]:
            same &= all(map(torch.equal, run(ours, n), [t[STARTS[n] : STARTS[n + 1]] for t in together[1]]))
    return {"case": [size, queries_per_kv, softcap], "error": max(errors), "same": same}


def error(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> float:
    """The stand-in's log-sum-exp of a row that sees nothing is no number: ours is -inf."""
    (out, weight), (wanted_out, wanted_weight) = found, wanted
    wanted_weight = torch.where(wanted_weight.isnan(), -torch.inf, wanted_weight)
    if not torch.equal(weight == -torch.inf, wanted_weight == -torch.inf):
        return torch.inf
    both = torch.where(weight == -torch.inf, 0.0, weight - wanted_weight)
    return max(float((out - wanted_out).abs().max()), float(both.abs().max()))


if __name__ == "__main__":
    main()

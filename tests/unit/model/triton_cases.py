"""Runs our Triton kernels beside their stand-ins, and prints a JSON line.

In a process of its own, with TRITON_INTERPRET=1: Triton reads it when it is imported, which torch does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter

from paceline.drafting.draft_graph import DraftGraph, DraftShape
from paceline.model.attention import Heads, KVCache
from paceline.model.gpu import attention_kernels, triton_kernels
from paceline.model.gpu.paged_pass import Kernels, PassInput
from paceline.model.gpu.paths import DeviceTables
from paceline.model.rows import TILE, Row, SlotTable
from tests.helpers import gpu_kernels
from tests.helpers.row_paths import random_rows

SLOTS, KV_HEADS = 900, 2
TABLES = 16
SPLIT = 128
"""Positions of a split here, so that short paths have several."""
CPU = torch.device("cpu")


def summed_in_order(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
    """A product whose rows do not depend on where they are in it, as a GPU's do not: numpy's do."""
    out = np.zeros((len(a), b.shape[1]), dtype or np.float32)
    for k in range(a.shape[1]):
        out += a[:, k : k + 1] * b[k]
    return out


def main() -> None:
    torch.manual_seed(1)
    attention_kernels.SPLIT = SPLIT
    interpreter.np = SimpleNamespace(**{**vars(np), "matmul": summed_in_order})
    cases: list[tuple[int, int, dict[str, Any]]] = [(16, 3, {}), (48, 12, {"sinks": True}), (16, 1, {"window": 100})]
    attended = [attention(*case) for case in [*cases, (16, 2, {"softcap": 0.7})]]
    drafted = [draft_levels(*case) for case in ((1, 8), (8, 1), (3, 8))]
    print(json.dumps({"attention": attended, "drafts": drafted, "layers": layer_cases(), "refused": refused()}))


def layer_cases() -> list[dict[str, Any]]:
    """On torch's default device."""
    return [add_norm(), join(), rotate_and_store(), silu_times(), write_tables()]


def attention(size: int, queries_per_kv: int, options: dict[str, Any]) -> dict[str, Any]:
    """The largest error; and whether rows alone, in another order, and with all splits in one program are the same."""
    rows = [*random_rows(random.Random(2), SLOTS, 16), *long_rows()]
    heads = KV_HEADS * queries_per_kv
    if "sinks" in options:
        options = {"sinks": torch.linspace(-1, 1, heads)}
    data = torch.randn(SLOTS + 2, 2 * KV_HEADS, size)
    data[0] = data[SLOTS + 1] = torch.nan  # nothing may read them into a row
    query = torch.randn(len(rows) + 8, heads, size)

    def attend(kernels: Kernels, chosen: list[int]) -> Tensor:
        these = PassInput.of(DeviceTables(TABLES, SLOTS, CPU), gpu_kernels, [rows[n] for n in chosen], SLOTS + 1)
        given = torch.full((these.size, heads, size), 7.0)
        given[: len(chosen)] = query[chosen]
        paths = these.paths
        return kernels.attend(given, data, paths, kernels.plan(paths), scale=size**-0.5, **options)[: len(chosen)]

    everyone = list(range(len(rows)))
    together, expected = attend(triton_kernels, everyone), attend(gpu_kernels, everyone)
    same = all(torch.equal(attend(triton_kernels, [n])[0], together[n]) for n in random.Random(3).sample(everyone, 4))
    shuffled = random.Random(4).sample(everyone, len(everyone))
    same &= torch.equal(attend(triton_kernels, shuffled), together[shuffled])
    attention_kernels.MOST_ITEMS = 0  # so a group is an item
    same &= torch.equal(attend(triton_kernels, everyone), together)
    attention_kernels.MOST_ITEMS = 256
    case = [size, queries_per_kv, *options]
    return {"case": case, "error": float((together - expected).abs().max()), "same": same}


def long_rows() -> list[Row]:
    """A path of more than a split, as committed and, from before a tile's border on, as a guess with a sibling."""
    slots = random.Random(5).sample(range(1, SLOTS + 1), 300)
    whole, before = SlotTable(slots), SlotTable(slots[: 4 * TILE - 3])
    branch = slots[len(before) :]
    guesses = [before.branch_row(1, branch[: n + 1]) for n in range(0, len(branch), 11)]
    sibling = before.branch_row(1, [*branch[:4], SLOTS])
    return [*(whole.row(1, row.position) for row in guesses), *guesses[:3], sibling, *guesses[3:]]


DRAFT_LENGTHS = (SPLIT + TILE - 1, TILE - 2, SPLIT - 1, 1, 2 * SPLIT + TILE - 2, TILE, SPLIT + 1, 3 * TILE - 2)
"""Committed positions of requests whose nodes cross borders of tiles and of splits, or are next to them."""
DRAFT_LEVELS = (3, 4, 2, 0, 4, 4, 1, 4)
"""Levels of these requests: the others' rows see nothing."""


def draft_levels(requests: int, width: int) -> dict[str, Any]:
    """The largest error of the levels of a draft that share a plan; and whether each node is the same alone."""
    depth, size, generator = 5, 16, random.Random(requests)
    lengths, levels = DRAFT_LENGTHS[:requests], DRAFT_LEVELS[:requests]
    tables = torch.zeros(requests + 1, max(DRAFT_LENGTHS) + depth, dtype=torch.int32)
    paths = [generator.sample(range(1, SLOTS + 1), length) for length in lengths]
    for table, path in zip(tables, paths, strict=False):
        table[: len(path)] = torch.tensor(path)
    cache = KVCache(1, SLOTS, Heads(KV_HEADS, 3, size), torch.float32, CPU)
    data = cache.data[0].normal_()
    data[0] = data[SLOTS + 1] = torch.nan
    nothing: Any = SimpleNamespace()
    passes: Any = SimpleNamespace(cache=cache, kernels=triton_kernels, tables=SimpleNamespace(data=tables))
    graph = DraftGraph(nothing, passes, nothing, DraftShape(8, requests, depth), width, 2, None)
    inputs, branches = graph.inputs.device, torch.zeros(requests * width, depth - 1, dtype=torch.int32)
    inputs["level_table"].copy_(torch.arange(requests).repeat_interleave(width))
    inputs["level_committed"].copy_(torch.tensor(lengths).repeat_interleave(width))
    seen = [[length + n if n <= last else 0 for length, last in zip(lengths, levels, strict=True)] for n in range(1, 5)]
    inputs["level_seen"].copy_(torch.tensor(seen).repeat_interleave(width, 1))
    plan = graph._plan(inputs)
    errors, same = [], True
    for level in range(depth - 1):
        # A node's parent is any of the level above.
        parents = torch.tensor([n // width * width + generator.randrange(width) for n in range(requests * width)])
        branches = branches[parents]
        branches[:, level] = torch.tensor(generator.sample(range(1, SLOTS + 1), requests * width))
        these = graph._level_paths(inputs, inputs["level_seen"][level], branches)
        query = torch.randn(requests * width, 3 * KV_HEADS, size)
        ours = triton_kernels.attend(query, data, these, plan, scale=0.2)
        errors.append(error(ours, gpu_kernels.attend(query, data, these, gpu_kernels.plan(these), scale=0.2)))
        for n in generator.sample(range(requests * width), 2):
            if these.seen[n]:
                row = SlotTable(paths[n // width]).branch_row(1, branches[n, : level + 1].tolist())
                alone = PassInput.of(DeviceTables(1, SLOTS, CPU), gpu_kernels, [row], SLOTS + 1)
                given = query[n].expand(alone.size, -1, -1).contiguous()
                alone_plan = triton_kernels.plan(alone.paths)
                same &= torch.equal(triton_kernels.attend(given, data, alone.paths, alone_plan, scale=0.2)[0], ours[n])
    return {"case": [requests, width], "error": max(errors), "same": same}


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max())


def add_norm() -> dict[str, Any]:
    errors = []
    for width in (48, 640):
        x, added, weight = torch.randn(5, width), torch.randn(5, width), torch.rand(width)
        for given in ((x, added, weight), (x, None, weight), (x, added, None), (x, None, None)):
            ours, theirs = triton_kernels.add_norm(*given, 1e-5), gpu_kernels.add_norm(*given, 1e-5)
            errors += [error(*pair) for pair in zip(ours, theirs, strict=True)]
    return {"case": "add_norm", "error": max(errors)}


def join() -> dict[str, Any]:
    errors = []
    for norms in ((torch.rand(640), torch.rand(640)), (None, torch.rand(640)), (torch.rand(640), None)):
        given = torch.tensor([3, 0, 3]), torch.randn(5, 640), torch.randn(3, 640), *norms, 1e-5
        for norms_residual in (False, True):
            ours, theirs = (each.join(*given, norms_residual=norms_residual) for each in (triton_kernels, gpu_kernels))
            errors += [error(*pair) for pair in zip(ours, theirs, strict=True)]
    return {"case": "join", "error": max(errors)}


def rotate_and_store() -> dict[str, Any]:
    errors = []
    for size, normed in ((16, False), (48, True)):
        projected = torch.randn(5, 3 * KV_HEADS + 2 * KV_HEADS, size)
        positions, slots = torch.tensor([3, 0, 9, 9, 4]), torch.tensor([7, 1, 2, 5, 6], dtype=torch.int32)
        tables = torch.randn(10, size), torch.randn(10, size)
        norms = torch.rand(4 * KV_HEADS, size) if normed else None
        ours, theirs = torch.zeros(2, 8, 2 * KV_HEADS, size)
        found = triton_kernels.rotate_and_store(projected, positions, slots, *tables, ours, norms, 1e-5)
        wanted = gpu_kernels.rotate_and_store(projected, positions, slots, *tables, theirs, norms, 1e-5)
        errors += [error(found, wanted), error(ours, theirs)]
    return {"case": "rotate_and_store", "error": max(errors)}


def silu_times() -> dict[str, Any]:
    x = torch.randn(3, 2 * 1100)
    return {"case": "silu_times", "error": error(triton_kernels.silu_times(x), gpu_kernels.silu_times(x))}


def write_tables() -> dict[str, Any]:
    ours, theirs = torch.zeros(2, 4, 300, dtype=torch.int32)
    writes = torch.tensor([[n % 3, n, 900 + n] for n in range(300)], dtype=torch.int32)
    triton_kernels.write_tables(ours, writes)
    gpu_kernels.write_tables(theirs, writes)
    return {"case": "write_tables", "error": error(ours, theirs)}


def refused() -> list[dict[str, Any]]:
    """Which kernels raise AssertionError for rows that are apart in memory."""
    apart, weight, table = torch.randn(4, 96)[:, :48], torch.rand(48), torch.randn(10, 16)
    heads, integers = torch.randn(4, 8, 16)[:, :5], torch.arange(4)
    calls: dict[str, Callable[[], Any]] = {
        "add_norm": lambda: triton_kernels.add_norm(apart, None, weight, 1e-5),
        "join": lambda: triton_kernels.join(
            integers, torch.randn(4, 48), apart, weight, weight, 1e-5, norms_residual=False
        ),
        "rotate_and_store": lambda: triton_kernels.rotate_and_store(
            heads, integers, integers, table, table, torch.zeros(8, 2, 16), None, 1e-5
        ),
        "silu_times": lambda: triton_kernels.silu_times(apart),
    }
    return [{"case": name, "refused": raises(call)} for name, call in calls.items()]


def raises(call: Callable[[], Any]) -> bool:
    try:
        call()
    except AssertionError:
        return True
    return False


if __name__ == "__main__":
    main()

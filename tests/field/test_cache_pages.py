"""A large KV cache takes memory only for the slots that are used."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from paceline.model.attention import Heads, KVCache

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

LAYERS, SLOTS, HEADS = 2, 100_000, Heads(kv_heads=4, queries_per_kv=1, head_size=64)
PAGE_KB = 4


def mapping(address: int) -> Mapping[str, str]:
    """What the kernel says of the memory at an address of this process."""
    _, *parts = re.split(r"(?m)^([0-9a-f]+)-([0-9a-f]+) ", Path("/proc/self/smaps").read_text())
    ranges = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    text = next(text for begin, end, text in ranges if int(begin, 16) <= address < int(end, 16))
    return dict(re.findall(r"(?m)^(\w+): +(.*)$", text))


def resident_kb(cache: KVCache) -> int:
    return int(mapping(cache.data.data_ptr())["Rss"].split()[0])


@pytest.mark.parametrize("width", [None, 64])
def test_a_cache_has_pages_only_for_the_slots_that_are_used(width: int | None) -> None:
    cache = KVCache(LAYERS, SLOTS, HEADS, torch.float32, torch.device("cpu"), width)
    before = resident_kb(cache)  # of what is beside it in one mapping, such as other tests' caches
    assert not cache.data[:, :4].any()
    slots = cache.data if width is None else cache.data.transpose(1, 2)
    slots[:, 1:5] = 1.0
    memory = mapping(cache.data.data_ptr())
    assert int(memory["Size"].split()[0]) * 1024 >= cache.data.nbytes
    # One page, or two where a slot begins amid one, for each layer, and for each head if those of a head are together.
    assert resident_kb(cache) - before <= LAYERS * 2 * HEADS.kv_heads * 2 * PAGE_KB
    # Where the kernel gives huge pages to all, each of these would be 2 MB.
    assert "nh" in memory["VmFlags"].split()

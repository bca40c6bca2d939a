"""The memory of a device, within the container's limit."""

from __future__ import annotations

from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def free_bytes(device: torch.device) -> int | None:
    """Free bytes on this device; None if unknown."""
    memory = device_memory(device)
    return None if memory is None else memory[0]


def device_memory(device: torch.device) -> tuple[int, int] | None:
    """Free bytes and all bytes of this device, within the container's limit; None if unknown."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    meminfo = MEMINFO.read_text() if MEMINFO.is_file() else ""
    unused, everything = available(meminfo), available(meminfo, "MemTotal")
    if unused is None or everything is None:
        return None
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.is_file() else "max"
    most = everything if limit == "max" else int(limit)
    return min(unused, most), min(everything, most)


def available(meminfo: str, name: str = "MemAvailable") -> int | None:
    """MemAvailable, or another value, in bytes, from the text of /proc/meminfo; None if it is missing."""
    for line in meminfo.splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return None


def gigabytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"

"""The device of a process' model, and its memory within the container's limit."""

from __future__ import annotations

from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def use_device(name: str) -> torch.device:
    """The device called `name`, such as cpu, cuda or cuda:1, for this thread's model.

    A GPU becomes the current one, on which streams, pinned memory and libraries begin. `cuda` is the first GPU. Raises
    ValueError for a device that cannot be used.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used here, choose another such as 'cpu': {error}") from error
    return device


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

"""A platform plugin for vLLM: its CPUs under Ray, where vLLM 0.32 runs on GPUs only.

A process finds it by this folder on PYTHONPATH. A rank counts as one of Ray's GPUs: start nodes with `--num-gpus`.
"""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class CpuWithRay(CpuPlatform):  # type: ignore[misc]
    """CPUs that Ray calls GPUs."""

    ray_device_key = "GPU"


def platform() -> str:
    """Named by the entry point `vllm.platform_plugins`."""
    return "cpu_with_ray.CpuWithRay"

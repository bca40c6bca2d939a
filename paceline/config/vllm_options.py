"""How vLLM computes for a target worker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from paceline.config.settings import Settings


class VllmOptions(Settings):
    """`--vllm-options` beside `--engine vllm`."""

    python: str | None = Field(
        None, description="the Python of an environment with vLLM and paceline; None: the one that runs the worker"
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="arguments of vLLM's engine, by its names: quantization, gpu_memory_utilization, ...",
    )
    hidden_state_layers: tuple[int, ...] = Field(
        (), description="layers whose hidden states draft workers read (EAGLE-3 and other heads), ascending"
    )

    @property
    def pipeline_parallel_size(self) -> int:
        """Ranks one behind the other, each with a part of the layers."""
        return int(self.engine_args.get("pipeline_parallel_size", 1))

    @property
    def executor(self) -> str | None:
        """What starts vLLM's ranks, such as "ray" or "mp"; None: vLLM's choice."""
        return self.engine_args.get("distributed_executor_backend")

    @field_validator("python")
    @classmethod
    def _runs(cls, value: str | None) -> str | None:
        """Absolute; a link stays one, since an environment's Python is a link to another one."""
        if value is not None and not (Path(value).is_file() and os.access(value, os.X_OK)):
            raise ValueError(f"{value} is not a program")
        return None if value is None else str(Path(value).absolute())

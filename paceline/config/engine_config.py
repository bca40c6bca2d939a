"""The engine of one worker."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt

from paceline.config.settings import Settings


class EngineConfig(Settings):
    """One target or draft worker's engine."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="auto: as the checkpoint says")
    device: str = "cpu"
    tensor_parallel_size: int = Field(1, ge=1, description="processes that share one model, its ranks")
    rendezvous: str | None = Field(
        None, description="HOST:PORT of rank 0, where it waits for the others; needed if there are any"
    )
    threads: int = Field(1, ge=1, description="CPU threads for the model")
    cpus: tuple[NonNegativeInt, ...] | None = Field(
        None, description="CPU cores to which a target is bound; empty: any; None: as whoever starts it thinks best"
    )
    slots: int = Field(16384, ge=256, description="positions the KV cache holds, over all requests")
    max_model_len: int | None = Field(None, ge=2, description="longest prompt plus output; None: the model's own")
    max_num_seqs: int = Field(64, ge=1, description="requests that run at once")
    max_num_batched_rows: int = Field(256, ge=8, description="rows of one forward pass")
    enable_prefix_caching: bool = True
    trust_remote_code: bool = Field(False, description="run code that comes with a model: only of people you trust")

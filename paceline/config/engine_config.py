"""Settings of one worker's engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt

from paceline.config.settings import Settings

UNPLANNED_SLOTS = 16384
Quantization = Literal["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4"]
KVCacheDtype = Literal["auto", "int8"]

ENGINE_OPTIONS = ("trust_remote_code", "quantization", "verify")
"""Fields of `EngineConfig` that are options of workers, too."""


class EngineConfig(Settings):
    """The engine of one target or draft worker."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="auto: as the checkpoint says")
    quantization: Quantization | None = Field(
        None, description="pack a model's matrices at load into this block type of GGUF; None: as stored"
    )
    kv_cache_dtype: KVCacheDtype = Field(
        "auto", description="of keys and values; auto: the model's dtype; int8: for native code, with float32 scales"
    )
    device: str = "cpu"
    tensor_parallel_size: int = Field(1, ge=1, description="ranks: processes that share one model")
    rendezvous: str | None = Field(
        None, description="HOST:PORT at which rank 0 waits for the other ranks; required if there are any"
    )
    threads: int = Field(1, ge=1, description="CPU threads for the model")
    cpus: tuple[NonNegativeInt, ...] | None = Field(
        None, description="CPU cores to which a target is bound; empty: any; None: `paceline serve` chooses"
    )
    slots: int | None = Field(
        None, ge=256, description="positions the KV cache holds, over all requests; None: planned from free memory"
    )
    device_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of a device's memory that planned workers may take, weights included"
    )
    device_workers: tuple[NonNegativeInt, NonNegativeInt] | None = Field(
        None, description="targets and drafts that share the device; None: `paceline serve` counts, or this one alone"
    )
    max_model_len: int | None = Field(None, ge=2, description="longest prompt plus output; None: the model's own")
    max_num_seqs: int = Field(64, ge=1, description="requests that run at once")
    max_num_batched_rows: int = Field(256, ge=8, description="rows of one forward pass")
    enable_prefix_caching: bool = True
    state_snapshots: int = Field(
        32, ge=0, description="prefixes whose state is kept, where a model's layers keep states by request"
    )
    state_snapshot_interval: int = Field(256, ge=16, multiple_of=16, description="tokens between them")
    verify: bool = Field(
        False, description="at the start, compare native code with transformers, and rows alone with rows in company"
    )
    trust_remote_code: bool = Field(False, description="run code that comes with a model: only from authors you trust")

    @property
    def slot_count(self) -> int:
        """`slots`, or a fixed number where none were planned, as for a fake model."""
        return self.slots or UNPLANNED_SLOTS

"""From the options of a target worker to the arguments of vLLM's engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from paceline.config import HEADS, EngineConfig, SpeculativeConfig
from paceline.config.vllm_options import VllmOptions
from paceline.vllm.remote_drafts_settings import DRAFTS_VARIABLE

SAME = {
    "dtype": "dtype",
    "tensor_parallel_size": "tensor_parallel_size",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_rows": "max_num_batched_tokens",
    "enable_prefix_caching": "enable_prefix_caching",
    "trust_remote_code": "trust_remote_code",
}
"""Fields of `EngineConfig` and vLLM's names of them. Those with our default value are left to vLLM."""
ALLOWED = {*SAME, "threads", "cpus", "device"}
OURS = {
    "worker_cls": "paceline.vllm.coupled_worker.CoupledWorker",
    "scheduler_cls": "paceline.vllm.vllm_engine.RecordingScheduler",
    "async_scheduling": False,
    "disable_log_stats": True,
}
"""Not to be changed by the user."""
LOOKUP_KEYS = ("prompt_lookup_", "suffix_decoding_")
"""Beginnings of the fields of `SpeculativeConfig` that lookups follow."""


def engine_arguments(
    model: str,
    config: EngineConfig,
    speculation: SpeculativeConfig,
    options: VllmOptions,
    redis_url: str | None,
    tls_files: Sequence[str] | None,
) -> dict[str, Any]:
    """Raises ValueError for settings that vLLM cannot follow."""
    changed = {name for name in EngineConfig.model_fields if getattr(config, name) != _default(name)}
    if unknown := sorted(changed - ALLOWED):
        raise ValueError(f"{unknown[0]} in --engine-config means nothing to vLLM: see engine_args of --vllm-options")
    if fixed := sorted(OURS.keys() & options.engine_args.keys()):
        raise ValueError(f"engine_args of --vllm-options: {fixed[0]} is {OURS[fixed[0]]}, and cannot be another")
    if "tensor_parallel_size" in options.engine_args:
        raise ValueError("engine_args of --vllm-options: tensor_parallel_size belongs into --engine-config")
    if config.cpus and config.tensor_parallel_size * options.pipeline_parallel_size > 1:
        raise ValueError("cpus in --engine-config is for one rank: set VLLM_CPU_OMP_THREADS_BIND for several")
    ours = {SAME[name]: getattr(config, name) for name in SAME if name in changed}
    drafts = _drafts(speculation, options.hidden_state_layers, redis_url, tls_files)
    additional = {**drafts.pop("additional_config", {}), **options.engine_args.get("additional_config", {})}
    structured = {"structured_outputs_config": {"backend": "guidance"}}  # the grammars are written for it
    return {
        "model": model,
        **structured,
        **ours,
        **drafts,
        **options.engine_args,
        **({"additional_config": additional} if additional else {}),
        **OURS,
    }


def _default(name: str) -> Any:
    return EngineConfig.model_fields[name].default


def _drafts(
    config: SpeculativeConfig, layers: Sequence[int], redis_url: str | None, tls_files: Sequence[str] | None
) -> dict[str, Any]:
    """Speculation with the draft pool. `layers`: whose hidden states drafts read."""
    if not config.enabled:
        return {}
    if (strategy := config.strategy.name) != "coupled":
        raise ValueError(f"vLLM verifies by coupled draws, not by {strategy}")
    if config.draft_schedule != "streamed":
        raise ValueError("draft_schedule in --speculative-config has no meaning to vLLM")
    if config.draft_placement == "target":
        raise ValueError(
            'vLLM drafts in its own process by its own methods: --vllm-options \'{"engine_args": '
            '{"speculative_config": {...}}}\''
        )
    if config.method in HEADS and not layers:
        raise ValueError(f"{config.method} needs hidden states: name its hidden_state_layers in --vllm-options")
    settings: dict[str, Any] = {
        "redis_url": redis_url,
        "lookups": config.beside,
        "hidden_state_layers": layers,
        "row_budget": config.row_budget,
    }
    if not (redis_url or config.beside or os.environ.get(DRAFTS_VARIABLE)):
        raise ValueError(f"no draft workers: give --redis-url, or set {DRAFTS_VARIABLE}=HOST:PORT,...")
    lookup_settings = {name: value for name, value in config if name.startswith(LOOKUP_KEYS)}
    if config.beside:
        settings["lookup_settings"] = lookup_settings
    if tls_files is not None:
        settings |= dict(zip(("tls_cert", "tls_key", "tls_ca"), tls_files, strict=True))
    return {
        "speculative_config": {
            "method": "custom_class",
            "model": "paceline.vllm.RemoteDrafts",
            "num_speculative_tokens": config.num_speculative_tokens,
        },
        "additional_config": {"paceline": settings},
    }

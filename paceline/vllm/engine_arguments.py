"""From the options of a target worker to the arguments of vLLM's engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.config import HEADS, EngineConfig, SpeculativeConfig
from paceline.config.vllm_options import VllmOptions

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
}
"""Not to be changed by the user."""


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
    ours = {SAME[name]: getattr(config, name) for name in SAME if name in changed}
    structured = {"structured_outputs_config": {"backend": "guidance"}}  # the grammars are written for it
    return {
        "model": model,
        **structured,
        **ours,
        **_drafts(speculation, redis_url, tls_files),
        **options.engine_args,
        **OURS,
    }


def _default(name: str) -> Any:
    return EngineConfig.model_fields[name].default


def _drafts(config: SpeculativeConfig, redis_url: str | None, tls_files: Sequence[str] | None) -> dict[str, Any]:
    """Speculation with the draft pool."""
    if not config.enabled:
        return {}
    if config.rejection_sampling_strategy != "coupled":
        raise ValueError(f"vLLM verifies by coupled draws, not by {config.rejection_sampling_strategy}")
    if config.draft_placement == "target":
        raise ValueError(
            'vLLM drafts in its own process by its own methods: --vllm-options \'{"engine_args": '
            '{"speculative_config": {...}}}\''
        )
    if config.method in HEADS:
        raise ValueError(f"{config.method} needs hidden states, which vLLM does not send to draft workers")
    settings: dict[str, Any] = {"redis_url": redis_url, "lookups": config.beside}
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

"""python -m paceline_services.target.vllm_process FD: a target's model process that runs vLLM (`--engine vllm`).

It runs in an environment with vLLM. vLLM's engine is in this process, so that it does not survive it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.drafting import complete_config
from paceline.engine.engine_loop import EngineLoop
from paceline.ipc.gc_heap import freeze_gc_heap
from paceline.ipc.model_process import Ready
from paceline.ipc.pipe import Pipe
from paceline.launcher import StartError
from paceline.model_names import resolve_model
from paceline.vllm.engine_arguments import engine_arguments
from paceline_services.model_entrypoint import as_start_errors, bind_cpus, run_model_process

if TYPE_CHECKING:
    from paceline.vllm.vllm_engine import VllmEngine

log = logging.getLogger(__name__)

TRANSIENT = ("Free memory on device", "Available memory on node")
"""Beginnings of vLLM's errors that another start may not meet: what was killed before gives its memory back late."""


def serve_vllm(pipe: Pipe, options: argparse.Namespace) -> None:
    """Load the model, and run vLLM until the pipe closes."""
    set_environment(options)
    if cpus := options.engine_config.cpus:
        bind_cpus(cpus)
    with as_start_errors(options.speculative_config):
        options.speculative_config = complete_config(options.speculative_config, resolve_model(options.model))
    started_at = time.perf_counter()
    engine = build_engine(options)
    log.info("model loaded", extra={"seconds": time.perf_counter() - started_at, "slots": engine.slots})
    freeze_gc_heap()
    speculation = options.speculative_config
    pipe.send(Ready(engine.info(speculation.method if speculation.enabled else "")))
    EngineLoop(engine, pipe).run()


def build_engine(options: argparse.Namespace) -> VllmEngine:
    """Raises `StartError`, and vLLM's own error where another start may succeed."""
    tls = [options.tls_cert, options.tls_key, options.tls_ca] if options.tls_cert else None
    try:
        arguments = engine_arguments(
            resolve_model(options.model),
            options.engine_config,
            options.speculative_config,
            options.vllm_options,
            options.redis_url,
            tls,
        )
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from paceline.vllm.vllm_engine import VllmEngine

        return VllmEngine(LLMEngine.from_engine_args(EngineArgs(**arguments)))
    except ImportError as error:
        raise StartError(f"vLLM cannot be imported by {sys.executable}: {error}; see docs/vllm.md") from error
    except Exception as error:  # vLLM's errors have no common class
        if str(error).startswith(TRANSIENT):
            raise
        log.debug("vLLM did not start", exc_info=True)
        raise StartError(f"vLLM cannot serve {options.model}: {type(error).__name__}: {error}") from error


def set_environment(options: argparse.Namespace) -> None:
    """Before vLLM is imported. What the user has set stays."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    if options.engine_config.cpus is not None:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cpu_binding(options.engine_config.cpus))
        os.environ.setdefault("OMP_NUM_THREADS", str(options.engine_config.threads))
    _, _, number = options.engine_config.device.partition("cuda:")
    if number:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_device(int(number), os.environ.get("CUDA_VISIBLE_DEVICES"))


def cpu_binding(cpus: Sequence[int]) -> str:
    """As vLLM takes it."""
    return ",".join(map(str, cpus)) or "nobind"


def visible_device(number: int, visible: str | None) -> str:
    """Of the devices that are visible already, the one with this number. Raises `StartError` if it is not there."""
    names = visible.split(",") if visible else [str(number)] * (number + 1)
    if number >= len(names):
        raise StartError(f"device cuda:{number}: CUDA_VISIBLE_DEVICES has {len(names)}")
    return names[number]


if __name__ == "__main__":
    sys.exit(run_model_process("target", serve_vllm))

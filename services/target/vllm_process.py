"""python -m paceline_services.target.vllm_process FD: a target's model process that runs vLLM (`--engine vllm`).

It runs in an environment with vLLM. vLLM's engine is in this process, so that it does not survive it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.drafting import complete_config
from paceline.engine.engine_loop import EngineLoop
from paceline.ipc.gc_heap import freeze_gc_heap
from paceline.ipc.model_process import Ready
from paceline.ipc.pipe import Pipe
from paceline.launcher import FAILED, StartError
from paceline.model_names import resolve_model
from paceline.vllm.engine_arguments import engine_arguments
from paceline_services.model_entrypoint import as_start_errors, bind_cpus, run_model_process

if TYPE_CHECKING:
    from paceline.vllm.vllm_engine import VllmEngine

log = logging.getLogger(__name__)

TRANSIENT = ("Free memory on device", "Available memory on node", "The actor died")
"""Beginnings of vLLM's errors that another start may not meet: what was killed before gives its memory back late, and
a rank or its node may be lost while vLLM starts."""


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
        return start_vllm(arguments)
    except ImportError as error:
        raise StartError(f"vLLM cannot be imported by {sys.executable}: {error}; see docs/vllm.md") from error
    except Exception as error:  # vLLM's errors have no common class
        cause = getattr(error, "cause", error)  # Ray's errors quote the traceback of the actor
        if str(cause).startswith(TRANSIENT):
            raise
        log.debug("vLLM did not start", exc_info=True)
        raise StartError(f"vLLM cannot serve {options.model}: {type(cause).__name__}: {cause}") from error


def start_vllm(arguments: Mapping[str, Any]) -> VllmEngine:
    """Its ranks are processes of this machine, or actors in the placement group of this replica."""
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    from paceline.vllm.vllm_engine import VllmEngine

    group = None
    if arguments.get("distributed_executor_backend") == "ray":
        from paceline.ray_pool.rank_actor import join_placement_group

        group = join_placement_group()
    config = EngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
    config.parallel_config.placement_group = group
    engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
    engine.engine_core.engine_core.model_executor.register_failure_callback(end_without_rank)
    return VllmEngine(engine)


def end_without_rank() -> None:
    """End at once, even in the middle of a step that waits for the rank."""
    log.critical("a rank of vLLM is gone: the target ends as a whole")
    os._exit(FAILED)


def leave(exit_code: int) -> NoReturn:
    """On Ray at once, which ends the ranks: vLLM's own way would take longer than the service waits."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        os._exit(exit_code)
    sys.exit(exit_code)


def set_environment(options: argparse.Namespace) -> None:
    """Before vLLM is imported. What the user has set stays."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    os.environ.setdefault("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "1")
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
    leave(run_model_process("target", serve_vllm))

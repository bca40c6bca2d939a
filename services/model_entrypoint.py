"""The model process of a service: from its end of the pipe to an exit code."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from paceline.config import AUTO, DETECT, EngineConfig, SpeculativeConfig
from paceline.config.engine_config import ENGINE_OPTIONS
from paceline.drafting import Speculator, TargetWeightsProvider, build_speculator
from paceline.ipc.model_process import StartFailed
from paceline.ipc.pipe import Pipe, PipeClosedError
from paceline.launcher import FAILED, StartError
from paceline.model.parallel import RankLostError, RendezvousError
from paceline.model_names import BrokenFileError, ModelNotFoundError
from paceline.telemetry import logs

log = logging.getLogger(__name__)


def run_model_process(kind: str, serve: Callable[[Pipe, argparse.Namespace], None]) -> int:
    """Run a service's model process until its pipe closes, and return its exit code.

    `serve` gets the options of the service. It sends `Ready` once the model is loaded and runs until the pipe closes.
    It may raise `PipeClosedError`, and before `Ready` `StartError` or `ModelNotFoundError`.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the service closes the pipe instead
    with socket.socket(fileno=int(sys.argv[1])) as end:
        pipe = Pipe(end)
        try:
            options = pipe.receive_first(argparse.Namespace)
            logs.configure(kind, options.worker_id, options.log_level.upper())
            given = {name: value for name in ENGINE_OPTIONS if (value := getattr(options, name))}
            options.engine_config = options.engine_config.model_copy(update=given)
            torch.set_num_threads(options.engine_config.threads)
            serve(pipe, options)
        except PipeClosedError:
            return 0
        except (StartError, ModelNotFoundError) as error:
            pipe.send(StartFailed(str(error)))
            return 0
        except (RendezvousError, RankLostError) as error:
            log.critical("%s", error)
            return FAILED  # may succeed once all ranks have been restarted
        except Exception:
            log.critical("the model process failed", exc_info=True)
            return FAILED
        return 0


def bind_cpus(cpus: Sequence[int]) -> None:
    """Run this process on these cores only. If the system refuses, log a warning: it costs only speed."""
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, AttributeError) as error:  # AttributeError: not on this system
        log.warning("not bound to cores %s: %s", ", ".join(map(str, cpus)), error)


def build_configured_speculator(
    speculation: SpeculativeConfig,
    config: EngineConfig,
    target_weights: TargetWeightsProvider,
    target_model: str | None,
) -> Speculator:
    """Raises `StartError`."""
    with as_start_errors(speculation):
        return build_speculator(speculation, config, target_weights, target_model)


@contextmanager
def as_start_errors(speculation: SpeculativeConfig) -> Iterator[None]:
    """Raise errors in a speculator's configuration or checkpoint as `StartError`."""
    try:
        yield
    except (ValueError, OSError, BrokenFileError) as error:
        method = "" if speculation.method in (AUTO, DETECT) else f"{speculation.method} "
        raise StartError(f"the {method}speculator cannot be built: {error}") from error

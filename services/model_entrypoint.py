"""The computing half of a service: from its end of the pipe to an exit code."""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from paceline.config import AUTO, DETECT, EngineConfig, SpeculativeConfig
from paceline.drafting import Speculator, TargetPartsProvider, build_speculator
from paceline.ipc.model_process import StartFailed
from paceline.ipc.pipe import Pipe, PipeClosedError
from paceline.model.parallel.rank_errors import RankLostError, RendezvousError
from paceline.model_names import ModelNotFoundError
from paceline.telemetry import logs
from paceline_services.service_entrypoint import FAILED, ServiceStartError

log = logging.getLogger(__name__)


def run_model_process(kind: str, serve: Callable[[Pipe, argparse.Namespace], None]) -> int:
    """Run a service's compute until its pipe closes, and return its exit code.

    `serve` gets the service's own command line. It is to send `Ready` when it can begin, and to return when the pipe
    closes; it may raise `PipeClosedError`, and until it is ready whatever says why it cannot begin.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the process at the other end says when it is over
    with socket.socket(fileno=int(sys.argv[1])) as end:
        pipe = Pipe(end)
        try:
            options = pipe.receive_first(argparse.Namespace)
            logs.configure(kind, options.worker_id, options.log_level.upper())
            if options.trust_remote_code:
                options.engine_config = options.engine_config.model_copy(update={"trust_remote_code": True})
            torch.set_num_threads(options.engine_config.threads)
            serve(pipe, options)
        except PipeClosedError:
            return 0
        except (ServiceStartError, ModelNotFoundError) as error:
            pipe.send(StartFailed(str(error)))
            return 0
        except (RendezvousError, RankLostError) as error:
            log.critical("%s", error)
            return FAILED  # once all ranks have started again it may come out otherwise
        except Exception:
            log.critical("the compute of the service failed", exc_info=True)
            return FAILED
        return 0


def build_configured_speculator(
    speculation: SpeculativeConfig, config: EngineConfig, lend: TargetPartsProvider, target_model: str | None
) -> Speculator:
    """Raises `ServiceStartError` with what to do."""
    with as_start_errors(speculation):
        return build_speculator(speculation, config, lend, target_model)


@contextmanager
def as_start_errors(speculation: SpeculativeConfig) -> Iterator[None]:
    """What is wrong with a speculator's configuration or checkpoint as a `ServiceStartError`."""
    try:
        yield
    except (ValueError, OSError) as error:
        named = "" if speculation.method in (AUTO, DETECT) else f"{speculation.method} "
        raise ServiceStartError(f"the {named}speculator cannot be built: {error}") from error

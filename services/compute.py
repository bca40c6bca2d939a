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

from paceline.compute.pipe import Pipe, PipeClosedError
from paceline.compute.process import CannotBegin
from paceline.config import AUTO, DETECT, EngineConfig, SpeculativeConfig
from paceline.models import ModelNotFoundError
from paceline.speculators import Lend, Speculator, build
from paceline.telemetry import logs
from paceline.tensor_parallel.errors import MeetingError, RankLostError
from services.process import FAILED, StartError

log = logging.getLogger(__name__)


def run(kind: str, serve: Callable[[Pipe, argparse.Namespace], None]) -> int:
    """Run a service's compute until its pipe closes, and return its exit code.

    `serve` gets the service's own command line. It is to send `Ready` when it can begin, and to return when the pipe
    closes; it may raise `PipeClosedError`, and until it is ready whatever says why it cannot begin.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the process at the other end says when it is over
    with socket.socket(fileno=int(sys.argv[1])) as end:
        pipe = Pipe(end)
        try:
            options = pipe.first(argparse.Namespace)
            logs.configure(kind, options.worker_id, options.log_level.upper())
            if options.trust_remote_code:
                options.engine_config = options.engine_config.model_copy(update={"trust_remote_code": True})
            torch.set_num_threads(options.engine_config.threads)
            serve(pipe, options)
        except PipeClosedError:
            return 0
        except (StartError, ModelNotFoundError) as error:
            pipe.send(CannotBegin(str(error)))
            return 0
        except (MeetingError, RankLostError) as error:
            log.critical("%s", error)
            return FAILED  # once all ranks have started again it may come out otherwise
        except Exception:
            log.critical("the compute of the service failed", exc_info=True)
            return FAILED
        return 0


def build_speculator(
    speculation: SpeculativeConfig, config: EngineConfig, lend: Lend, target_model: str | None
) -> Speculator:
    """Raises `StartError` with what to do."""
    with speculator_errors(speculation):
        return build(speculation, config, lend, target_model)


@contextmanager
def speculator_errors(speculation: SpeculativeConfig) -> Iterator[None]:
    """What is wrong with a speculator's configuration or checkpoint as a `StartError`."""
    try:
        yield
    except (ValueError, OSError) as error:
        named = "" if speculation.method in (AUTO, DETECT) else f"{speculation.method} "
        raise StartError(f"the {named}speculator cannot be built: {error}") from error

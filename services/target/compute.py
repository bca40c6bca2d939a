"""python -m services.target.compute FD: the process in which a target's engine runs."""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
import time

import torch

from paceline.compute.pipe import Pipe, PipeClosedError
from paceline.compute.process import CannotBegin, Ready
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.engine.drafting import Drafting, LocalDrafting, NoDrafting
from paceline.engine.engine import Engine
from paceline.engine.loop import EngineLoop
from paceline.engine.orders import ModelFacts
from paceline.model import Model, load
from paceline.model.probe import row_cost
from paceline.models import ModelNotFoundError
from paceline.speculators import Speculator, build
from paceline.telemetry import logs
from paceline.wire.drafting import RemoteDrafting
from services.process import StartError

log = logging.getLogger(__name__)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process at the other end says when it is over
    pipe = Pipe(socket.socket(fileno=int(sys.argv[1])))
    try:
        serve(pipe, pipe.first(argparse.Namespace))
    except PipeClosedError:
        return 0
    except Exception:
        log.critical("the engine failed", exc_info=True)
        return 1
    return 0


def serve(pipe: Pipe, options: argparse.Namespace) -> None:
    """Load the model, and decode until the pipe closes."""
    logs.configure("target", options.worker_id)
    torch.set_num_threads(options.engine_config.threads)
    try:
        engine = assemble(pipe, options.model, options.engine_config, options.speculative_config)
    except (StartError, ModelNotFoundError) as error:
        pipe.send(CannotBegin(str(error)))
        return
    pipe.send(Ready(facts(engine)))
    EngineLoop(engine, pipe).run()


def assemble(pipe: Pipe, model_name: str, config: EngineConfig, speculation: SpeculativeConfig) -> Engine:
    """Raises `StartError` or `ModelNotFoundError` with what to do."""
    model = load_model(model_name, config)
    drafting = drafting_for(model, pipe, speculation, config)
    return Engine(model, config, speculation, drafting, row_cost(model, config.max_num_batched_rows))


def load_model(name: str, config: EngineConfig) -> Model:
    began = time.perf_counter()
    try:
        model = load(name, config)
    except (ValueError, OSError) as error:
        raise StartError(f"--model {name} cannot be loaded: {error}") from error
    log.info("model loaded", extra={"seconds": time.perf_counter() - began, "slots": model.slots})
    if not model.rows_invariant:
        log.warning("rows are not invariant on this machine: tokens may depend on what else is decoded")
    return model


def drafting_for(model: Model, pipe: Pipe, speculation: SpeculativeConfig, config: EngineConfig) -> Drafting:
    """Who drafts for this target: workers of the pool, a speculator in this process, or nobody.

    Raises `StartError` if a local speculator cannot be built or knows another vocabulary.
    """
    if not speculation.enabled:
        return NoDrafting()
    if speculation.draft_placement == "worker":
        # Only a speculator itself knows what it asks for, and the engine must know before it starts.
        layers = speculator(speculation, config).hidden_state_layers if speculation.method == "custom" else ()
        return RemoteDrafting(pipe, layers)
    local = speculator(speculation, config)
    if local.vocabulary_fingerprint not in ("", model.fingerprint):
        raise StartError(
            f"{local.model} and {model.name} have different vocabularies: "
            f"choose a draft model that shares the target's tokenizer"
        )
    return LocalDrafting(local)


def speculator(speculation: SpeculativeConfig, config: EngineConfig) -> Speculator:
    try:
        return build(speculation, config)
    except (ValueError, OSError) as error:
        raise StartError(f"the {speculation.method} speculator cannot be built: {error}") from error


def facts(engine: Engine) -> ModelFacts:
    model = engine.model
    return ModelFacts(
        fingerprint=model.fingerprint,
        vocabulary_size=model.vocabulary_size,
        max_model_len=model.max_model_len,
        slots=model.slots,
        rows_invariant=model.rows_invariant,
        eos_token_ids=tuple(model.eos_token_ids),
        hidden_state_layers=engine.hidden_layers,
    )


if __name__ == "__main__":
    sys.exit(main())

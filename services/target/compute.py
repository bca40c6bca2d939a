"""python -m services.target.compute FD: the process in which a target's engine runs."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence

from paceline.compute.garbage import settle
from paceline.compute.pipe import Pipe
from paceline.compute.process import Ready
from paceline.config import MAPPING_HINT, EngineConfig, SpeculativeConfig
from paceline.engine.drafting import Drafting, LocalDrafting, NoDrafting
from paceline.engine.engine import Engine
from paceline.engine.loop import EngineLoop
from paceline.engine.orders import ModelFacts
from paceline.model import Model, load, settle_threads
from paceline.model.probe import row_cost
from paceline.speculators import build_beside, completed
from paceline.wire.drafting import RemoteDrafting
from services.compute import build_speculator, run, speculator_errors
from services.process import StartError

log = logging.getLogger(__name__)


def serve(pipe: Pipe, options: argparse.Namespace) -> None:
    """Load the model, and decode until the pipe closes."""
    if cpus := options.engine_config.cpus:
        bind(cpus)
    with speculator_errors(options.speculative_config):
        speculation = completed(options.speculative_config, options.model)
    engine = assemble(pipe, options.model, options.engine_config, speculation)
    settle()
    pipe.send(Ready(facts(engine, speculation)))
    EngineLoop(engine, pipe).run()


def bind(cpus: Sequence[int]) -> None:
    """Compute on these cores only. Without leave to do so, anywhere: it is only slower."""
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, AttributeError) as error:  # not every system can
        log.warning("not bound to cores %s: %s", ", ".join(map(str, cpus)), error)


def assemble(pipe: Pipe, model_name: str, config: EngineConfig, speculation: SpeculativeConfig) -> Engine:
    """Raises `StartError` or `ModelNotFoundError` with what to do."""
    model = load_model(model_name, config)
    drafting = drafting_for(model, pipe, speculation, config)
    cost = row_cost(model, config.max_num_batched_rows)
    beside = [LocalDrafting(each) for each in build_beside(speculation)]
    return Engine(model, config, speculation, drafting, cost, beside=beside)


def load_model(name: str, config: EngineConfig) -> Model:
    began = time.perf_counter()
    try:
        model = load(name, config)
    except (ValueError, OSError) as error:
        raise StartError(f"--model {name} cannot be loaded: {error}") from error
    settle_threads(model)
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
        return RemoteDrafting(pipe)
    local = build_speculator(speculation, config, model.lend, model.name)
    if local.vocabulary_fingerprint not in ("", model.fingerprint):
        raise StartError(
            f"{local.model} and {model.name} have different vocabularies: "
            f"choose a draft model that shares the target's tokenizer, {MAPPING_HINT}"
        )
    return LocalDrafting(local)


def facts(engine: Engine, speculation: SpeculativeConfig) -> ModelFacts:
    model = engine.model
    return ModelFacts(
        fingerprint=model.fingerprint,
        vocabulary_size=model.vocabulary_size,
        max_model_len=min(model.max_model_len, model.slots),  # one request may have no more than all slots
        slots=model.slots,
        rows_invariant=model.rows_invariant,
        eos_token_ids=tuple(model.eos_token_ids),
        layers=model.layers,
        method=speculation.method if speculation.enabled else "",
        numerics=model.numerics,
        rows_per_s=engine.rows_per_s,
    )


if __name__ == "__main__":
    sys.exit(run("target", serve))

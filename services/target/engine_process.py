"""python -m paceline_services.target.engine_process FD: a target's model process, which runs the engine."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from concurrent import futures

from paceline.config import MAPPING_HINT, EngineConfig, SpeculativeConfig
from paceline.drafting import build_lookups, complete_config
from paceline.engine.draft_client import DraftClient, LocalDraftClient, NoDraftClient
from paceline.engine.engine import Engine
from paceline.engine.engine_loop import EngineLoop
from paceline.grammar.grammar_state import GrammarCompiler
from paceline.grammar.grammar_vocabulary import GrammarVocabulary
from paceline.ipc.gc_heap import freeze_gc_heap
from paceline.ipc.model_process import Ready
from paceline.ipc.pipe import Pipe
from paceline.launcher import StartError
from paceline.memory_plan import plan_memory
from paceline.messages import TargetDescription
from paceline.model import Model, limit_torch_threads, load
from paceline.model.kept_row_cost import model_row_cost
from paceline.model_names import BROKEN
from paceline.target_features import all_features
from paceline_services.model_entrypoint import (
    as_start_errors,
    bind_cpus,
    build_configured_speculator,
    run_model_process,
)

log = logging.getLogger(__name__)


def serve_engine(pipe: Pipe, options: argparse.Namespace) -> None:
    """Load the model, and run the engine until the pipe closes."""
    if cpus := options.engine_config.cpus:
        bind_cpus(cpus)
    with as_start_errors(options.speculative_config):
        speculation = complete_config(options.speculative_config, options.model)
    engine = build_engine(pipe, options.model, options.engine_config, speculation)
    freeze_gc_heap()
    pipe.send(Ready(model_facts(engine, speculation)))
    EngineLoop(engine, pipe).run()


def build_engine(pipe: Pipe, model_name: str, config: EngineConfig, speculation: SpeculativeConfig) -> Engine:
    """Raises `StartError` or `ModelNotFoundError`."""
    try:
        here = speculation.draft_placement == "target"
        config = plan_memory(config, speculation, model_name, target=True, draft=here)
    except ValueError as error:
        raise StartError(f"--model {model_name} cannot be loaded: {error}") from error
    vocabulary = GrammarVocabulary.of(model_name)
    making = vocabulary.made  # while the model is loaded
    model = load_model(model_name, config)
    drafting = build_drafting(model, pipe, speculation, config, vocabulary)
    cost = model_row_cost(model, config.max_num_batched_rows, config.threads)
    lookups = [LocalDraftClient(each) for each in build_lookups(speculation)]
    grammars = GrammarCompiler(vocabulary, model.vocabulary_size)
    futures.wait([making])  # a request's first grammar would stop all others for as long
    return Engine(model, config, speculation, drafting, cost, lookup_clients=lookups, grammars=grammars)


def load_model(name: str, config: EngineConfig) -> Model:
    started_at = time.perf_counter()
    try:
        model = load(name, config)
    except (ValueError, OSError) as error:
        raise StartError(f"--model {name} cannot be loaded: {error}") from error
    limit_torch_threads(model)
    log.info("model loaded", extra={"seconds": time.perf_counter() - started_at, "slots": model.slots})
    if not model.rows_invariant:
        log.warning("rows are not invariant on this machine: tokens may depend on the other requests of a batch")
    return model


def build_drafting(
    model: Model, pipe: Pipe, speculation: SpeculativeConfig, config: EngineConfig, vocabulary: GrammarVocabulary
) -> DraftClient:
    """Return the target's draft client: remote workers, a speculator in this process, or none.

    `vocabulary`: of the target.

    Raises `StartError` if a local speculator cannot be built or has another vocabulary.
    """
    if not speculation.enabled:
        return NoDraftClient()
    if speculation.draft_placement == "worker":
        from paceline.wire.remote_draft_client import RemoteDraftClient

        return RemoteDraftClient(pipe)
    try:
        local = build_configured_speculator(speculation, config, model.target_weights, model.name)
    except StartError as error:
        if not isinstance(error.__cause__, BROKEN):
            raise
        log.error("%s: the target serves without it", error)
        return NoDraftClient()
    if local.description.vocabulary_fingerprint not in ("", model.fingerprint):
        raise StartError(
            f"{local.description.model} and {model.name} have different vocabularies: "
            f"choose a draft model that shares the target's tokenizer, {MAPPING_HINT}"
        )
    if local.grammars is not None:
        local.grammars = GrammarCompiler(vocabulary, local.description.vocabulary_size)
    return LocalDraftClient(local)


def model_facts(engine: Engine, speculation: SpeculativeConfig) -> TargetDescription:
    model = engine.model
    return TargetDescription(
        worker_id="",
        model="",
        vocabulary_fingerprint=model.fingerprint,
        vocabulary_size=model.vocabulary_size,
        max_model_len=min(model.max_model_len, model.slots),  # a request cannot use more than all slots
        slots=model.slots,
        rows_invariant=model.rows_invariant,
        eos_token_ids=tuple(model.eos_token_ids),
        layers=model.layers,
        method=speculation.method if speculation.enabled else "",
        numerics=model.numerics,
        rows_per_s=engine.rows_per_s,
        features=all_features(),
        beside=list(speculation.beside),
    )


if __name__ == "__main__":
    sys.exit(run_model_process("target", serve_engine))

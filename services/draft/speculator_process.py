"""python -m paceline_services.draft.speculator_process FD: a draft worker's model process."""

from __future__ import annotations

import argparse
import sys

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.drafting import Speculator, complete_config
from paceline.drafting.draft_loop import DraftLoop
from paceline.ipc.gc_heap import freeze_gc_heap
from paceline.ipc.model_process import Ready
from paceline.ipc.pipe import Pipe
from paceline.launcher import StartError
from paceline.memory_plan import plan_memory
from paceline.model.loading import DTYPES
from paceline.model.target_weights import TargetWeights, load_target_weights
from paceline_services.model_entrypoint import as_start_errors, build_configured_speculator, run_model_process


def serve_speculator(pipe: Pipe, options: argparse.Namespace) -> None:
    """Build the speculator, and run the draft loop until the pipe closes."""
    speculator = load_speculator(options.speculative_config, options.engine_config, options.target_model)
    if speculator.grammars is not None:
        speculator.grammars.prepare()
    freeze_gc_heap()
    pipe.send(Ready(speculator.description))
    DraftLoop(speculator, pipe).run()


def load_speculator(config: SpeculativeConfig, engine: EngineConfig, target_model: str | None) -> Speculator:
    """Build the speculator that a draft worker's configuration describes.

    `target_model`: heads share its embedding and output matrices, and a `vocabulary_mapping` maps to its vocabulary.
    Raises `StartError`.
    """
    with as_start_errors(config):
        speculation = complete_config(config, target_model)

    def target_weights() -> TargetWeights:
        if target_model is None:
            raise StartError(f"--target-model is needed for {speculation.method}: a head drafts for one model only")
        return load_target_weights(target_model, DTYPES.get(engine.dtype), engine.device)

    if engine.tensor_parallel_size not in (1, speculation.draft_tensor_parallel_size):
        raise StartError(
            "--engine-config: tensor_parallel_size is the target's; set draft_tensor_parallel_size for drafts"
        )
    if speculation.vocabulary_mapping != "none" and target_model is None:
        raise StartError("--target-model is needed for a vocabulary_mapping: a draft is mapped to one vocabulary only")
    with as_start_errors(speculation):
        engine = plan_memory(engine, speculation, target_model, target=False, draft=True)
    return build_configured_speculator(speculation, engine, target_weights, target_model)


if __name__ == "__main__":
    sys.exit(run_model_process("draft", serve_speculator))

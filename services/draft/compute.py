"""python -m services.draft.compute FD: the process in which a draft worker's speculator runs."""

from __future__ import annotations

import argparse
import sys

from paceline.compute.garbage import settle
from paceline.compute.pipe import Pipe
from paceline.compute.process import Ready
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.model.lending import Lent, borrow
from paceline.model.loading import DTYPES
from paceline.speculators import Speculator, completed
from paceline.speculators.growing import GrowingLoop, SpeculatorFacts
from services.compute import build_speculator, run, speculator_errors
from services.process import StartError


def serve(pipe: Pipe, options: argparse.Namespace) -> None:
    """Build the speculator, and grow until the pipe closes."""
    speculator = load(options.speculative_config, options.engine_config, options.target_model)
    settle()
    pipe.send(Ready(SpeculatorFacts.of(speculator)))
    GrowingLoop(speculator, pipe).run()


def load(wanted: SpeculativeConfig, engine: EngineConfig, target_model: str | None) -> Speculator:
    """`target_model`: of the target, whose matrices a head borrows, and to whose vocabulary another one is mapped.

    Raises `StartError` with what to do.
    """
    with speculator_errors(wanted):
        speculation = completed(wanted, target_model)

    def lend() -> Lent:
        if target_model is None:
            raise StartError(f"--target-model is needed for {speculation.method}: a head drafts for one model alone")
        return borrow(target_model, DTYPES.get(engine.dtype), engine.device)

    if engine.tensor_parallel_size not in (1, speculation.draft_tensor_parallel_size):
        raise StartError(
            "--engine-config: tensor_parallel_size is the target's; set draft_tensor_parallel_size for drafts"
        )
    if speculation.vocabulary_mapping != "none" and target_model is None:
        raise StartError("--target-model is needed for a vocabulary_mapping: a draft is mapped to one vocabulary alone")
    return build_speculator(speculation, engine, lend, target_model)


if __name__ == "__main__":
    sys.exit(run("draft", serve))

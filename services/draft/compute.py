"""python -m services.draft.compute FD: the process in which a draft worker's speculator runs."""

from __future__ import annotations

import argparse
import sys

from paceline.compute.pipe import Pipe
from paceline.compute.process import Ready
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.speculators import Speculator
from paceline.speculators.growing import GrowingLoop, SpeculatorFacts
from services.compute import build_speculator, run
from services.process import StartError


def serve(pipe: Pipe, options: argparse.Namespace) -> None:
    """Build the speculator, and grow until the pipe closes."""
    speculator = load(options.speculative_config, options.engine_config)
    pipe.send(Ready(SpeculatorFacts.of(speculator)))
    GrowingLoop(speculator, pipe).run()


def load(speculation: SpeculativeConfig, engine: EngineConfig) -> Speculator:
    """Raises `StartError` with what to do."""
    if not speculation.enabled:
        raise StartError('--speculative-config: a draft worker needs a method, such as {"method": "ngram"}')
    return build_speculator(speculation, engine)


if __name__ == "__main__":
    sys.exit(run("draft", serve))

"""python -m paceline_services.rank: a tensor-parallel rank other than 0, which computes with its shard of the model.

Rank 0 is a target or draft worker whose configuration has a tensor_parallel_size and a rendezvous, where the other
ranks learn what to load. Exit codes: see `paceline_services.service_entrypoint`.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Sequence

import torch

from paceline.launcher import COULD_NOT_START, FAILED
from paceline.model.loading import load_shard
from paceline.model.parallel import RankLostError, RendezvousError
from paceline.model.parallel.rendezvous import join_rank_group
from paceline.model.tensor_parallel_model import run_rank
from paceline.model_names import ModelNotFoundError
from paceline.telemetry import logs

log = logging.getLogger(__name__)


def main() -> int:
    options = parse(sys.argv[1:])
    logs.configure("rank", f"{options.rank} of {options.rendezvous}")
    try:
        serve(options)
    except (RendezvousError, RankLostError) as error:
        log.critical("%s", error)
        return FAILED  # may succeed once rank 0 has been restarted
    except (ModelNotFoundError, ValueError, OSError) as error:
        log.critical("rank %d cannot start: %s", options.rank, error)
        return COULD_NOT_START
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="paceline rank", description="One rank of a tensor-parallel model.")
    parser.add_argument("--rendezvous", required=True, metavar="HOST:PORT", help="where rank 0 waits")
    parser.add_argument("--rank", required=True, type=int, help="1 or more; rank 0 is the worker itself")
    parser.add_argument("--device", help="device of this rank; default: the one in rank 0's configuration")
    return parser.parse_args(arguments)


def serve(options: argparse.Namespace) -> None:
    """Join rank 0, load this rank's shard, and run forward passes until rank 0 ends the group."""
    with join_rank_group(options.rendezvous, options.rank, options.device) as (ranks, setup):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # requests may still run: rank 0 ends the group
        torch.set_num_threads(setup.engine.threads)
        shard = load_shard(setup.model, setup.engine, ranks)
        log.info("rank %d of %d has its shard of %s", ranks.rank, ranks.size, setup.model)
        run_rank(shard, ranks)
    log.info("rank %d is done", options.rank)


if __name__ == "__main__":
    sys.exit(main())

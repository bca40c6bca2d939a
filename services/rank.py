"""python -m paceline_services.rank: a rank of a shared model other than 0. It has its part of the model, and nothing
else.

Rank 0 is a target or a draft worker whose configuration has a tensor_parallel_size and a rendezvous; it tells the
others there what to load. Exit codes are those of services, see `paceline_services.service_entrypoint`.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Sequence

import torch

from paceline.model.loading import load_shard
from paceline.model.parallel.rank_errors import RankLostError, RendezvousError
from paceline.model.parallel.rendezvous import join_rank_group
from paceline.model.tensor_parallel_model import run_rank
from paceline.model_names import ModelNotFoundError
from paceline.telemetry import logs
from paceline_services.service_entrypoint import COULD_NOT_START, FAILED

log = logging.getLogger(__name__)


def main() -> int:
    options = parse(sys.argv[1:])
    logs.configure("rank", f"{options.rank} of {options.rendezvous}")
    try:
        serve(options)
    except (RendezvousError, RankLostError) as error:
        log.critical("%s", error)
        return FAILED  # with a rank 0 that has started again it may come out otherwise
    except (ModelNotFoundError, ValueError, OSError) as error:
        log.critical("rank %d cannot start: %s", options.rank, error)
        return COULD_NOT_START
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    known = argparse.ArgumentParser(prog="paceline rank", description="One rank of a shared model.")
    known.add_argument("--rendezvous", required=True, metavar="HOST:PORT", help="where rank 0 waits")
    known.add_argument("--rank", required=True, type=int, help="1 or more; 0 is the worker itself")
    known.add_argument("--device", help="this rank's, if not the one in rank 0's configuration")
    return known.parse_args(arguments)


def serve(options: argparse.Namespace) -> None:
    """From meeting rank 0 until it has no more passes to run."""
    with join_rank_group(options.rendezvous, options.rank, options.device) as (ranks, brief):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # requests may still run: rank 0 says when it is over
        torch.set_num_threads(brief.engine.threads)
        part = load_shard(brief.model, brief.engine, ranks)
        log.info("rank %d of %d has its part of %s", ranks.rank, ranks.size, brief.model)
        run_rank(part, ranks)
    log.info("rank %d is done", options.rank)


if __name__ == "__main__":
    sys.exit(main())

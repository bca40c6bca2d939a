"""How ranks find each other: rank 0 waits at the rendezvous, and tells the others there what to load.

Only rank 0 is configured. So two ranks cannot disagree about the model, its dtype or how many slots there are.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from paceline.config import EngineConfig
from paceline.config.settings import Settings
from paceline.model.parallel.host_port import HostPort
from paceline.model.parallel.rank_errors import RankLostError, RendezvousError
from paceline.model.parallel.rank_monitor import RankMonitor, RankMonitorListener, connect_to_rank_zero, exit_process
from paceline.model.parallel.tensor_parallel_group import TensorParallelGroup

log = logging.getLogger(__name__)

RENDEZVOUS_TIMEOUT_S = 600.0
"""How long ranks wait for each other at the rendezvous, and until all have loaded."""
PASS_TIMEOUT_S = 60.0
"""A rank that is later than this in the middle of a pass is lost."""

LOOPBACK_INTERFACES = ("lo", "lo0")

_CONFIG_KEY, _LIFELINE, _GROUP = "orders", "lifeline", "group"


class RankConfig(Settings):
    """What rank 0 tells the others."""

    model: str
    engine: EngineConfig


class RankGroup:
    """All ranks of a model, as rank 0 holds them together until its process ends, if not before."""

    def __init__(self, ranks: TensorParallelGroup, lifeline: RankMonitor) -> None:
        self.ranks = ranks
        self._lifeline = lifeline
        self._over = False
        atexit.register(self.shutdown)

    def shutdown(self) -> None:
        """End it in order, between two passes; if a rank is lost already, at once."""
        if not self.ranks.lost:
            with suppress(RankLostError):  # then it is lost now
                self.ranks.broadcast_rows(torch.empty(0, dtype=torch.int64))
        if self.ranks.lost:
            self.abort()
        else:
            self._lifeline.close()
            self._end()

    def abort(self) -> None:
        """End it because this rank cannot go on: for the others it is gone. A second time does nothing."""
        self.ranks.lost = True
        if not self._over:
            self._lifeline.abort()
            self._end()

    def _end(self) -> None:
        self._over = True
        atexit.unregister(self.shutdown)
        dist.destroy_process_group()


def create_rank_group(brief: RankConfig) -> RankGroup:
    """Be rank 0: wait for the others. Raises `RendezvousError` if they do not come, ValueError if they could not."""
    engine = brief.engine
    if engine.rendezvous is None:
        raise ValueError(
            "tensor_parallel_size over 1 needs `rendezvous`: HOST:PORT of this process, as the other ranks reach it"
        )
    place, others = HostPort.parse(engine.rendezvous), engine.tensor_parallel_size - 1
    try:
        with RankMonitorListener(place.host) as listener:
            store = _store(place, leads=True)
            store.set(_CONFIG_KEY, brief.model_dump_json())
            store.set(_LIFELINE, str(listener.port))
            log.info("rank 0 waits at %s for %d others", place, others)
            ends = listener.accept(others, RENDEZVOUS_TIMEOUT_S)
    except (OSError, RuntimeError) as error:
        raise RendezvousError(
            f"rank 0 met not all {others} others at {place}: start them, or free it ({error})"
        ) from error
    lifeline = RankMonitor(ends, exit_process)
    try:
        return RankGroup(_init_process_group(place, store, 0, engine), lifeline)
    except BaseException:
        lifeline.abort()
        raise


@contextmanager
def join_rank_group(
    rendezvous: str, rank: int, device: str | None, lost: Callable[[str], None] = exit_process
) -> Iterator[tuple[TensorParallelGroup, RankConfig]]:
    """Be another rank for as long as the context lasts. `device`: this rank's, if not the one that rank 0 names.

    If it ends with an exception, this rank is gone for rank 0. Raises `RendezvousError`, ValueError for a place that is
    none.
    """
    place = HostPort.parse(rendezvous)
    try:
        store = _store(place, leads=False)
        brief = RankConfig.model_validate_json(store.get(_CONFIG_KEY))
        end = connect_to_rank_zero(place.host, int(store.get(_LIFELINE)), rank)
    except ValidationError as error:
        raise RendezvousError(f"rank 0 at {place} is of another version of Paceline: use one for all ranks") from error
    except (OSError, RuntimeError) as error:
        raise RendezvousError(f"rank {rank} is not let in at {place}: start rank 0 there first ({error})") from error
    engine = brief.engine.model_copy(update={} if device is None else {"device": device})
    lifeline = RankMonitor({0: end}, lost)
    try:
        yield _init_process_group(place, store, rank, engine), brief.model_copy(update={"engine": engine})
    except BaseException:
        lifeline.abort()  # not in order: rank 0 may wait for what will not come
        raise
    else:
        lifeline.close()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _store(place: HostPort, *, leads: bool) -> TCPStore:
    return TCPStore(
        place.host,
        place.port,
        is_master=leads,
        wait_for_workers=False,
        timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT_S),
        master_listen_fd=place.listen().detach() if leads else None,  # it would listen on every interface
    )


def _init_process_group(place: HostPort, store: TCPStore, rank: int, engine: EngineConfig) -> TensorParallelGroup:
    device = torch.device(engine.device)
    if device.type == "cuda":
        os.environ["LOCAL_RANK"] = str(device.index or 0)  # transformers loads a shard to this device
        torch.cuda.set_device(device)
    if place.loopback:
        _use_loopback_interface()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore(_GROUP, store),
            rank=rank,
            world_size=engine.tensor_parallel_size,
            timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT_S),
        )
        return TensorParallelGroup.of(device, PASS_TIMEOUT_S)
    except RuntimeError as error:
        raise RendezvousError(f"rank {rank} met the others at {place}, but cannot reach them all: {error}") from error


def _use_loopback_interface() -> None:
    """gloo and nccl listen on an interface of their choice: let that be one that does not lead out of this machine."""
    for _, name in socket.if_nameindex():
        if name in LOOPBACK_INTERFACES:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)

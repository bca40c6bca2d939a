"""How ranks meet: rank 0 waits at the rendezvous and publishes the configuration there.

Only rank 0 is configured, so ranks cannot disagree about the model, its dtype or the number of slots.
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
from paceline.host_port import HostPort
from paceline.model.device_memory import use_device
from paceline.model.parallel import RankLostError, RendezvousError
from paceline.model.parallel.rank_monitor import RankMonitor, RankMonitorListener, connect_to_rank_zero, exit_process
from paceline.model.parallel.tensor_parallel_group import TensorParallelGroup

log = logging.getLogger(__name__)

RENDEZVOUS_TIMEOUT_S = 600.0
"""How long ranks wait for each other to meet, and then to load the model."""
PASS_TIMEOUT_S = 60.0
"""A rank that is later than this within a pass is lost."""

LOOPBACK_INTERFACES = ("lo", "lo0")

_CONFIG_KEY, _MONITOR_PORT_KEY, _GROUP = "config", "monitor_port", "group"


class RankConfig(Settings):
    """What rank 0 publishes for the other ranks."""

    model: str
    engine: EngineConfig


class RankGroup:
    """All ranks of a model, on rank 0. Ends with the process, if not before."""

    def __init__(self, ranks: TensorParallelGroup, monitor: RankMonitor) -> None:
        self.ranks = ranks
        self._monitor = monitor
        self._over = False
        atexit.register(self.shutdown)

    def shutdown(self) -> None:
        """End all ranks in order, between two passes; abort if a rank is lost."""
        if not self.ranks.lost:
            with suppress(RankLostError):  # sets `lost`
                self.ranks.broadcast_rows(torch.empty(0, dtype=torch.int64))
        if self.ranks.lost:
            self.abort()
        else:
            self._monitor.close()
            self._end()

    def abort(self) -> None:
        """End without the other ranks, for which this rank is then lost. A second call does nothing."""
        self.ranks.lost = True
        if not self._over:
            self._monitor.abort()
            self.ranks.abort()
            self._end()

    def _end(self) -> None:
        self._over = True
        atexit.unregister(self.shutdown)
        dist.destroy_process_group()


def create_rank_group(config: RankConfig) -> RankGroup:
    """As rank 0, wait for the other ranks. Raises `RendezvousError` if they do not come, ValueError for a rendezvous
    that is missing or not HOST:PORT."""
    engine = config.engine
    if engine.rendezvous is None:
        raise ValueError(
            "tensor_parallel_size over 1 needs `rendezvous`: HOST:PORT of this process for the other ranks"
        )
    address, others = HostPort.parse(engine.rendezvous), engine.tensor_parallel_size - 1
    try:
        with RankMonitorListener(address.host) as listener:
            store = _store(address, is_rank_zero=True)
            store.set(_CONFIG_KEY, config.model_dump_json())
            store.set(_MONITOR_PORT_KEY, str(listener.port))
            log.info("rank 0 waits at %s for %d others", address, others)
            ends = listener.accept(others, RENDEZVOUS_TIMEOUT_S)
    except (OSError, RuntimeError) as error:
        raise RendezvousError(
            f"rank 0 did not meet all {others} others at {address}: start them, or free the port ({error})"
        ) from error
    monitor = RankMonitor(ends, exit_process)
    try:
        return RankGroup(_init_process_group(address, store, 0, engine), monitor)
    except BaseException:
        monitor.abort()
        raise


@contextmanager
def join_rank_group(
    rendezvous: str, rank: int, device: str | None, lost: Callable[[str], None] = exit_process
) -> Iterator[tuple[TensorParallelGroup, RankConfig]]:
    """Be rank `rank` for as long as the context lasts. `device`: this rank's, if rank 0's configuration has another.

    After an exception in the context rank 0 has lost this rank. Raises `RendezvousError`, and ValueError for a
    rendezvous that is not HOST:PORT.
    """
    address = HostPort.parse(rendezvous)
    try:
        store = _store(address, is_rank_zero=False)
        config = RankConfig.model_validate_json(store.get(_CONFIG_KEY))
        end = connect_to_rank_zero(address.host, int(store.get(_MONITOR_PORT_KEY)), rank)
    except ValidationError as error:
        raise RendezvousError(
            f"rank 0 at {address} runs another version of Paceline: use one version for all ranks"
        ) from error
    except (OSError, RuntimeError) as error:
        raise RendezvousError(f"rank {rank} could not join at {address}: start rank 0 there first ({error})") from error
    engine = config.engine.model_copy(update={} if device is None else {"device": device})
    monitor = RankMonitor({0: end}, lost)
    ranks: TensorParallelGroup | None = None
    try:
        ranks = _init_process_group(address, store, rank, engine)
        yield ranks, config.model_copy(update={"engine": engine})
    except BaseException:
        monitor.abort()  # rank 0 may be waiting for this rank
        if ranks is not None:
            ranks.abort()
        raise
    else:
        monitor.close()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _store(address: HostPort, *, is_rank_zero: bool) -> TCPStore:
    return TCPStore(
        address.host,
        address.port,
        is_master=is_rank_zero,
        wait_for_workers=False,
        timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT_S),
        master_listen_fd=address.listen().detach() if is_rank_zero else None,  # else it listens on every interface
    )


def _init_process_group(address: HostPort, store: TCPStore, rank: int, engine: EngineConfig) -> TensorParallelGroup:
    device = use_device(engine.device)  # before nccl begins on the current one
    if device.type == "cuda":
        os.environ["LOCAL_RANK"] = str(device.index or 0)  # transformers loads a shard to this device
    if address.loopback:
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
        raise RendezvousError(
            f"rank {rank} met the others at {address}, but cannot reach all of them: {error}"
        ) from error


def _use_loopback_interface() -> None:
    """Make gloo and nccl, which choose an interface to listen on, choose loopback."""
    for _, name in socket.if_nameindex():
        if name in LOOPBACK_INTERFACES:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)

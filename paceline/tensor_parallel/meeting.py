"""How ranks find each other: rank 0 waits at the rendezvous, and tells the others there what to load.

Only rank 0 is configured. So two ranks cannot disagree about the model, its dtype or how many slots there are.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from paceline.config import EngineConfig
from paceline.config.settings import Settings
from paceline.tensor_parallel.lifeline import Lifeline, Listener, end_process, reach
from paceline.tensor_parallel.ranks import Ranks

log = logging.getLogger(__name__)

MEET_S = 600.0
"""How long ranks wait for each other at the rendezvous, and until all have loaded."""
PASS_S = 60.0
"""A rank that is later than this in the middle of a pass is lost."""

_ORDERS, _LIFELINE, _GROUP = "orders", "lifeline", "group"


class Brief(Settings):
    """What rank 0 tells the others."""

    model: str
    engine: EngineConfig


class MeetingError(ValueError):
    """The ranks did not come together; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where ranks meet, at rank 0: `HOST:PORT`."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Place:
        """Raises `MeetingError`."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit():
            raise MeetingError(f"rendezvous {text!r} is not HOST:PORT: name rank 0's address, and a port free there")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Replica:
    """All ranks of a model, as rank 0 holds them together until its process ends, if not before."""

    def __init__(self, ranks: Ranks, lifeline: Lifeline) -> None:
        self.ranks = ranks
        self._lifeline = lifeline
        atexit.register(self.leave)

    def leave(self) -> None:
        """End it in order, between two passes; if a rank is lost already, at once."""
        if self.ranks.lost:
            self.abandon()
            return
        self.ranks.send(torch.empty(0, dtype=torch.int64))
        self._lifeline.close()
        self._end()

    def abandon(self) -> None:
        """End it because this rank cannot go on: for the others it is gone."""
        self._lifeline.abandon()
        self._end()

    def _end(self) -> None:
        atexit.unregister(self.leave)
        dist.destroy_process_group()


def lead(brief: Brief) -> Replica:
    """Be rank 0: wait for the others. Raises `MeetingError` if they do not come."""
    engine = brief.engine
    if engine.rendezvous is None:
        raise MeetingError(
            "tensor_parallel_size over 1 needs `rendezvous`: HOST:PORT of this process, as the other ranks reach it"
        )
    place, others = Place.parse(engine.rendezvous), engine.tensor_parallel_size - 1
    listener = Listener()
    try:
        store = _store(place, leads=True)
        store.set(_ORDERS, brief.model_dump_json())
        store.set(_LIFELINE, str(listener.port))
        log.info("rank 0 waits at %s for %d others", place, others)
        ends = listener.accept(others, MEET_S)
    except (OSError, RuntimeError) as error:
        raise MeetingError(
            f"rank 0 met not all {others} others at {place}: start them, or free it ({error})"
        ) from error
    lifeline = Lifeline(ends, end_process)
    return Replica(_grouped(store, 0, engine), lifeline)


@contextmanager
def following(
    rendezvous: str, rank: int, device: str | None, lost: Callable[[str], None] = end_process
) -> Iterator[tuple[Ranks, Brief]]:
    """Be another rank for as long as the context lasts. `device`: this rank's, if not the one that rank 0 names.

    Raises `MeetingError`.
    """
    place = Place.parse(rendezvous)
    try:
        store = _store(place, leads=False)
        brief = Brief.model_validate_json(store.get(_ORDERS))
        end = reach(place.host, int(store.get(_LIFELINE)), rank)
    except ValidationError as error:
        raise MeetingError(f"rank 0 at {place} is of another version of Paceline: use one for all ranks") from error
    except (OSError, RuntimeError) as error:
        raise MeetingError(f"rank {rank} is not let in at {place}: start rank 0 there first ({error})") from error
    engine = brief.engine.model_copy(update={} if device is None else {"device": device})
    lifeline = Lifeline({0: end}, lost)
    try:
        yield _grouped(store, rank, engine), brief.model_copy(update={"engine": engine})
    finally:
        lifeline.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _store(place: Place, *, leads: bool) -> TCPStore:
    return TCPStore(place.host, place.port, is_master=leads, wait_for_workers=False, timeout=timedelta(seconds=MEET_S))


def _grouped(store: TCPStore, rank: int, engine: EngineConfig) -> Ranks:
    device = torch.device(engine.device)
    if device.type == "cuda":
        os.environ["LOCAL_RANK"] = str(device.index or 0)  # transformers loads a shard to this device
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=PrefixStore(_GROUP, store),
        rank=rank,
        world_size=engine.tensor_parallel_size,
        timeout=timedelta(seconds=MEET_S),
    )
    return Ranks.of(device, PASS_S)

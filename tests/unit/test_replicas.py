"""Replicas on doubles of Ray: what one of them does to the others, and when they stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline.cli.supervised_process import StartError as CannotStartError
from paceline.model.parallel.host_port import HostPort
from paceline.ray_pool import target_replica as replicas
from paceline.ray_pool.port_allocator import PortAllocator
from paceline.ray_pool.target_replica import ReplicaSpec, TargetReplica
from paceline_services.service_entrypoint import ServiceStartError
from paceline_services.target.__main__ import parse_options as target_options
from paceline_services.target.ray_replicas import keep_running, parse_pool_options, replica_ranks

PATIENCE_S = 10.0


@dataclass
class Actor:
    """What Ray has of a `RankActor`: every call of it gets no answer, ever."""

    asked: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        actor = self

        class Method:
            def remote(self, *_: object) -> Awaitable[Any]:
                actor.asked.append(name)
                return asyncio.get_running_loop().create_future()

        return Method()


class Group:
    """A placement group for which there is room."""

    async def ready(self) -> None: ...


async def test_a_replica_that_waits_for_its_actor_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to wait for the actor's answer alone."""
    actor, killed, removed = Actor(), list[object](), list[object]()
    monkeypatch.setattr(replicas, "placement_group", lambda *_, **__: Group())
    monkeypatch.setattr(replicas, "remove_placement_group", removed.append)
    monkeypatch.setattr(replicas.ray, "kill", killed.append)
    monkeypatch.setattr(TargetReplica, "_host", lambda *_: actor)
    replica = TargetReplica("replica 1", ReplicaSpec(2, {"CPU": 1.0}, "pack", lambda place: nullcontext(()), 1.0))
    running = asyncio.create_task(replica.run())
    while not actor.asked:
        await asyncio.sleep(0.01)
    replica.stop()
    await asyncio.wait_for(running, PATIENCE_S)
    assert actor.asked == ["place"]
    assert killed == [actor, actor]
    assert len(removed) == 1


class Double(TargetReplica):
    """Runs until it is stopped, or cannot start."""

    async def run(self) -> None:
        if self.name == "bad":
            raise CannotStartError("bad could not start")
        await self._stopping.wait()


def doubles(*names: str) -> list[TargetReplica]:
    return [Double(name, ReplicaSpec(1, {}, "pack", lambda place: nullcontext(()), 1.0)) for name in names]


async def test_a_replica_that_cannot_start_leaves_the_others_alone(caplog: pytest.LogCaptureFixture) -> None:
    stop, (bad, good) = asyncio.Event(), doubles("bad", "good")
    running = asyncio.create_task(keep_running([bad, good], stop))
    async with asyncio.timeout(PATIENCE_S):
        while "bad could not start; 1 others go on" not in caplog.text:
            await asyncio.sleep(0.01)
    assert not running.done()
    assert not good._stopping.is_set()
    stop.set()
    await asyncio.wait_for(running, PATIENCE_S)
    assert good._stopping.is_set()


async def test_none_that_can_start_is_an_error() -> None:
    with pytest.raises(ServiceStartError, match="bad could not start"):
        await asyncio.wait_for(keep_running(doubles("bad", "bad"), asyncio.Event()), PATIENCE_S)


def test_ports_are_shared_by_nobody_on_a_node() -> None:
    ports = PortAllocator(9100)
    with ports.reserve("a") as first:
        with ports.reserve("a") as second, ports.reserve("b") as elsewhere:
            assert (first, second, elsewhere) == (9100, 9101, 9100)
        with ports.reserve("a") as again:
            assert again == 9101
    with PortAllocator(0).reserve("a") as any_port, PortAllocator(0).reserve("a") as another:
        assert any_port == another == 0


def test_replicas_on_one_node_have_ports_of_their_own() -> None:
    told = ["--ray", "local", "--replicas", "2", "--model", "table:64", "--port", "9000", "--metrics-port", "9100"]
    options, rest = parse_pool_options(told)
    ranks = replica_ranks(options, rest)
    with ExitStack() as stack:
        arguments = [stack.enter_context(ranks.rank_zero_command(HostPort(node, 1))) for node in ("a", "a", "b")]
    assert [each[each.index("--host") + 1] for each in arguments] == ["a", "a", "b"]
    found = [target_options(each[2:]) for each in arguments]
    assert [(each.port, each.metrics_port) for each in found] == [(9000, 9100), (9001, 9101), (9000, 9100)]


def test_without_metrics_nobody_serves_any() -> None:
    options, rest = parse_pool_options(["--ray", "local", "--model", "table:64"])
    with replica_ranks(options, rest).rank_zero_command(HostPort("a", 1)) as arguments:
        assert "--metrics-port" not in arguments


@pytest.mark.parametrize("option", ["--worker-id", "--worker", "--advertise", "--host", "--ho"])
def test_what_cannot_be_one_for_all_replicas_is_refused_however_it_is_written(option: str) -> None:
    for written in ([option, "1"], [f"{option}=1"]):
        with pytest.raises(SystemExit):
            parse_pool_options(["--ray", "local", "--model", "table:64", *written])

"""Replicas on doubles of Ray: how they start again and stop, and what a failed one does to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline.cli.supervised_process import Backoff
from paceline.launcher import COULD_NOT_START, StartError
from paceline.model.parallel.host_port import HostPort
from paceline.ray_pool import target_replica as replicas
from paceline.ray_pool.port_allocator import PortAllocator
from paceline.ray_pool.target_replica import ReplicaSpec, TargetReplica
from paceline_services.target.__main__ import parse_options as target_options
from paceline_services.target.ray_replicas import keep_running, parse_pool_options, replica_ranks

PATIENCE_S = 10.0


@dataclass
class Actor:
    """A `RankActor`'s handle whose calls return what a test sets as their result."""

    called: list[str] = field(default_factory=list)
    results: dict[str, asyncio.Future[Any]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        actor = self

        class Method:
            def remote(self, *_: object) -> Awaitable[Any]:
                actor.called.append(name)
                actor.results[name] = asyncio.get_running_loop().create_future()
                return actor.results[name]

        return Method()


class Group:
    """A placement group that is ready at once."""

    async def ready(self) -> None: ...


@dataclass
class FakeCluster:
    """Ray with one `Actor` for all ranks; what was killed and removed."""

    actor: Actor = field(default_factory=Actor)
    killed: list[object] = field(default_factory=list)
    removed: list[object] = field(default_factory=list)

    def replica(self, size: int) -> TargetReplica:
        return TargetReplica("replica 1", ReplicaSpec(size, {"CPU": 1.0}, "pack", lambda _: nullcontext(()), 1.0))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    fake = FakeCluster()
    monkeypatch.setattr(replicas, "placement_group", lambda *_, **__: Group())
    monkeypatch.setattr(replicas, "remove_placement_group", fake.removed.append)
    monkeypatch.setattr(replicas, "RANK_EXIT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(replicas.ray, "kill", fake.killed.append)
    monkeypatch.setattr(TargetReplica, "_start_actor", lambda *_: fake.actor)
    return fake


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_replica_that_waits_for_its_actor_can_be_stopped(cluster: FakeCluster) -> None:
    """A replica once waited for the actor alone."""
    replica = cluster.replica(2)
    running = asyncio.create_task(replica.run())
    await until(lambda: bool(cluster.actor.called))
    replica.stop()
    await asyncio.wait_for(running, PATIENCE_S)
    assert cluster.actor.called == ["rendezvous_address"]
    assert cluster.killed == [cluster.actor] * 2
    assert len(cluster.removed) == 1


async def test_rank_zero_finishes_before_the_replica_ends(cluster: FakeCluster) -> None:
    actor, replica = cluster.actor, cluster.replica(1)
    running = asyncio.create_task(replica.run())
    await until(lambda: actor.called == ["rendezvous_address"])
    actor.results["rendezvous_address"].set_result(HostPort("a", 1))
    await until(lambda: "run" in actor.called)
    replica.stop()
    await until(lambda: "stop" in actor.called)
    assert not cluster.killed
    actor.results["run"].set_result(0)
    await asyncio.wait_for(running, PATIENCE_S)
    assert cluster.killed == [actor]


async def test_a_replica_that_could_not_start_raises_and_one_that_ended_starts_again(cluster: FakeCluster) -> None:
    actor, replica = cluster.actor, cluster.replica(1)
    replica.backoff = Backoff(shortest_s=0.0)
    running = asyncio.create_task(replica.run())
    for code in (1, COULD_NOT_START, 1):
        await until(lambda: bool(actor.called))
        actor.results["rendezvous_address"].set_result(HostPort("a", 1))
        await until(lambda: "run" in actor.called)
        actor.called.clear()
        actor.results["run"].set_result(code)
    await until(lambda: bool(actor.called))
    replica.stop()
    await asyncio.wait_for(running, PATIENCE_S)
    first = asyncio.create_task(cluster.replica(1).run())
    actor.called.clear()
    await until(lambda: bool(actor.called))
    actor.results["rendezvous_address"].set_result(HostPort("a", 1))
    await until(lambda: "run" in actor.called)
    actor.results["run"].set_result(COULD_NOT_START)
    with pytest.raises(StartError, match="replica 1 could not start"):
        await asyncio.wait_for(first, PATIENCE_S)


class FakeReplica(TargetReplica):
    """Runs until it is stopped; one called "bad" cannot start."""

    async def run(self) -> None:
        if self.name == "bad":
            raise StartError("bad could not start")
        await self._stopping.wait()


def fake_replicas(*names: str) -> list[TargetReplica]:
    return [FakeReplica(name, ReplicaSpec(1, {}, "pack", lambda rendezvous: nullcontext(()), 1.0)) for name in names]


async def test_a_replica_that_cannot_start_leaves_the_others_alone(caplog: pytest.LogCaptureFixture) -> None:
    stop, (bad, good) = asyncio.Event(), fake_replicas("bad", "good")
    running = asyncio.create_task(keep_running([bad, good], stop))
    await until(lambda: "bad could not start; 1 others continue" in caplog.text)
    assert not running.done()
    assert not good._stopping.is_set()
    stop.set()
    await asyncio.wait_for(running, PATIENCE_S)
    assert good._stopping.is_set()


async def test_none_that_can_start_is_an_error() -> None:
    with pytest.raises(StartError, match="bad could not start"):
        await asyncio.wait_for(keep_running(fake_replicas("bad", "bad"), asyncio.Event()), PATIENCE_S)


def test_a_port_is_reserved_once_per_node() -> None:
    ports = PortAllocator(9100)
    with ports.reserve("a") as first:
        with ports.reserve("a") as second, ports.reserve("b") as elsewhere:
            assert (first, second, elsewhere) == (9100, 9101, 9100)
        with ports.reserve("a") as again:
            assert again == 9101
    with PortAllocator(0).reserve("a") as any_port, PortAllocator(0).reserve("a") as another:
        assert any_port == another == 0


def test_replicas_on_one_node_have_ports_of_their_own() -> None:
    arguments = ["--ray", "local", "--replicas", "2", "--model", "table:64", "--port", "9000", "--metrics-port", "9100"]
    options, rest = parse_pool_options(arguments)
    ranks = replica_ranks(options, rest)
    with ExitStack() as stack:
        commands = [stack.enter_context(ranks.rank_zero_command(HostPort(node, 1))) for node in ("a", "a", "b")]
    assert [each[each.index("--host") + 1] for each in commands] == ["a", "a", "b"]
    parsed = [target_options(each[2:]) for each in commands]
    assert [(each.port, each.metrics_port) for each in parsed] == [(9000, 9100), (9001, 9101), (9000, 9100)]


def test_no_metrics_port_unless_one_is_given() -> None:
    options, rest = parse_pool_options(["--ray", "local", "--model", "table:64"])
    with replica_ranks(options, rest).rank_zero_command(HostPort("a", 1)) as arguments:
        assert "--metrics-port" not in arguments


@pytest.mark.parametrize("option", ["--worker-id", "--worker", "--advertise", "--host", "--ho"])
def test_options_that_replicas_cannot_share_are_refused(option: str) -> None:
    for written in ([option, "1"], [f"{option}=1"]):
        with pytest.raises(SystemExit):
            parse_pool_options(["--ray", "local", "--model", "table:64", *written])

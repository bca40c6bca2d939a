"""Replicas on doubles of Ray: how they start again and stop, and what a failed one does to the others."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.config.vllm_options import VllmOptions
from paceline.host_port import HostPort
from paceline.launcher import COULD_NOT_START, Backoff, StartError
from paceline.ray_pool import target_replica as replicas
from paceline.ray_pool.target_replica import ReplicaSpec, TargetReplica
from paceline_services.target.__main__ import parse_options as target_options
from paceline_services.target.ray_replicas import keep_running, parse_pool_options, replica_spec
from tests.helpers.waiting import until

PATIENCE_S = 10.0
CPU = {"CPU": 1.0}


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

    async def answer(self, name: str, result: object) -> None:
        """Wait for the call of this name, and set its result."""
        await until(lambda: name in self.called)
        self.called.remove(name)
        self.results[name].set_result(result)


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
        return TargetReplica("replica 1", ReplicaSpec(size, CPU, "pack", size, CPU, lambda _: nullcontext(()), 1.0))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    fake = FakeCluster()
    monkeypatch.setattr(replicas, "placement_group", lambda *_, **__: Group())
    monkeypatch.setattr(replicas, "remove_placement_group", fake.removed.append)
    monkeypatch.setattr(replicas, "RANK_EXIT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(replicas.ray, "kill", fake.killed.append)
    monkeypatch.setattr(TargetReplica, "_start_actor", lambda *_: fake.actor)
    return fake


@asynccontextmanager
async def running(replica: TargetReplica) -> AsyncIterator[asyncio.Task[None]]:
    """It has to end by itself or by `stop`."""
    task = asyncio.create_task(replica.run())
    yield task
    replica.stop()
    await asyncio.wait_for(task, PATIENCE_S)


async def test_a_replica_that_waits_for_its_actor_can_be_stopped(cluster: FakeCluster) -> None:
    """A replica once waited for the actor alone."""
    async with running(cluster.replica(2)):
        await until(lambda: bool(cluster.actor.called))
    assert cluster.actor.called == ["rendezvous_address"]
    assert cluster.killed == [cluster.actor] * 2
    assert len(cluster.removed) == 1


async def test_rank_zero_finishes_before_the_replica_ends(cluster: FakeCluster) -> None:
    replica = cluster.replica(1)
    async with running(replica):
        await cluster.actor.answer("rendezvous_address", HostPort("a", 1))
        await until(lambda: "run" in cluster.actor.called)
        replica.stop()
        await until(lambda: "stop" in cluster.actor.called)
        assert not cluster.killed
        cluster.actor.results["run"].set_result(0)
    assert cluster.killed == [cluster.actor]


async def test_a_replica_that_could_not_start_raises_and_one_that_ended_starts_again(cluster: FakeCluster) -> None:
    replica = cluster.replica(1)
    replica.backoff = Backoff(shortest_s=0.0)
    async with running(replica):
        for code in (1, COULD_NOT_START, 1):
            await cluster.actor.answer("rendezvous_address", HostPort("a", 1))
            await cluster.actor.answer("run", code)
        await until(lambda: bool(cluster.actor.called))
    cluster.actor.called.clear()
    failing = asyncio.create_task(cluster.replica(1).run())
    await cluster.actor.answer("rendezvous_address", HostPort("a", 1))
    await cluster.actor.answer("run", COULD_NOT_START)
    with pytest.raises(StartError, match="replica 1 could not start"):
        await asyncio.wait_for(failing, PATIENCE_S)


class FakeReplica(TargetReplica):
    """Runs until it is stopped; one called "bad" cannot start."""

    async def run(self) -> None:
        if self.name == "bad":
            raise StartError("bad could not start")
        await super().run()


async def test_a_replica_that_cannot_start_leaves_the_others_alone(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless there is no other one."""
    stop, (bad, good) = asyncio.Event(), (FakeReplica(name, cluster.replica(1).spec) for name in ("bad", "good"))
    kept = asyncio.create_task(keep_running([bad, good], stop))
    await until(lambda: "bad could not start; 1 others continue" in caplog.text)
    await until(lambda: bool(cluster.actor.called))
    assert not kept.done()
    assert not cluster.killed
    stop.set()
    await asyncio.wait_for(kept, PATIENCE_S)
    assert cluster.killed == [cluster.actor]
    with pytest.raises(StartError, match="bad could not start"):
        await asyncio.wait_for(keep_running([bad, bad], asyncio.Event()), PATIENCE_S)


@pytest.mark.parametrize(
    ("given", "ports", "metrics_ports"),
    [
        (("--port", "9000", "--metrics-port", "9100"), [9000, 9001, 9000, 9001], [9100, 9101, 9100, 9101]),
        (("--port", "0"), [0] * 4, [None] * 4),
    ],
)
def test_replicas_on_one_node_have_ports_of_their_own(
    given: Sequence[str], ports: list[int], metrics_ports: list[int | None]
) -> None:
    """And metrics ports only if one is given. The port of a rank that has ended is free again."""
    options, rest = parse_pool_options(["--ray", "local", "--model", "table:64", *given])
    ranks = replica_spec(options, rest)
    with ranks.rank_zero_command(HostPort("a", 1)) as first, ExitStack() as stack:
        with ranks.rank_zero_command(HostPort("a", 1)) as second:
            pass
        others = [stack.enter_context(ranks.rank_zero_command(HostPort(node, 1))) for node in ("b", "a")]
    parsed = [target_options(each[2:]) for each in (first, second, *others)]
    assert [each.host for each in parsed] == ["a", "a", "b", "a"]
    assert [each.port for each in parsed] == ports
    assert [each.metrics_port for each in parsed] == metrics_ports


def vllm_spec(device: str = "cuda", tensor: int = 2, **arguments: Any) -> tuple[ReplicaSpec, argparse.Namespace]:
    """A replica with vLLM, and the options of its process."""
    given = ["--engine-config", EngineConfig(threads=3, device=device).model_dump_json()]
    given += ["--vllm-options", VllmOptions(engine_args=arguments).model_dump_json()]
    parsed = parse_pool_options(
        ["--ray", "local", "--tensor-parallel-size", str(tensor), "--model", "m", "--engine", "vllm", *given]
    )
    spec = replica_spec(*parsed)
    with spec.rank_zero_command(HostPort("a", 1)) as command:
        options = target_options(command[2:])
    assert (options.engine_config.tensor_parallel_size, options.engine_config.rendezvous) == (tensor, None)
    assert options.vllm_options.engine_args.items() >= arguments.items()
    assert spec.processes == 1
    return spec, options


@pytest.mark.parametrize(("stages", "bundles"), [(1, 2), (3, 6)])
def test_vllm_places_its_ranks_in_the_bundles(stages: int, bundles: int) -> None:
    """The process that drives them has the threads of the first bundle, and leaves the device to the first rank."""
    spec, options = vllm_spec(pipeline_parallel_size=stages)
    assert (spec.bundles, spec.bundle, spec.process) == (bundles, {"CPU": 3.0, "GPU": 1.0}, {"CPU": 3.0})
    assert options.vllm_options.executor == "ray"


@pytest.mark.parametrize(
    ("given", "bundle"),
    [
        ({"device": "cpu"}, {"CPU": 6.0}),
        ({"device": "cpu", "pipeline_parallel_size": 2}, {"CPU": 12.0}),
        ({"tensor": 1}, {"CPU": 3.0, "GPU": 1.0}),
        ({"distributed_executor_backend": "mp"}, {"CPU": 6.0, "GPU": 2.0}),
    ],
)
def test_without_the_ray_executor_the_ranks_of_vllm_share_a_bundle(
    given: dict[str, Any], bundle: dict[str, float]
) -> None:
    spec, options = vllm_spec(**given)
    assert (spec.bundles, spec.bundle, spec.process) == (1, bundle, bundle)
    assert options.vllm_options.executor != "ray"


@pytest.mark.parametrize("option", ["--worker-id", "--worker", "--advertise", "--host", "--ho"])
def test_options_that_replicas_cannot_share_are_refused(option: str) -> None:
    for written in ([option, "1"], [f"{option}=1"]):
        with pytest.raises(SystemExit):
            parse_pool_options(["--ray", "local", "--model", "table:64", *written])

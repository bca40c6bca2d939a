"""The plan that `paceline serve` makes before it starts a service."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.cpu_affinity import available, cores_by_target
from paceline.cli.deployment import Deployment, DeploymentOptions, plan_deployment
from paceline.cli.supervised_process import Program
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.launcher import StartError

REDIS = "redis://127.0.0.1:6379/0"
FEW = SpeculativeConfig(method="draft_model", model="table:3", vocabulary_mapping="intersection")
PAIR = SpeculativeConfig(method="draft_model", model="table:64:0.5")


def options(program: Program) -> dict[str, Any]:
    """The options of a service's command line; the configurations as objects."""
    given = dict(zip(program.argv[3::2], program.argv[4::2], strict=True))
    return {name.removeprefix("--"): json.loads(v) if v.startswith("{") else v for name, v in given.items()}


def groups(deployment: Deployment) -> list[list[dict[str, Any]]]:
    return [[options(program) for program in group] for group in deployment.programs(REDIS)]


def test_groups_stop_from_the_client_inwards() -> None:
    deployment = plan_deployment(DeploymentOptions("table:64", PAIR, draft_workers=3, target_workers=2))
    modules = [[program.argv[2] for program in group] for group in deployment.programs(REDIS)]
    assert modules == [["paceline_services.gateway"], ["paceline_services.target"] * 2, ["paceline_services.draft"] * 3]


def test_services_share_their_common_options() -> None:
    [[gateway], [target], [draft]] = groups(
        plan_deployment(DeploymentOptions("table:64", PAIR, served_model_name="numbers"))
    )
    assert gateway["served-model-name"] == target["served-model-name"] == "numbers"
    assert gateway["model"] == target["model"] == "table:64"
    assert gateway["redis-url"] == target["redis-url"] == draft["redis-url"] == REDIS
    assert target["speculative-config"] == draft["speculative-config"] == PAIR.model_dump(mode="json")


def test_a_draft_may_advertise_another_address() -> None:
    deployment = plan_deployment(DeploymentOptions("table:64", PAIR, draft_workers=2))
    first, second = deployment.drafts
    advertising = dataclasses.replace(deployment, advertised={second: "10.0.0.9:70"})
    _, _, drafts = groups(advertising)
    assert ["advertise" in draft for draft in drafts] == [False, True]
    assert drafts[1]["advertise"] == "10.0.0.9:70"
    assert drafts[0]["worker-id"] == first


def test_every_worker_has_a_port_and_a_name_of_its_own() -> None:
    """A worker keeps both when it is restarted, so that its peers find it again."""
    deployment = plan_deployment(DeploymentOptions("table:64", PAIR, draft_workers=2, target_workers=2))
    ports = [*deployment.targets.values(), *deployment.drafts.values(), deployment.port]
    assert len(set(ports)) == len(ports)
    assert 0 not in ports
    assert len({*deployment.targets, *deployment.drafts}) == 4
    assert plan_deployment(DeploymentOptions("table:64", PAIR)).targets.keys().isdisjoint(deployment.targets)


@pytest.mark.parametrize(
    ("speculation", "drafts"),
    [
        (PAIR, 2),
        (SpeculativeConfig(method="ngram"), 2),
        (SpeculativeConfig(method="ngram", draft_placement="target"), 0),
        (SpeculativeConfig(), 0),
        (None, 0),
    ],
)
def test_drafts_run_where_the_configuration_says(speculation: SpeculativeConfig | None, drafts: int) -> None:
    assert len(plan_deployment(DeploymentOptions("table:64", speculation, draft_workers=2)).drafts) == drafts


def test_the_shipped_model_comes_with_its_draft() -> None:
    speculation = plan_deployment(DeploymentOptions()).speculation
    assert speculation.method == "draft_model"
    assert speculation.model is not None
    assert Path(speculation.model).name == "pydoc-draft"


def test_a_draft_has_its_own_context_and_device() -> None:
    """The longest context is the target's; a draft model may have fewer positions."""
    speculation = PAIR.model_copy(update={"draft_devices": ("cuda:0", "cuda:1")})
    options_ = DeploymentOptions("table:64", speculation, EngineConfig(max_model_len=128), draft_workers=3)
    [_, [target], drafts] = groups(plan_deployment(options_))
    assert target["engine-config"]["max_model_len"] == 128
    assert target["engine-config"]["device"] == "cpu"
    assert [draft["engine-config"]["max_model_len"] for draft in drafts] == [None] * 3
    assert [draft["engine-config"]["device"] for draft in drafts] == ["cuda:0", "cuda:1", "cuda:0"]


def test_each_model_has_its_own_rendezvous() -> None:
    """Each rank of target and draft has its own device."""
    speculation = PAIR.model_copy(update={"draft_tensor_parallel_size": 3, "draft_devices": ("cuda:4", "cuda:5")})
    engine = EngineConfig(tensor_parallel_size=2, device="cuda")
    deployment = plan_deployment(DeploymentOptions("table:64", speculation, engine, target_workers=2))
    _, targets, drafts = groups(deployment)
    assert [rank.get("rank") for rank in targets] == [None, "1", None, "1"]
    assert [rank.get("rank") for rank in drafts] == [None, "1", "2"]
    configured = [rank["engine-config"] for rank in (targets[0], targets[2], drafts[0])]
    assert [config["tensor_parallel_size"] for config in configured] == [2, 2, 3]
    assert [config["device"] for config in configured] == ["cuda:0", "cuda:2", "cuda:4"]
    others = [rank["device"] for rank in (targets[1], targets[3], *drafts[1:])]
    assert others == ["cuda:1", "cuda:3", "cuda:5", "cuda:4"]
    addresses = [config["rendezvous"] for config in configured]
    assert [rank["rendezvous"] for rank in (targets[1], targets[3], *drafts[1:])] == [*addresses, addresses[2]]
    assert len(set(addresses)) == 3


@pytest.mark.parametrize(
    ("options_", "message"),
    [
        (DeploymentOptions("/nowhere"), r"no model at /nowhere: .*hf download"),
        (DeploymentOptions("table:one"), r"'table:one' names no table model: write"),
        (
            DeploymentOptions("table:64", SpeculativeConfig(method="draft_model", model="/nowhere")),
            r"no model at /nowhere",
        ),
        (
            DeploymentOptions("pydoc", FEW),
            r"the vocabularies of pydoc and its draft table:3 have only 0 tokens in common: choose",
        ),
        (
            DeploymentOptions("table:64", FEW),
            r"the vocabularies of table:64 and its draft table:3 have only 3 tokens in common",
        ),
        (
            DeploymentOptions("pydoc", PAIR),
            r"the vocabularies of pydoc and its draft table:64:0.5 differ: choose a draft",
        ),
        (
            DeploymentOptions("timed:", served_model_name="gpt"),
            r"a timed model is served by a name that begins with 'timed:'",
        ),
        (DeploymentOptions("table:64", host="256.0.0.1"), r"cannot listen on 256.0.0.1:0 .*--port"),
    ],
)
def test_an_impossible_deployment_is_an_error(options_: DeploymentOptions, message: str) -> None:
    with pytest.raises(StartError, match=message):
        plan_deployment(options_)


@pytest.mark.parametrize("mapping", ["intersection", "strings"])
def test_a_draft_of_another_vocabulary_is_taken_if_it_is_mapped(mapping: str) -> None:
    speculation = SpeculativeConfig.model_validate({**PAIR.model_dump(), "vocabulary_mapping": mapping})
    [[_], [_], [draft]] = groups(plan_deployment(DeploymentOptions("table:100", speculation)))
    assert draft["speculative-config"]["vocabulary_mapping"] == mapping
    assert draft["target-model"] == "table:100"


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"cannot listen on 127.0.0.1:{port} .*--port"):
            plan_deployment(DeploymentOptions("table:64", port=port))


def test_the_url_of_a_server_on_all_addresses() -> None:
    deployment = plan_deployment(DeploymentOptions("table:64", host="0.0.0.0"))
    assert deployment.url == f"http://127.0.0.1:{deployment.port}"


@pytest.mark.parametrize(
    ("machine", "targets", "threads", "shares"),
    [
        ([0, 1], 1, 1, [(0,)]),
        ([3, 5, 6, 7], 2, 1, [(3,), (5,)]),
        (range(8), 2, 3, [(0, 1, 2), (3, 4, 5)]),
        ([0, 1], 2, 1, [(), ()]),
        ([0], 1, 1, [()]),
        ([], 1, 1, [()]),
    ],
)
def test_targets_get_cores_if_some_are_left(
    machine: Sequence[int], targets: int, threads: int, shares: list[tuple[int, ...]]
) -> None:
    assert cores_by_target(machine, targets, threads) == shares


@pytest.mark.skipif(len(available()) < 2, reason="needs two cores")
def test_other_processes_keep_off_the_cores_of_targets() -> None:
    """In a process of its own, with one child that is bound already and one that is not."""
    first, *left = available()
    code = f"""
import os, subprocess, sys
from paceline.cli.cpu_affinity import move_off_cores
sleep = [sys.executable, "-c", "input()"]
bound, free = (subprocess.Popen(sleep, stdin=subprocess.PIPE) for _ in range(2))
os.sched_setaffinity(bound.pid, {{{first}}})
move_off_cores([{first}])
print([sorted(os.sched_getaffinity(pid)) for pid in (bound.pid, free.pid, 0)])
move_off_cores({available()})
print(sorted(os.sched_getaffinity(0)))
for child in (bound, free):
    child.communicate(b"\\n")
"""
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output.splitlines() == [str([[first], left, left]), str(left)]


def test_only_targets_are_bound() -> None:
    assert plan_deployment(DeploymentOptions("table:64")).target_cores == [], "a table computes nothing"
    deployment = plan_deployment(
        DeploymentOptions("table:64", SpeculativeConfig(method="ngram"), EngineConfig(cpus=(1,)))
    )
    _, [target], [draft] = deployment.programs("redis://here")
    assert '"cpus":[1]' in " ".join(target.argv)
    assert '"cpus":[]' in " ".join(draft.argv)
    assert deployment.target_cores == [1]


def test_binding_can_be_switched_off() -> None:
    assert plan_deployment(DeploymentOptions("pydoc", engine=EngineConfig(cpus=()))).target_cores == []


def test_only_the_gateway_gets_api_keys() -> None:
    programs = plan_deployment(DeploymentOptions("table:1000", api_keys=Path("keys.json"))).programs(REDIS)
    names = [program.name for stage in programs for program in stage if "--api-keys" in program.argv]
    assert names == ["gateway"]
    assert "keys.json" in programs[0][0].argv
    assert "--api-keys" not in plan_deployment(DeploymentOptions("table:1000")).programs(REDIS)[0][0].argv

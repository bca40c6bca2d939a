"""The plan that `paceline serve` makes before it starts a service."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import serve_command
from paceline.cli.cpu_affinity import available, cores_by_target
from paceline.cli.deployment import (
    LOOPBACK,
    Deployment,
    DeploymentOptions,
    default_speculative_config,
    free_ports,
    plan_deployment,
)
from paceline.cli.supervised_process import Program
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.config.vllm_options import VllmOptions
from paceline.host_port import LISTENING_PORTS
from paceline.launcher import StartError
from paceline.model_names import QWEN_05B, SMOLLM2
from tests.helpers.checkpoints import save_checkpoint

REDIS = "redis://127.0.0.1:6379/0"
FEW = SpeculativeConfig(method="draft_model", model="table:3", vocabulary_mapping="intersection")
PAIR = SpeculativeConfig(method="draft_model", model="table:64:0.5")


def plan(speculation: SpeculativeConfig | None = PAIR, model: str = "table:64", **others: Any) -> Deployment:
    return plan_deployment(DeploymentOptions(model, speculation, **others))


def options(program: Program) -> dict[str, Any]:
    """The options of a service's command line; the configurations as objects."""
    given = dict(zip(program.argv[3::2], program.argv[4::2], strict=True))
    return {name.removeprefix("--"): json.loads(v) if v.startswith("{") else v for name, v in given.items()}


def groups(deployment: Deployment) -> list[list[dict[str, Any]]]:
    return [[options(program) for program in group] for group in deployment.programs(REDIS)]


def test_services_share_their_common_options() -> None:
    """Only the gateway gets API keys and the names of parsers."""
    given = {"api_keys": Path("keys.json"), "tool_call_parser": "hermes", "reasoning_parser": "none"}
    given |= {"generation_config": "none"}
    [[gateway], [target], [draft]] = groups(plan(served_model_name="numbers", **given))
    assert gateway["served-model-name"] == target["served-model-name"] == "numbers"
    assert gateway["model"] == target["model"] == draft["target-model"] == "table:64"
    assert gateway["redis-url"] == target["redis-url"] == draft["redis-url"] == REDIS
    assert target["speculative-config"] == draft["speculative-config"] == PAIR.model_dump(mode="json")
    assert ["api-keys" in each for each in (gateway, target, draft)] == [True, False, False]
    assert gateway["api-keys"] == "keys.json"
    assert (gateway["tool-call-parser"], gateway["reasoning-parser"]) == ("hermes", "none")
    assert gateway["generation-config"] == "none"
    assert "api-keys" not in groups(plan())[0][0]


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_a_parser_that_does_not_exist_is_refused_by_name(option: str) -> None:
    with pytest.raises(StartError, match=f"--{option.replace('_', '-')} herms: choose one of auto, none, "):
        plan(**{option: "herms"})


def test_all_services_send_their_traces_to_one_collector() -> None:
    url = "http://collector:4318"
    [[gateway], targets, drafts] = groups(plan(otlp_traces_endpoint=url, target_workers=2, draft_workers=2))
    assert [each["otlp-traces-endpoint"] for each in (gateway, *targets, *drafts)] == [url] * 5
    assert not any("otlp-traces-endpoint" in each for group in groups(plan()) for each in group)


def test_the_gateway_of_a_demo_knows_its_launcher() -> None:
    [[gateway], *_] = plan().programs(REDIS, Path("launcher"))
    assert options(gateway)["demo-socket"] == "launcher"
    assert "demo-socket" not in groups(plan(demo_page=True))[0][0]


def test_every_worker_has_a_port_and_a_name_of_its_own() -> None:
    """A restarted worker keeps both, so that its peers find it again; a draft may advertise another address."""
    deployment = plan(draft_workers=2, target_workers=2)
    ports = [*deployment.targets.values(), *deployment.drafts.values(), deployment.port]
    assert len({*ports, 0}) == len(ports) + 1
    assert len({*deployment.targets, *deployment.drafts}) == 4
    assert plan().targets.keys().isdisjoint(deployment.targets)
    first, second = deployment.drafts
    _, _, drafts = groups(dataclasses.replace(deployment, advertised={second: "10.0.0.9:70"}))
    assert [(each["worker-id"], each.get("advertise")) for each in drafts] == [(first, None), (second, "10.0.0.9:70")]


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
    assert len(plan(speculation, draft_workers=2).drafts) == drafts


def test_the_shipped_model_comes_with_its_draft() -> None:
    assert plan_deployment(DeploymentOptions()).drafts_named == "draft_model (pydoc-draft), ngram"


def test_any_other_model_looks_up_what_its_texts_repeat(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    deployment = plan_deployment(DeploymentOptions(str(folder)))
    assert (deployment.drafts_named, deployment.drafts) == ("suffix, ngram", {})
    assert plan_deployment(DeploymentOptions(str(folder), vllm=VllmOptions())).drafts_named == "none"
    assert not plan_deployment(DeploymentOptions("table:64")).speculation.enabled


def test_a_demo_page_has_a_worker_to_kill(tmp_path: Path) -> None:
    deployment = plan_deployment(DeploymentOptions(str(save_checkpoint(tmp_path)), demo_page=True))
    assert (deployment.drafts_named, len(deployment.drafts)) == ("suffix", 1)


def test_a_published_model_has_its_head() -> None:
    """In the target's process, beside lookups: alone it does not pay on a CPU."""
    default = default_speculative_config(SMOLLM2)
    assert (default.method, default.model, default.draft_placement) == ("eagle3", "smollm2-135m-eagle3", "target")
    assert default.beside == ("suffix", "ngram")
    assert default_speculative_config(QWEN_05B).method == "suffix"


def test_the_shipped_model_has_its_draft_under_vllm_too() -> None:
    deployment = plan_deployment(DeploymentOptions(vllm=VllmOptions()))
    assert (deployment.speculation.method, len(deployment.drafts)) == ("draft_model", 1)


def test_a_draft_has_its_own_context_and_device() -> None:
    """The longest context is the target's; a draft model may have fewer positions."""
    speculation = PAIR.model_copy(update={"draft_devices": ("cuda:0", "cuda:1")})
    [_, [target], drafts] = groups(plan(speculation, engine=EngineConfig(max_model_len=128), draft_workers=3))
    configured = [
        (each["engine-config"]["max_model_len"], each["engine-config"]["device"]) for each in (target, *drafts)
    ]
    assert configured == [(128, "cpu"), (None, "cuda:0"), (None, "cuda:1"), (None, "cuda:0")]


@pytest.mark.parametrize(
    ("device", "draft", "shared"),
    [
        ("cuda", {}, ["cuda:0"]),
        ("cuda:1", {}, ["cuda:1"]),
        ("cuda", {"draft_devices": ("cuda:1", "cuda:0")}, ["cuda:0"]),
        ("cuda:0", {"draft_devices": ("cuda:1", "cuda:2")}, []),
        ("cuda", {"draft_placement": "target"}, []),
        ("cuda", {"method": "ngram", "model": None}, []),
        ("cpu", {}, []),
    ],
)
def test_a_gpu_of_target_and_draft_is_known(device: str, draft: dict[str, object], shared: list[str]) -> None:
    deployment = plan(PAIR.model_copy(update=draft), engine=EngineConfig(device=device), draft_workers=2)
    assert deployment.shared_accelerators == shared


@pytest.mark.parametrize("device", ["cuda:1", "cpu"])
def test_a_draft_on_its_target_s_gpu_is_warned_about(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two processes alternate there by time slices, never at once."""

    async def served(*_: object) -> int:
        return 0

    monkeypatch.setattr(serve_command, "_serve", served)
    monkeypatch.setattr(serve_command, "_log_to", lambda console: None)
    assert serve_command.serve(DeploymentOptions("table:64", PAIR, EngineConfig(device=device)), None) == 0
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    if device == "cpu":
        assert warnings == []
    else:
        [line] = warnings
        assert "take turns on cuda:1, " in line
        assert 'draft_devices in --speculative-config, or put it into the target with "draft_placement"' in line


def test_each_model_has_its_own_rendezvous() -> None:
    """Each rank of target and draft has its own device."""
    speculation = PAIR.model_copy(update={"draft_tensor_parallel_size": 3, "draft_devices": ("cuda:4", "cuda:5")})
    _, targets, drafts = groups(
        plan(speculation, engine=EngineConfig(tensor_parallel_size=2, device="cuda"), target_workers=2)
    )
    models = [targets[:2], targets[2:], drafts]
    assert [[rank.get("rank") for rank in ranks] for ranks in models] == [[None, "1"], [None, "1"], [None, "1", "2"]]
    configured = [ranks[0]["engine-config"] for ranks in models]
    assert [config["tensor_parallel_size"] for config in configured] == [2, 2, 3]
    devices = [
        [config["device"], *(rank["device"] for rank in ranks[1:])]
        for config, ranks in zip(configured, models, strict=True)
    ]
    assert devices == [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"], ["cuda:4", "cuda:5", "cuda:4"]]
    for config, ranks in zip(configured, models, strict=True):
        assert {rank["rendezvous"] for rank in ranks[1:]} == {config["rendezvous"]}
    assert len({config["rendezvous"] for config in configured}) == 3


@pytest.mark.parametrize(
    ("model", "speculation", "others", "message"),
    [
        ("/nowhere", None, {}, r"no model at /nowhere: .*hf download"),
        ("table:one", None, {}, r"'table:one' names no table model: write"),
        ("table:64", PAIR.model_copy(update={"model": "/nowhere"}), {}, r"no model at /nowhere"),
        ("pydoc", FEW, {}, r"the vocabularies of pydoc and its draft table:3 have only 0 tokens in common: choose"),
        ("table:64", FEW, {}, r"the vocabularies of table:64 and its draft table:3 have only 3 tokens in common"),
        ("pydoc", PAIR, {}, r"the vocabularies of pydoc and its draft table:64:0.5 differ: choose a draft"),
        ("timed:", None, {"served_model_name": "gpt"}, r"a timed model is served by a name that begins with 'timed:'"),
        ("table:64", None, {"host": "256.0.0.1"}, r"cannot listen on 256.0.0.1:0 .*--port"),
    ],
)
def test_an_impossible_deployment_is_an_error(
    model: str, speculation: SpeculativeConfig | None, others: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartError, match=message):
        plan(speculation, model, **others)


@pytest.mark.parametrize("mapping", ["intersection", "strings"])
def test_a_draft_of_another_vocabulary_is_taken_if_it_is_mapped(mapping: str) -> None:
    speculation = SpeculativeConfig.model_validate({**PAIR.model_dump(), "vocabulary_mapping": mapping})
    [[_], [_], [draft]] = groups(plan(speculation, "table:100"))
    assert draft["speculative-config"]["vocabulary_mapping"] == mapping


def test_the_url_of_a_server_on_all_addresses_is_a_local_one() -> None:
    deployment = plan(host="0.0.0.0")
    assert deployment.url == f"http://127.0.0.1:{deployment.port}"


@pytest.mark.parametrize(
    ("machine", "targets", "threads", "shares"),
    [
        ([0, 1], 1, 1, [(0,)]),
        ([3, 5, 6, 7], 2, 1, [(3,), (5,)]),
        (range(8), 2, 3, [(0, 1, 2), (3, 4, 5)]),
        ([0, 1], 2, 1, [(), ()]),
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


def test_only_targets_of_real_models_are_bound() -> None:
    assert plan().target_cores == [], "a table computes nothing"
    assert plan(None, "pydoc", engine=EngineConfig(cpus=())).target_cores == [], "switched off"
    deployment = plan(SpeculativeConfig(method="ngram"), engine=EngineConfig(cpus=(1,)))
    _, [target], [draft] = groups(deployment)
    assert (target["engine-config"]["cpus"], draft["engine-config"]["cpus"]) == ([1], [])
    assert deployment.target_cores == [1]


def test_chosen_ports_differ_and_are_none_that_outgoing_connections_get() -> None:
    port, others = free_ports(LOOPBACK, 0, 9)
    assert len({port, *others}) == 10
    assert all(each in LISTENING_PORTS for each in (port, *others))

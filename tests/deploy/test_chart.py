"""What the chart renders would be taken by Kubernetes, runs commands that exist, and ends in order."""

import argparse
import copy
import itertools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from click import NoSuchOption
from jsonschema import ValidationError
from ray.scripts.scripts import start as ray_start

import paceline
import paceline_services.gateway.__main__ as gateway_service
from paceline.cli.deployment import GRACE_S
from paceline.state.embedded_redis import EmbeddedRedis
from paceline_services.target import ray_replicas
from tests.deploy import combinations, commands
from tests.deploy.helm import (
    CHART,
    ROOT,
    Document,
    RefusedError,
    Values,
    documents,
    merged,
    on_cpus,
    refusal,
    render,
    rendered,
    the,
)
from tests.deploy.pods import command_line, complaints, pod_templates
from tests.deploy.validation import check

CASES = dict(combinations.few())
EIGHT: Values = {"limits": {"nvidia.com/gpu": "8"}}


@pytest.fixture(scope="module")
def charts() -> dict[str, list[Document]]:
    return dict(zip(CASES, rendered(list(CASES.values())), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_kubernetes_would_take_every_object(charts: dict[str, list[Document]], case: str) -> None:
    assert charts[case]
    for document in charts[case]:
        check(document)


@pytest.mark.parametrize(
    ("kind", "name", "path"),
    [
        ("Deployment", "gateway", ("spec", "template", "spec", "nodeSelectors")),
        ("NetworkPolicy", "target", ("spec", "ingres")),
        ("ScaledObject", "draft", ("spec", "minReplicas")),
        ("PrometheusRule", "services", ("spec", "groups", 0, "rulez")),
    ],
)
def test_a_field_that_nobody_knows_is_found(
    charts: dict[str, list[Document]], kind: str, name: str, path: tuple[str | int, ...]
) -> None:
    case = "keda" if kind == "ScaledObject" else "monitoring"
    document = copy.deepcopy(the(kind, name, charts[case]))
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = 1
    with pytest.raises(ValidationError):
        check(document)


@pytest.mark.parametrize("case", CASES)
def test_every_pod_is_restricted_and_its_command_exists(charts: dict[str, list[Document]], case: str) -> None:
    templates = dict(pod_templates(charts[case]))
    assert templates
    for where, template in templates.items():
        assert not list(complaints(template["spec"])), where
        assert not template["spec"]["automountServiceAccountToken"]
    assert sum(commands.parsed(template["spec"]) for template in templates.values()) >= 2


def test_an_option_that_no_service_has_is_refused(charts: dict[str, list[Document]]) -> None:
    pod = copy.deepcopy(the("StatefulSet", "target", charts["cpu"])["spec"]["template"]["spec"])
    pod["containers"][0]["args"].append("--patience=3")
    with pytest.raises(SystemExit):
        commands.parsed(pod)


def container(documents: list[Document], kind: str, name: str) -> Document:
    found: Document = the(kind, name, documents)["spec"]["template"]["spec"]["containers"][0]
    return found


def test_services_are_told_what_the_values_say(charts: dict[str, list[Document]]) -> None:
    gpu = charts["gpu"]
    target = commands.options(container(gpu, "StatefulSet", "target"))
    draft = commands.options(container(gpu, "Deployment", "draft"))
    gateway = commands.options(container(gpu, "Deployment", "gateway"))
    assert target.model == draft.target_model == "/models/llama-70b"
    assert target.served_model_name == "llama-70b"
    assert (gateway.model, gateway.served_model_name) == ([target.model], [target.served_model_name])
    assert target.speculative_config == draft.speculative_config
    assert target.speculative_config.num_speculative_tokens == 6
    assert target.engine_config.device == draft.engine_config.device == "cuda"
    assert target.redis_url == draft.redis_url == gateway.redis_url == "redis://demo-redis:6379/0"
    assert (target.advertise, target.worker_id) == ("10.1.2.3:9000", "demo-0")
    assert gateway.max_body_bytes == 8 * 2**20


def test_gateways_are_told_of_models_of_other_releases() -> None:
    more = [{"path": "/models/llama-8b"}, {"path": "/models/b", "servedName": "tiny"}]
    drawn = render(merged(combinations.GPU, {"gateway": {"moreModels": more, "aliases": {"small": "llama-8b"}}}))
    models, aliases = gateway_service._names(commands.options(container(drawn, "Deployment", "gateway")))
    assert models == [("/models/llama-70b", "llama-70b"), ("/models/llama-8b", "llama-8b"), ("/models/b", "tiny")]
    assert aliases == {"small": "llama-8b"}


def test_limits_are_what_the_values_say() -> None:
    drawn = render(merged(on_cpus(), {"gateway": {"maxQueue": 7}, "target": {"hangSeconds": 900}}))
    assert commands.options(container(drawn, "Deployment", "gateway")).max_queue == 7
    assert commands.options(container(drawn, "StatefulSet", "target")).hang_s == 900
    (on_ray_too,) = [
        template["spec"]["containers"][0]
        for where, template in pod_templates(render(merged(on_ray(2), {"target": {"hangSeconds": 900}})))
        if where.endswith("/head")
    ]
    assert commands.options(on_ray_too).target.hang_s == 900


def test_redis_elsewhere_and_passwords_come_from_secrets(charts: dict[str, list[Document]]) -> None:
    def url(case: str) -> str:
        told = commands.options(container(charts[case], "Deployment", "gateway"))
        assert isinstance(told, argparse.Namespace)
        return str(told.redis_url)

    assert url("external") == "rediss://:secret@redis.example:6380/0"
    assert url("password") == "redis://:secret@demo-redis:6379/0"
    both = [*charts["external"], *charts["password"]]
    assert "secret@" not in yaml.safe_dump_all(both)
    shown = [commands.shown(container) for _, pod in pod_templates(both) for container in pod["spec"]["containers"]]
    assert not any("secret" in words for words in shown if words[0] != "redis-server"), "which hides its own"


def test_a_pod_is_given_the_time_it_takes_to_drain(charts: dict[str, list[Document]]) -> None:
    values = merged(
        on_cpus(), {"gateway": {"drainSeconds": 300, "preStopSeconds": 20}, "target": {"drainSeconds": 200}}
    )
    drawn = render(values)
    for name, kind in (("gateway", "Deployment"), ("target", "StatefulSet")):
        pod = the(kind, name, drawn)["spec"]["template"]["spec"]
        before = pod["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        drain_s = commands.options(pod["containers"][0]).drain_s
        assert drain_s == {"gateway": 300, "target": 200}[name]
        assert pod["terminationGracePeriodSeconds"] >= before + drain_s + GRACE_S


def test_a_rollout_needs_no_spare_accelerator(charts: dict[str, list[Document]]) -> None:
    assert the("Deployment", "draft", charts["gpu"])["spec"]["strategy"]["rollingUpdate"] == {
        "maxUnavailable": 1,
        "maxSurge": 0,
    }


def test_times_of_nothing_are_none_that_kubernetes_refuses() -> None:
    """Neither 0 is in its schemas: 1.30 wants a sleep to last, and every version a probe to fail once."""
    none = {"startupSeconds": 0}
    drawn = render(merged(on_cpus(), {"gateway": {**none, "preStopSeconds": 0}, "target": none, "draft": none}))
    assert "lifecycle" not in container(drawn, "Deployment", "gateway")
    for kind, name in (("Deployment", "gateway"), ("StatefulSet", "target"), ("Deployment", "draft")):
        assert container(drawn, kind, name)["startupProbe"]["failureThreshold"] == 1


def test_probes_ask_what_the_services_answer(charts: dict[str, list[Document]]) -> None:
    gateway = container(charts["cpu"], "Deployment", "gateway")
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/health", "503 while it drains"
    assert gateway["livenessProbe"]["httpGet"]["path"] == "/version", "200 while it drains"
    for kind, name in (("StatefulSet", "target"), ("Deployment", "draft")):
        worker = container(charts["cpu"], kind, name)
        told = commands.options(worker)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert worker[probe]["grpc"] == {"port": told.port}
        assert {port["name"]: port["containerPort"] for port in worker["ports"]} == {
            "grpc": told.port,
            "metrics": told.metrics_port,
        }


def test_certificates_and_keys_are_where_the_options_say(charts: dict[str, list[Document]]) -> None:
    for kind, name in (("Deployment", "gateway"), ("StatefulSet", "target"), ("Deployment", "draft")):
        pod = the(kind, name, charts["tls"])["spec"]["template"]["spec"]
        volumes = {volume["name"]: volume.get("secret", {}).get("secretName") for volume in pod["volumes"]}
        mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
        told = commands.options(pod["containers"][0])
        assert {mounted[str(file.parent)] for file in (told.tls_cert, told.tls_key, told.tls_ca)} == {name}
        if name == "gateway":
            assert mounted[str(told.ssl_certfile.parent)] == mounted[str(told.ssl_keyfile.parent)] == "edge"
            assert mounted[str(told.api_keys.parent)] == "keys"


def test_probes_can_be_answered_with_tls(charts: dict[str, list[Document]]) -> None:
    """The kubelet has no certificate to show to a worker; of a gateway it believes any."""
    gateway = container(charts["tls"], "Deployment", "gateway")
    assert gateway["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    for kind, name in (("StatefulSet", "target"), ("Deployment", "draft")):
        worker = container(charts["tls"], kind, name)
        for probe, path in (("startupProbe", "/health"), ("readinessProbe", "/health"), ("livenessProbe", "/metrics")):
            assert worker[probe]["httpGet"] == {"path": path, "port": "metrics"}, "/health is 503 while it drains"


@pytest.mark.parametrize("case", CASES)
def test_selectors_find_the_pods_they_are_meant_for(charts: dict[str, list[Document]], case: str) -> None:
    labels = {where: template["metadata"]["labels"] for where, template in pod_templates(charts[case])}
    for document in charts[case]:
        spec = document.get("spec", {})
        selector = spec.get("selector") if document["kind"] != "ServiceMonitor" else None
        if selector:
            wanted = selector.get("matchLabels", selector)
            found = [where for where, has in labels.items() if wanted.items() <= has.items()]
            assert len(found) == 1, (document["kind"], document["metadata"]["name"])
    for one, other in itertools.combinations(labels.values(), 2):
        assert one != other


@pytest.mark.parametrize("case", CASES)
def test_what_is_scaled_exists_and_its_replicas_are_not_set_twice(charts: dict[str, list[Document]], case: str) -> None:
    for document in charts[case]:
        if document["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"):
            reference = document["spec"]["scaleTargetRef"]
            name = reference["name"].removeprefix("demo-")
            assert "replicas" not in the(reference["kind"], name, charts[case])["spec"]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "model.path"),
        ({"model": {"path": "pydoc"}}, "speculation"),
        ({"model": {"path": "pydoc", "file": "x"}}, "'file' not allowed"),
        ({"target": {"engine": {"slotz": 1}}}, "'slotz' not allowed"),
        ({"speculation": {"method": "dice"}}, "/speculation/method"),
        ({"gateway": {"httpPort": 0}}, "/gateway/httpPort"),
        (merged(on_cpus(), {"redis": {"enabled": False}}), "redis.external.urlSecret.name"),
        (merged(on_cpus(), {"target": {"tlsSecret": "target"}}), "tlsSecret"),
        (merged(on_cpus(), {"autoscaling": {"kind": "keda"}}), "autoscaling.prometheusUrl"),
        (merged(on_cpus(), {"autoscaling": {"kind": "hpa"}}), "monitoring.enabled"),
        (merged(on_cpus(), {"autoscaling": {"kind": "keda", "prometheusUrl": "http://a"}}), "monitoring.enabled"),
        (merged(on_cpus(), {"target": {"ray": {"ranksPerPod": 2, "enabled": True}}}), "target.ray.ranksPerPod"),
        (
            merged(combinations.GPU, {"target": {"ray": {"enabled": True}, "resources": EIGHT}}),
            "target.resources.limits: a pod has 1 ranks (target.ray.ranksPerPod), and 8 of nvidia.com/gpu",
        ),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(values: dict[str, object], named: str) -> None:
    assert named in refusal(values)


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    code = (
        "import sys, yaml; from helm_python import lint; values = yaml.safe_load(open(sys.argv[2]));"
        "report = lint(sys.argv[1], values, strict=True);"
        "sys.exit(str(report) if report['errors'] or any(m['severity'] > 1 for m in report['messages']) else 0)"
    )
    command = [sys.executable, "-c", code, str(CHART), str(CHART / "values-cpu.yaml")]
    report = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert report.returncode == 0, report.stderr


def test_the_chart_is_of_this_version() -> None:
    told = yaml.safe_load(Path(CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert told["appVersion"] == paceline.__version__


def test_a_key_that_stands_twice_is_found() -> None:
    with pytest.raises(RefusedError, match="twice"):
        documents({"templates/a.yaml": "metadata: {name: a, name: b}"})


def on_ray(ranks: int, ranks_per_pod: int = 1, placement: str = "pack") -> Values:
    """Two replicas on accelerators, as many in a pod as it has ranks."""
    limits = {"nvidia.com/gpu": str(ranks_per_pod)}
    ray = {"enabled": True, "tensorParallelSize": ranks, "ranksPerPod": ranks_per_pod, "placement": placement}
    return merged(combinations.GPU, {"target": {"replicas": 2, "ray": ray, "resources": {"limits": limits}}})


def ranks_group(documents: list[Document]) -> Document:
    (group,) = the("RayCluster", "target", documents)["spec"]["workerGroupSpecs"]
    return dict(group)


def test_a_pool_on_ray_has_a_pod_for_every_rank(charts: dict[str, list[Document]]) -> None:
    cluster = the("RayCluster", "target", charts["ray"])["spec"]
    told = commands.options(cluster["headGroupSpec"]["template"]["spec"]["containers"][0])
    group = ranks_group(charts["ray"])
    assert group["replicas"] == told.replicas * told.tensor_parallel_size == 4
    assert the("PodDisruptionBudget", "target", charts["ray"])["spec"]["minAvailable"] == 3
    assert not any(
        document["kind"] == "StatefulSet" for document in charts["ray"] if "target" in document["metadata"]["name"]
    )


@pytest.mark.parametrize(("ranks_per_pod", "pods"), [(1, 16), (4, 4), (8, 2)])
def test_ranks_that_share_a_pod_share_its_accelerators(ranks_per_pod: int, pods: int) -> None:
    """Between pods there is no NVLink: the ranks of a replica are in one if a machine has eight accelerators."""
    drawn = render(on_ray(8, ranks_per_pod))
    group = ranks_group(drawn)
    assert {group[key] for key in ("replicas", "minReplicas", "maxReplicas")} == {pods}
    assert the("PodDisruptionBudget", "target", drawn)["spec"]["minAvailable"] == pods - 1
    (worker,) = group["template"]["spec"]["containers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == str(ranks_per_pod)


@pytest.mark.parametrize(("device", "threads"), [("cuda", 1), ("cuda", 3), ("cpu", 2)])
def test_a_pod_offers_ray_what_its_ranks_ask_for(device: str, threads: int) -> None:
    """As Ray counts, a pod without a limit has all processors of its machine: every rank would be in the first."""
    drawn = render(merged(on_ray(8, 4), {"target": {"engine": {"device": device, "threads": threads}}}))
    head = the("RayCluster", "target", drawn)["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    options, rest = ray_replicas.parse_pool_options(commands.command_of_shell(command_line(head, commands.POD)[1:]))
    bundle = ray_replicas.replica_ranks(options, rest).bundle
    offered = ranks_group(drawn)["rayStartParams"]
    assert float(offered["num-cpus"]) == 4 * bundle["CPU"]
    assert float(offered["num-gpus"]) == 4 * bundle.get("GPU", 0)


def test_pods_on_ray_are_packed_or_spread_as_the_values_say() -> None:
    packed, spread = (
        ranks_group(render(on_ray(2, placement=placement)))["template"]["spec"] for placement in ("pack", "spread")
    )
    assert "topologySpreadConstraints" not in packed
    (near,) = packed["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert near["podAffinityTerm"]["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "target"
    assert "affinity" not in spread
    assert spread["topologySpreadConstraints"]


def test_a_full_redis_forgets_no_worker() -> None:
    """Registrations expire soonest of all, and come back every second; what requests have committed is kept longest."""
    (pod,) = [each["spec"] for name, each in pod_templates(render(on_cpus())) if name.endswith("-redis")]
    options = pod["containers"][0]["args"]
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", "16mb")
        client.config_set("maxmemory-policy", options[options.index("--maxmemory-policy") + 1])
        for request in range(600):  # of targets that are gone
            client.set(f"old request {request}", "1234," * 4000, ex=3600)
        time.sleep(1.1)  # Redis tells ages by the second
        missing = 0
        for beat in range(30):
            for worker in range(20):
                missing += beat > 0 and client.get(f"worker {worker}") is None
                client.set(f"worker {worker}", "x" * 300, px=5000)
            for request in range(10):
                client.set(f"request {beat} {request}", "1234," * 4000, ex=3600)
            time.sleep(0.05)
        info: Any = client.info()
        assert info["evicted_keys"] > 100
        assert missing == 0


@pytest.mark.parametrize("secret", ["", "ray-token"])
def test_everything_of_ray_asks_for_the_token_if_there_is_one(secret: str) -> None:
    """Whoever may call Ray runs code on every node."""
    drawn = render(merged(on_ray(2), {"target": {"ray": {"tokenSecret": {"name": secret}}}}))
    pods = [template["spec"] for name, template in pod_templates(drawn) if name.startswith("RayCluster/")]
    assert len(pods) == 2
    for pod in pods:
        given = {each["name"]: each for container in pod["containers"] for each in container["env"]}
        assert given.get("RAY_AUTH_MODE", {}).get("value") == ("token" if secret else None)
        reference = {"secretKeyRef": {"name": secret, "key": "token"}} if secret else None
        assert given.get("RAY_AUTH_TOKEN", {}).get("valueFrom") == reference


def test_replicas_on_ray_do_not_share_pods() -> None:
    """Spread over pods with room for several, ranks 0 of two replicas would meet, and want one port for metrics."""
    drawn = render(on_ray(4, 2, placement="spread"))
    head = the("RayCluster", "target", drawn)["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert commands.options(head).placement == "pack"


def test_ray_itself_knows_how_it_is_started(charts: dict[str, list[Document]]) -> None:
    cluster = the("RayCluster", "target", charts["ray"])["spec"]
    script = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["command"][2]
    (line,) = [line for line in script.splitlines() if line.startswith("ray start ")]
    (group,) = cluster["workerGroupSpecs"]
    worker = [f"--{key}" if value == "true" else f"--{key}={value}" for key, value in group["rayStartParams"].items()]
    for arguments in (line.split()[2:], [*worker, "--block"]):
        ray_start.make_context("ray start", list(arguments))  # reads the options, and starts nothing
    with pytest.raises(NoSuchOption):
        ray_start.make_context("ray start", ["--heads"])

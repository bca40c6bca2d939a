"""The rendered chart: accepted by Kubernetes, with commands that the services parse, and an orderly shutdown."""

import copy
import itertools
import subprocess
import sys
import time
from typing import Any

import pytest
import redis
import yaml
from click import NoSuchOption
from jsonschema import ValidationError
from ray.scripts.scripts import start as ray_start

import paceline
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
from tests.deploy.pods import command_line, pod_templates
from tests.deploy.validation import check

CASES = dict(combinations.few())
EIGHT: Values = {"limits": {"nvidia.com/gpu": "8"}}
KINDS = {"gateway": "Deployment", "target": "StatefulSet", "draft": "Deployment"}
"""The kind of each service's object."""
Charts = dict[str, list[Document]]
"""Rendered objects by case."""


@pytest.fixture(scope="module")
def charts() -> Charts:
    return dict(zip(CASES, rendered(list(CASES.values())), strict=True))


def pod_of(documents: list[Document], name: str) -> Document:
    """The pod spec of a service."""
    return dict(the(KINDS[name], name, documents)["spec"]["template"]["spec"])


def container(documents: list[Document], name: str) -> Document:
    return dict(pod_of(documents, name)["containers"][0])


def options(documents: list[Document], name: str) -> Any:
    """A service's options, parsed from its rendered command line."""
    return commands.options(container(documents, name))


@pytest.mark.parametrize("case", CASES)
def test_every_object_is_accepted(charts: Charts, case: str) -> None:
    """By Kubernetes' schemas; its pods are restricted, and the services parse their commands."""
    checked = combinations.Checked()
    for document in charts[case]:
        checked.check(document)
    assert checked.objects
    assert checked.command_lines >= 2
    templates = dict(pod_templates(charts[case]))
    assert not any(template["spec"]["automountServiceAccountToken"] for template in templates.values())


@pytest.mark.parametrize(
    ("kind", "name", "path"),
    [
        ("Deployment", "gateway", ("spec", "template", "spec", "nodeSelectors")),
        ("NetworkPolicy", "target", ("spec", "ingres")),
        ("ScaledObject", "draft", ("spec", "minReplicas")),
        ("PrometheusRule", "services", ("spec", "groups", 0, "rulez")),
    ],
)
def test_an_unknown_field_is_found(charts: Charts, kind: str, name: str, path: tuple[str | int, ...]) -> None:
    case = "keda" if kind == "ScaledObject" else "monitoring"
    document = copy.deepcopy(the(kind, name, charts[case]))
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = 1
    with pytest.raises(ValidationError):
        check(document)


def test_an_unknown_option_is_found(charts: Charts) -> None:
    pod = copy.deepcopy(pod_of(charts["cpu"], "target"))
    pod["containers"][0]["args"].append("--patience=3")
    with pytest.raises(SystemExit):
        commands.parsed(pod)


def test_services_get_the_values(charts: Charts) -> None:
    gateway, target, draft = (options(charts["gpu"], name) for name in KINDS)
    assert target.model == draft.target_model == "/models/llama-70b"
    assert target.served_model_name == "llama-70b"
    assert (gateway.model, gateway.served_model_name) == ([target.model], [target.served_model_name])
    assert target.speculative_config == draft.speculative_config
    assert target.speculative_config.num_speculative_tokens == 6
    assert target.engine_config.device == draft.engine_config.device == "cuda"
    assert target.redis_url == draft.redis_url == gateway.redis_url == "redis://demo-redis:6379/0"
    assert (target.advertise, target.worker_id) == ("10.1.2.3:9000", "demo-0")
    assert gateway.max_body_bytes == 8 * 2**20


def test_gateways_get_models_of_other_releases() -> None:
    more = [{"path": "/models/llama-8b"}, {"path": "/models/b", "servedName": "tiny"}]
    drawn = render(merged(combinations.GPU, {"gateway": {"moreModels": more, "aliases": {"small": "llama-8b"}}}))
    settings = options(drawn, "gateway")
    assert settings.models == {
        "llama-70b": "/models/llama-70b",
        "llama-8b": "/models/llama-8b",
        "tiny": "/models/b",
    }
    assert settings.aliases == {"small": "llama-8b"}


def test_limits_and_times_are_those_of_the_values() -> None:
    """A pod gets the time that it needs to drain."""
    gateway = {"maxQueue": 7, "drainSeconds": 300, "preStopSeconds": 20}
    drawn = render(merged(on_cpus(), {"gateway": gateway, "target": {"drainSeconds": 200, "hangSeconds": 900}}))
    assert options(drawn, "gateway").max_queue == 7
    assert options(drawn, "target").hang_s == 900
    on_ray_too = render(merged(on_ray(2), {"target": {"hangSeconds": 900}}))
    assert commands.options(ray_head(on_ray_too)).target.hang_s == 900
    for name, drain_s, before_s in (("gateway", 300, 20), ("target", 200, 0)):
        pod = pod_of(drawn, name)
        sleep = pod["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {})
        assert (options(drawn, name).drain_s, sleep.get("seconds", 0)) == (drain_s, before_s)
        assert pod["terminationGracePeriodSeconds"] >= before_s + drain_s + GRACE_S


def test_passwords_of_redis_come_from_secrets(charts: Charts) -> None:
    assert options(charts["external"], "gateway").redis_url == "rediss://:secret@redis.example:6380/0"
    assert options(charts["password"], "gateway").redis_url == "redis://:secret@demo-redis:6379/0"
    both = [*charts["external"], *charts["password"]]
    assert "secret@" not in yaml.safe_dump_all(both)
    shown = [commands.shown(container) for _, pod in pod_templates(both) for container in pod["spec"]["containers"]]
    assert not any("secret" in parts for parts in shown if parts[0] != "redis-server"), "which hides its own"


def test_a_rollout_needs_no_spare_accelerator(charts: Charts) -> None:
    strategy = the("Deployment", "draft", charts["gpu"])["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}


def test_zero_times_are_valid_in_kubernetes() -> None:
    """Neither 0 is in its schemas: 1.30 wants a sleep to last, and every version a probe to fail once."""
    none = {"startupSeconds": 0}
    drawn = render(merged(on_cpus(), {"gateway": {**none, "preStopSeconds": 0}, "target": none, "draft": none}))
    assert "lifecycle" not in container(drawn, "gateway")
    for name in KINDS:
        assert container(drawn, name)["startupProbe"]["failureThreshold"] == 1


def test_probes_use_the_services_endpoints(charts: Charts) -> None:
    gateway = container(charts["cpu"], "gateway")
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/health", "503 while it drains"
    assert gateway["livenessProbe"]["httpGet"]["path"] == "/version", "200 while it drains"
    for name in ("target", "draft"):
        worker, parsed = container(charts["cpu"], name), options(charts["cpu"], name)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert worker[probe]["grpc"] == {"port": parsed.port}
        ports = {port["name"]: port["containerPort"] for port in worker["ports"]}
        assert ports == {"grpc": parsed.port, "metrics": parsed.metrics_port}


def test_probes_work_with_tls(charts: Charts) -> None:
    """The kubelet has no certificate for a worker, and accepts any of a gateway."""
    assert container(charts["tls"], "gateway")["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    for name in ("target", "draft"):
        worker = container(charts["tls"], name)
        for probe, path in (("startupProbe", "/health"), ("readinessProbe", "/health"), ("livenessProbe", "/metrics")):
            assert worker[probe]["httpGet"] == {"path": path, "port": "metrics"}, "/health is 503 while it drains"


def test_certificates_and_keys_are_mounted(charts: Charts) -> None:
    for name in KINDS:
        pod, parsed = pod_of(charts["tls"], name), options(charts["tls"], name)
        volumes = {volume["name"]: volume.get("secret", {}).get("secretName") for volume in pod["volumes"]}
        mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
        assert {mounted[str(file.parent)] for file in (parsed.tls_cert, parsed.tls_key, parsed.tls_ca)} == {name}
        if name == "gateway":
            assert mounted[str(parsed.ssl_certfile.parent)] == mounted[str(parsed.ssl_keyfile.parent)] == "edge"
            assert mounted[str(parsed.api_keys.parent)] == "keys"


@pytest.mark.parametrize("case", CASES)
def test_selectors_find_their_pods_alone(charts: Charts, case: str) -> None:
    labels = {name: template["metadata"]["labels"] for name, template in pod_templates(charts[case])}
    for document in charts[case]:
        spec = document.get("spec", {})
        selector = spec.get("selector") if document["kind"] != "ServiceMonitor" else None
        if selector:
            wanted = selector.get("matchLabels", selector)
            found = [name for name, has in labels.items() if wanted.items() <= has.items()]
            assert len(found) == 1, (document["kind"], document["metadata"]["name"])
    for one, other in itertools.combinations(labels.values(), 2):
        assert one != other


@pytest.mark.parametrize("case", CASES)
def test_scaled_objects_exist_and_have_no_replicas_of_their_own(charts: Charts, case: str) -> None:
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
def test_senseless_values_are_refused_by_name(values: dict[str, object], named: str) -> None:
    assert named in refusal(values)


def test_helm_lint_passes() -> None:
    code = (
        "import sys, yaml; from helm_python import lint; values = yaml.safe_load(open(sys.argv[2]));"
        "report = lint(sys.argv[1], values, strict=True);"
        "sys.exit(str(report) if report['errors'] or any(m['severity'] > 1 for m in report['messages']) else 0)"
    )
    command = [sys.executable, "-c", code, str(CHART), str(CHART / "values-cpu.yaml")]
    report = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert report.returncode == 0, report.stderr


def test_the_chart_has_this_version() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["appVersion"] == paceline.__version__


def test_a_duplicate_key_is_found() -> None:
    with pytest.raises(RefusedError, match="twice"):
        documents({"templates/a.yaml": "metadata: {name: a, name: b}"})


def on_ray(ranks: int, ranks_per_pod: int = 1, placement: str = "pack") -> Values:
    """Two replicas on accelerators, one accelerator per rank."""
    limits = {"nvidia.com/gpu": str(ranks_per_pod)}
    ray = {"enabled": True, "tensorParallelSize": ranks, "ranksPerPod": ranks_per_pod, "placement": placement}
    return merged(combinations.GPU, {"target": {"replicas": 2, "ray": ray, "resources": {"limits": limits}}})


def ray_head(documents: list[Document]) -> Document:
    """The head's container."""
    cluster = the("RayCluster", "target", documents)["spec"]
    return dict(cluster["headGroupSpec"]["template"]["spec"]["containers"][0])


def ranks_group(documents: list[Document]) -> Document:
    (group,) = the("RayCluster", "target", documents)["spec"]["workerGroupSpecs"]
    return dict(group)


def test_a_pool_on_ray_has_a_pod_for_every_rank(charts: Charts) -> None:
    drawn = charts["ray"]
    parsed = commands.options(ray_head(drawn))
    assert ranks_group(drawn)["replicas"] == parsed.replicas * parsed.tensor_parallel_size == 4
    assert the("PodDisruptionBudget", "target", drawn)["spec"]["minAvailable"] == 3
    assert not [each for each in drawn if each["kind"] == "StatefulSet" and "target" in each["metadata"]["name"]]


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
def test_a_pod_offers_ray_the_resources_of_its_ranks(device: str, threads: int) -> None:
    """For Ray, a pod without a limit has all processors of its machine: every rank would be in the first pod."""
    drawn = render(merged(on_ray(8, 4), {"target": {"engine": {"device": device, "threads": threads}}}))
    shell = command_line(ray_head(drawn), commands.POD)[1:]
    parsed, rest = ray_replicas.parse_pool_options(commands.command_of_shell(shell))
    bundle = ray_replicas.replica_ranks(parsed, rest).bundle
    offered = ranks_group(drawn)["rayStartParams"]
    assert float(offered["num-cpus"]) == 4 * bundle["CPU"]
    assert float(offered["num-gpus"]) == 4 * bundle.get("GPU", 0)


def test_pods_on_ray_are_packed_or_spread() -> None:
    """Spread over pods of several ranks, ranks 0 of two replicas would share a pod and the port for metrics."""
    packed, spread = (
        ranks_group(render(on_ray(2, placement=placement)))["template"]["spec"] for placement in ("pack", "spread")
    )
    assert "topologySpreadConstraints" not in packed
    (near,) = packed["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert near["podAffinityTerm"]["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "target"
    assert "affinity" not in spread
    assert spread["topologySpreadConstraints"]
    assert commands.options(ray_head(render(on_ray(4, 2, placement="spread")))).placement == "pack"


def test_a_full_redis_forgets_no_worker() -> None:
    """Registrations expire first, and are renewed every second; committed tokens of requests are kept longest."""
    (pod,) = [each["spec"] for name, each in pod_templates(render(on_cpus())) if name.endswith("-redis")]
    options = pod["containers"][0]["args"]
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", "16mb")
        client.config_set("maxmemory-policy", options[options.index("--maxmemory-policy") + 1])
        for request in range(600):  # of dead targets
            client.set(f"old request {request}", "1234," * 4000, ex=3600)
        time.sleep(1.1)  # Redis measures ages in seconds
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
def test_every_ray_pod_requires_the_token(secret: str) -> None:
    """A client of Ray can run code on every node."""
    drawn = render(merged(on_ray(2), {"target": {"ray": {"tokenSecret": {"name": secret}}}}))
    pods = [template["spec"] for name, template in pod_templates(drawn) if name.startswith("RayCluster/")]
    assert len(pods) == 2
    for pod in pods:
        given = {each["name"]: each for container in pod["containers"] for each in container["env"]}
        assert given.get("RAY_AUTH_MODE", {}).get("value") == ("token" if secret else None)
        reference = {"secretKeyRef": {"name": secret, "key": "token"}} if secret else None
        assert given.get("RAY_AUTH_TOKEN", {}).get("valueFrom") == reference


def test_ray_parses_its_own_options(charts: Charts) -> None:
    script = ray_head(charts["ray"])["command"][2]
    (line,) = [line for line in script.splitlines() if line.startswith("ray start ")]
    params = ranks_group(charts["ray"])["rayStartParams"]
    worker = [f"--{key}" if value == "true" else f"--{key}={value}" for key, value in params.items()]
    for arguments in (line.split()[2:], [*worker, "--block"]):
        ray_start.make_context("ray start", list(arguments))  # parses the options only
    with pytest.raises(NoSuchOption):
        ray_start.make_context("ray start", ["--heads"])

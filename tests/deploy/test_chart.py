"""The rendered chart: accepted by Kubernetes, with commands that the services parse, and an orderly shutdown."""

import copy
import itertools
import re
import subprocess
import sys
import time
from functools import cache
from typing import Any

import pytest
import redis
import yaml
from click import NoSuchOption
from jsonschema import ValidationError
from ray.scripts.scripts import start as ray_start

import paceline
from paceline.cli.deployment import GRACE_S
from paceline.config import EngineConfig
from paceline.config.vllm_options import VllmOptions
from paceline.model_names import served_name
from paceline.state.embedded_redis import EmbeddedRedis
from paceline.vllm.engine_arguments import ALLOWED, engine_arguments
from paceline_services.target import ray_replicas
from tests.deploy import pods
from tests.deploy.combinations import CHOICES, GPU, REFUSED, VLLM
from tests.deploy.helm import CHART, ON_CPUS, ROOT, Document, RefusedError, Values, documents, merged, render, the
from tests.deploy.validation import check

CASES = {
    "gpu": GPU,
    **{
        f"{what}={choice}": merged(ON_CPUS, values)
        for what, choices in CHOICES.items()
        for choice, values in choices.items()
        if values and what != "machines"
    },
    "cpu": ON_CPUS,
}
"""Every choice once, with the default of all other topics."""
KINDS = {"gateway": "Deployment", "target": "StatefulSet", "draft": "Deployment"}
"""The kind of each service's object."""


@cache
def chart(case: str) -> list[Document]:
    return render(CASES[case])


def pod_of(documents: list[Document], name: str) -> Document:
    """The pod spec of a service."""
    return dict(the(KINDS[name], name, documents)["spec"]["template"]["spec"])


def container(documents: list[Document], name: str) -> Document:
    return dict(pod_of(documents, name)["containers"][0])


def options(documents: list[Document], name: str) -> Any:
    """A service's options, parsed from its rendered command line."""
    return pods.options(container(documents, name))


@pytest.mark.parametrize("case", CASES)
def test_every_object_is_valid(case: str) -> None:
    assert sum(map(check, chart(case))) >= 2, "at least a gateway and a target"


@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        ("Deployment", "gateway", {"template": {"spec": {"nodeSelectors": 1}}}),
        ("Deployment", "gateway", {"template": {"spec": {"hostPID": True}}}),
        ("NetworkPolicy", "target", {"ingres": 1}),
        ("ScaledObject", "draft", {"minReplicas": 1}),
        ("PrometheusRule", "services", {"groups": [{"name": "a", "rules": [], "rulez": 1}]}),
    ],
)
def test_an_invalid_object_is_found(kind: str, name: str, change: Document) -> None:
    with pytest.raises(ValidationError):
        check(merged(the(kind, name, chart("autoscaling=keda")), {"spec": change}))


def test_an_unknown_option_is_found() -> None:
    document = copy.deepcopy(the("StatefulSet", "target", chart("cpu")))
    document["spec"]["template"]["spec"]["containers"][0]["args"].append("--patience=3")
    with pytest.raises(SystemExit):
        check(document)


def test_services_get_the_values() -> None:
    gateway, target, draft = (options(chart("gpu"), name) for name in KINDS)
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
    settings = options(
        render(merged(GPU, {"gateway": {"moreModels": more, "aliases": {"small": "llama-8b"}}})), "gateway"
    )
    assert settings.models == {"llama-70b": "/models/llama-70b", "llama-8b": "/models/llama-8b", "tiny": "/models/b"}
    assert settings.aliases == {"small": "llama-8b"}


@pytest.mark.parametrize("file", ["llama-3b-Q4_K_M.gguf", "llama-70b-00001-of-00003.gguf", "v1.gguf-folder"])
def test_a_file_is_called_as_paceline_serve_calls_it(file: str) -> None:
    path, other = f"/models/{file}", f"/more/other-{file}"
    drawn = render(merged(GPU, {"model": {"path": path}, "gateway": {"moreModels": [{"path": other}]}}))
    assert options(drawn, "target").served_model_name == served_name(path, None)
    assert options(drawn, "gateway").models == {served_name(each, None): each for each in (path, other)}


def test_a_pod_gets_the_time_that_it_needs_to_drain() -> None:
    drawn = render(
        merged(
            ON_CPUS,
            {
                "gateway": {"maxQueue": 7, "drainSeconds": 300, "preStopSeconds": 20},
                "target": {"drainSeconds": 200, "hangSeconds": 900},
            },
        )
    )
    assert (options(drawn, "gateway").max_queue, options(drawn, "target").hang_s) == (7, 900)
    assert container(drawn, "gateway")["lifecycle"]["preStop"]["sleep"]["seconds"] == 20
    for name, drain_s, before_s in (("gateway", 300, 20), ("target", 200, 0)):
        assert options(drawn, name).drain_s == drain_s
        assert pod_of(drawn, name)["terminationGracePeriodSeconds"] >= before_s + drain_s + GRACE_S


def test_zero_times_are_valid_in_kubernetes() -> None:
    """Neither 0 is in its schemas: 1.30 wants a sleep to last, and every version a probe to fail once."""
    none = {"startupSeconds": 0}
    drawn = render(merged(ON_CPUS, {"gateway": {**none, "preStopSeconds": 0}, "target": none, "draft": none}))
    assert "lifecycle" not in container(drawn, "gateway")
    assert [container(drawn, name)["startupProbe"]["failureThreshold"] for name in KINDS] == [1, 1, 1]


def test_passwords_of_redis_come_from_secrets() -> None:
    external, password = chart("redis=external"), chart("redis=password")
    assert options(external, "gateway").redis_url == "rediss://:secret@redis.example:6380/0"
    assert options(password, "gateway").redis_url == "redis://:secret@demo-redis:6379/0"
    assert "secret@" not in yaml.safe_dump_all([*external, *password])
    shown = [pods.command_line(each) for each in pods.containers([*external, *password])]
    assert not any("secret" in parts for parts in shown if parts[0] != "redis-server"), "which hides its own"


def test_a_rollout_needs_no_spare_accelerator() -> None:
    strategy = the("Deployment", "draft", chart("gpu"))["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}


def test_probes_use_the_services_endpoints() -> None:
    """With TLS, the kubelet has no certificate for a worker, and accepts any of a gateway."""
    gateway = container(chart("cpu"), "gateway")
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/health", "503 while it drains"
    assert gateway["livenessProbe"]["httpGet"]["path"] == "/version", "200 while it drains"
    assert container(chart("tls=on"), "gateway")["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    for name in ("target", "draft"):
        worker, parsed = container(chart("cpu"), name), options(chart("cpu"), name)
        ports = {port["name"]: port["containerPort"] for port in worker["ports"]}
        assert ports == {"grpc": parsed.port, "metrics": parsed.metrics_port}
        for probe, path in (("startupProbe", "/health"), ("readinessProbe", "/health"), ("livenessProbe", "/metrics")):
            assert worker[probe]["grpc"] == {"port": parsed.port}
            with_tls = container(chart("tls=on"), name)[probe]
            assert with_tls["httpGet"] == {"path": path, "port": "metrics"}, "/health is 503 while it drains"


@pytest.mark.parametrize("name", KINDS)
def test_certificates_and_keys_are_mounted(name: str) -> None:
    pod, parsed = pod_of(chart("tls=on"), name), options(chart("tls=on"), name)
    volumes = {volume["name"]: volume.get("secret", {}).get("secretName") for volume in pod["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
    expected = dict.fromkeys((parsed.tls_cert, parsed.tls_key, parsed.tls_ca), name)
    if name == "gateway":
        expected |= {parsed.ssl_certfile: "edge", parsed.ssl_keyfile: "edge", parsed.api_keys: "keys"}
    assert {file: mounted[str(file.parent)] for file in expected} == expected


@pytest.mark.parametrize("case", CASES)
def test_selectors_find_their_pods_alone_and_scaled_objects_have_no_replicas_of_their_own(case: str) -> None:
    labels = [template["metadata"]["labels"] for _, template in pods.pod_templates(chart(case))]
    assert all(one != other for one, other in itertools.combinations(labels, 2))
    for document in chart(case):
        spec = document.get("spec", {})
        if "selector" in spec and document["kind"] != "ServiceMonitor":
            wanted = spec["selector"].get("matchLabels", spec["selector"])
            found = [each for each in labels if wanted.items() <= each.items()]
            assert len(found) == 1, (document["kind"], document["metadata"]["name"])
        if reference := spec.get("scaleTargetRef"):
            scaled = the(reference["kind"], reference["name"].removeprefix("demo-"), chart(case))
            assert "replicas" not in scaled["spec"]


@pytest.mark.parametrize(
    ("base", "values", "named"),
    [
        ({}, {}, "model.path"),
        ({}, {"model": {"path": "pydoc"}}, "speculation"),
        ({}, {"model": {"path": "pydoc", "file": "x"}}, "'file' not allowed"),
        ({}, {"target": {"engine": {"slotz": 1}}}, "'slotz' not allowed"),
        ({}, {"speculation": {"method": "dice"}}, "/speculation/method"),
        (GPU, {"speculation": {"speculative_num_step": 3}}, "speculation"),
        ({}, {"gateway": {"httpPort": 0}}, "/gateway/httpPort"),
        ({}, {"target": {"vllm": {"engineArgs": {"worker_cls": "mine"}}}}, "/target/vllm/engineArgs/worker_cls"),
        ({}, {"draft": {"env": {"OMP_NUM_THREADS": 4}}}, "/draft/env/OMP_NUM_THREADS"),
        (ON_CPUS, {"gateway": {"env": {"POD_NAME": "mine"}}}, "gateway.env: the chart itself sets POD_NAME"),
        (
            {},
            merged(*(CHOICES[what][choice] for what, choice in REFUSED.items())),
            "target.ray.ranksPerPod: on CPUs, vLLM's ranks are in one pod: 2",
        ),
        (ON_CPUS, {"redis": {"enabled": False}}, "redis.external.urlSecret.name"),
        (ON_CPUS, {"target": {"tlsSecret": "target"}}, "tlsSecret"),
        (ON_CPUS, {"autoscaling": {"kind": "keda"}}, "autoscaling.prometheusUrl"),
        (ON_CPUS, {"autoscaling": {"kind": "hpa"}}, "monitoring.enabled"),
        (ON_CPUS, {"autoscaling": {"kind": "keda", "prometheusUrl": "http://a"}}, "monitoring.enabled"),
        (ON_CPUS, {"target": {"ray": {"ranksPerPod": 2, "enabled": True}}}, "target.ray.ranksPerPod"),
        (
            GPU,
            {"target": {"ray": {"enabled": True}, "resources": {"limits": {"nvidia.com/gpu": "8"}}}},
            "target.resources.limits: a pod has 1 ranks (target.ray.ranksPerPod), and 8 of nvidia.com/gpu",
        ),
    ],
)
def test_senseless_values_are_refused_by_name(base: Values, values: Values, named: str) -> None:
    with pytest.raises(RefusedError) as refused:
        render(merged(base, values))
    assert named in str(refused.value)


def test_a_duplicate_key_is_found() -> None:
    with pytest.raises(RefusedError, match="twice"):
        documents({"templates/a.yaml": "metadata: {name: a, name: b}"})


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


def test_a_full_redis_forgets_no_worker() -> None:
    """Registrations expire first, and are renewed every second; committed tokens of requests are kept longest."""
    args = the("StatefulSet", "redis", chart("cpu"))["spec"]["template"]["spec"]["containers"][0]["args"]
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", "16mb")
        client.config_set("maxmemory-policy", args[args.index("--maxmemory-policy") + 1])
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


def vllm_arguments(documents: list[Document]) -> dict[str, Any]:
    """What vLLM's engine is called with."""
    parsed = options(documents, "target")
    assert parsed.engine == "vllm"
    return engine_arguments(
        parsed.model, parsed.engine_config, parsed.speculative_config, parsed.vllm_options, parsed.redis_url, None
    )


def test_vllm_gets_the_values() -> None:
    drawn = chart("engine=vllm")
    assert options(drawn, "target").vllm_options == VllmOptions(
        python=sys.executable, engine_args={"quantization": "fp8"}
    )
    assert vllm_arguments(drawn)["quantization"] == "fp8"
    images = {name: container(drawn, name)["image"].partition(":")[0] for name in KINDS}
    assert images == {"gateway": "paceline-gateway", "target": "paceline-target-vllm", "draft": "paceline-draft"}
    own = options(chart("cpu"), "target")
    assert (own.engine, own.vllm_options) == ("paceline", VllmOptions())


def test_vllm_in_the_only_python_of_an_image() -> None:
    drawn = render(merged(ON_CPUS, {"target": {"vllm": {"enabled": True, "python": ""}}}))
    assert options(drawn, "target").vllm_options.python is None


def test_the_documented_target_with_vllm_is_valid() -> None:
    text = (CHART.parent / "README.md").read_text(encoding="utf-8")
    example, over_pods = map(yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    here = {"target": {"vllm": {"python": sys.executable}}}
    assert ranks_group(render(merged(GPU, over_pods, here)))["replicas"] == 4
    drawn = render(merged(example, here))
    assert sum(map(check, drawn)) == len(KINDS)
    size = vllm_arguments(drawn)["tensor_parallel_size"]
    assert container(drawn, "target")["resources"]["limits"]["nvidia.com/gpu"] == str(size)


def test_the_engine_s_keys_for_vllm_are_those_that_it_takes() -> None:
    every = EngineConfig(
        cpus=(0,), max_model_len=2048, rendezvous="host:1", slots=512, device_workers=(1, 0)
    ).model_dump(mode="json")
    taken = {key: value for key, value in every.items() if key in ALLOWED}
    assert taken.keys() == ALLOWED
    with_vllm = merged(ON_CPUS, {"target": {"vllm": VLLM}})
    vllm_arguments(render(merged(with_vllm, {"target": {"engine": taken}})))
    assert every.keys() - ALLOWED >= {"slots"}
    for key in every.keys() - ALLOWED:
        with pytest.raises(RefusedError, match=rf"target\.engine: {key} means nothing to vLLM"):
            render(merged(with_vllm, {"target": {"engine": {key: every[key]}}}))


ON_RAY = CHOICES["ray"]["on"]
CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def component_pods(documents: list[Document], name: str) -> list[Document]:
    """The pod templates of a service: one, or those of its Ray cluster."""
    return [each for owner, each in pods.pod_templates(documents) if owner.split("/")[1] == f"demo-{name}"]


@pytest.mark.parametrize(("name", "base"), [*((name, {}) for name in KINDS), ("target", ON_RAY)])
def test_pods_get_an_environment_annotations_and_classes(name: str, base: Values) -> None:
    variables = {"NCCL_DEBUG": "INFO", "HOME": "/tmp/$(POD_NAME)", "OMP_NUM_THREADS": "4"}
    given = {"env": variables, "podAnnotations": {"mesh/inject": "false"}}
    classes = {"priorityClassName": "high", "runtimeClassName": "nvidia"}
    drawn = render(merged(ON_CPUS, base, {name: {**given, **classes}}))
    for document in drawn:
        check(document)
    for other in KINDS:
        found = component_pods(drawn, other)
        assert len(found) == (2 if base and other == "target" else 1)
        for pod in found:
            (one,) = pod["spec"]["containers"]
            names = [each["name"] for each in one["env"]]
            assert len({*names}) == len(names), "Kubernetes would take the last one, and Helm 4 none"
            assert (pods.environment(one)["HOME"] == "/tmp/demo-0") == (other == name)
            assert (pods.environment(one).get("NCCL_DEBUG") == "INFO") == (other == name)
            assert pod["metadata"].get("annotations") == (given["podAnnotations"] if other == name else None)
            assert (classes.items() <= pod["spec"].items()) == (other == name)


@pytest.mark.parametrize(("name", "base"), [("target", {}), ("draft", {}), ("target", ON_RAY)])
def test_workers_get_shared_memory_and_a_place_for_what_they_compile(name: str, base: Values) -> None:
    drawn = render(merged(ON_CPUS, base, {name: {"sharedMemory": "8Gi", "cacheClaimName": "compiled"}}))
    for document in drawn:
        check(document)
    for pod in component_pods(drawn, name):
        (one,), volumes = pod["spec"]["containers"], {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        mounted = {mount["mountPath"]: mount for mount in one["volumeMounts"]}
        shared = volumes[mounted["/dev/shm"]["name"]]
        assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
        compiled = volumes[mounted["/cache"]["name"]]
        assert compiled["persistentVolumeClaim"] == {"claimName": "compiled"}
        assert not mounted["/cache"].get("readOnly")
        folders = [pods.environment(one)[variable] for variable in CACHES]
        assert len({*folders}) == len(CACHES)
        assert all(folder.startswith("/cache/") for folder in folders)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_without_a_claim_caches_are_in_the_writable_folder(name: str) -> None:
    """They are below HOME or in /tmp as long as no variable moves them."""
    drawn = render(merged(ON_CPUS, {"target": {"vllm": VLLM}}))
    one = container(drawn, name)
    mounted = {mount["mountPath"] for mount in one["volumeMounts"]}
    assert pods.environment(one)["HOME"] == "/tmp"
    assert "/tmp" in mounted
    assert not {"/cache", "/dev/shm"} & mounted
    assert not {*CACHES} & pods.environment(one).keys()


def on_ray(ranks: int, ranks_per_pod: int = 1, **target: Any) -> list[Document]:
    """Two replicas on accelerators, one accelerator per rank."""
    limits = {"nvidia.com/gpu": str(ranks_per_pod)}
    ray = {"enabled": True, "tensorParallelSize": ranks, "ranksPerPod": ranks_per_pod}
    return render(
        merged(GPU, {"target": {"replicas": 2, "ray": ray, "resources": {"limits": limits}}}, {"target": target})
    )


def ray_head(documents: list[Document]) -> Document:
    """The head's container."""
    cluster = the("RayCluster", "target", documents)["spec"]
    return dict(cluster["headGroupSpec"]["template"]["spec"]["containers"][0])


def ranks_group(documents: list[Document]) -> Document:
    (group,) = the("RayCluster", "target", documents)["spec"]["workerGroupSpecs"]
    return dict(group)


@pytest.mark.parametrize(("ranks", "ranks_per_pod", "count"), [(2, 1, 4), (8, 1, 16), (8, 4, 4), (8, 8, 2)])
def test_a_pool_on_ray_has_a_pod_for_every_rank_or_for_several(ranks: int, ranks_per_pod: int, count: int) -> None:
    """Between pods there is no NVLink: the ranks of a replica are in one if a machine has eight accelerators."""
    drawn = on_ray(ranks, ranks_per_pod, hangSeconds=900)
    group, parsed = ranks_group(drawn), pods.options(ray_head(drawn))
    assert {group[key] for key in ("replicas", "minReplicas", "maxReplicas")} == {count}
    assert parsed.replicas * parsed.tensor_parallel_size == ranks_per_pod * count
    assert parsed.target.hang_s == 900
    assert the("PodDisruptionBudget", "target", drawn)["spec"]["minAvailable"] == count - 1
    (worker,) = group["template"]["spec"]["containers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == str(ranks_per_pod)
    assert "demo-target" not in {each["metadata"]["name"] for each in drawn if each["kind"] == "StatefulSet"}


@pytest.mark.parametrize(("device", "threads"), [("cuda", 1), ("cuda", 3), ("cpu", 2)])
def test_a_pod_offers_ray_the_resources_of_its_ranks(device: str, threads: int) -> None:
    """For Ray, a pod without a limit has all processors of its machine: every rank would be in the first pod."""
    drawn = on_ray(8, 4, engine={"device": device, "threads": threads})
    bundle = ray_replicas.replica_spec(*ray_replicas.parse_pool_options(pods.pool_arguments(ray_head(drawn)))).bundle
    offered = ranks_group(drawn)["rayStartParams"]
    assert float(offered["num-cpus"]) == 4 * bundle["CPU"]
    assert float(offered["num-gpus"]) == 4 * bundle.get("GPU", 0)


def test_vllm_on_ray_has_a_bundle_for_each_of_its_ranks() -> None:
    vllm = {**VLLM, "engineArgs": {"pipeline_parallel_size": 2}}
    drawn = on_ray(4, 2, vllm=vllm)
    group, head = ranks_group(drawn), ray_head(drawn)
    spec = ray_replicas.replica_spec(*ray_replicas.parse_pool_options(pods.pool_arguments(head)))
    assert (spec.bundles, spec.processes) == (8, 1)
    assert group["replicas"] == 2 * spec.bundles / 2
    assert {each["image"] for each in (head, *group["template"]["spec"]["containers"])} == {
        container(chart("engine=vllm"), "target")["image"]
    }


def test_pods_on_ray_are_packed_or_spread() -> None:
    """Spread over pods of several ranks, ranks 0 of two replicas would share a pod and the port for metrics."""
    packed = ranks_group(on_ray(2))["template"]["spec"]
    assert "topologySpreadConstraints" not in packed
    (near,) = packed["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert near["podAffinityTerm"]["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "target"
    drawn = on_ray(4, 2, ray={"placement": "spread"})
    spread = ranks_group(drawn)["template"]["spec"]
    assert "affinity" not in spread
    assert spread["topologySpreadConstraints"]
    assert pods.options(ray_head(drawn)).placement == "pack"


@pytest.mark.parametrize("secret", ["", "ray-token"])
def test_every_ray_pod_requires_the_token(secret: str) -> None:
    """A client of Ray can run code on every node."""
    drawn = on_ray(2, ray={"tokenSecret": {"name": secret}})
    on_nodes = [each for each in pods.containers(drawn) if each["name"] in ("ray-head", "ray-worker")]
    assert len(on_nodes) == 2
    for each in on_nodes:
        given = {variable["name"]: variable for variable in each["env"]}
        assert given.get("RAY_AUTH_MODE", {}).get("value") == ("token" if secret else None)
        reference = {"secretKeyRef": {"name": secret, "key": "token"}} if secret else None
        assert given.get("RAY_AUTH_TOKEN", {}).get("valueFrom") == reference


def test_ray_parses_its_own_options() -> None:
    (line,) = [line for line in ray_head(chart("ray=on"))["command"][2].splitlines() if line.startswith("ray start ")]
    params = ranks_group(chart("ray=on"))["rayStartParams"]
    worker = [f"--{key}" if value == "true" else f"--{key}={value}" for key, value in params.items()]
    for arguments in (line.split()[2:], [*worker, "--block"]):
        ray_start.make_context("ray start", list(arguments))  # parses the options only
    with pytest.raises(NoSuchOption):
        ray_start.make_context("ray start", ["--heads"])

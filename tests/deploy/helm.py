"""Charts rendered by Helm's own engine.

Helm is a Go library, whose runtime would stay in the process that loads it. So it runs in a process of its own, which
reads values as JSON lines and returns the manifests or Helm's error for each. It starts with the first rendering, and
ends with its parent process.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "k8s" / "paceline"
RELEASE = "demo"
NAMESPACE = "llm"

Document = dict[str, Any]
Values = dict[str, Any]


class RefusedError(Exception):
    """Helm, the schema or a template refused these values."""


class _Strict(yaml.CSafeLoader):
    """Kubernetes refuses a duplicate key; Python's YAML takes the last one."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        keys = [key.value for key, _ in node.value]
        if len(set(keys)) < len(keys):
            raise RefusedError(f"keys stand twice: {sorted(keys)} {node.start_mark}")
        super().flatten_mapping(node)


def render(values: Values) -> list[Document]:
    """The objects that would be installed. Raises `RefusedError`."""
    return next(rendered([values]))


def refusal(values: Values) -> str:
    """The error for these values; empty if they are valid."""
    try:
        render(values)
    except RefusedError as error:
        return str(error)
    return ""


def rendered(every: Sequence[Values]) -> Iterator[list[Document]]:
    """The objects for each of many values. Raises `RefusedError` at the first refusal."""
    for output in outputs(every):
        if "error" in output:
            raise RefusedError(output["error"])
        yield documents(output["manifests"])


def outputs(every: Iterable[Values]) -> Iterator[dict[str, Any]]:
    """Helm's outputs: `manifests` by template, or `error`. Raises RuntimeError if its process ended."""
    renderer = _renderer()
    assert renderer.stdin is not None
    assert renderer.stdout is not None
    for values in every:
        renderer.stdin.write(json.dumps(values) + "\n")
        renderer.stdin.flush()
        line = renderer.stdout.readline()
        if not line:
            raise RuntimeError(f"the process with Helm's engine ended with exit code {renderer.wait()}")
        yield json.loads(line)


@cache
def _renderer() -> subprocess.Popen[str]:
    """A process that ends when its input does."""
    command = [sys.executable, "-m", "tests.deploy.helm"]
    renderer = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(renderer.communicate)
    return renderer


def documents(manifests: dict[str, str]) -> list[Document]:
    every: list[Document] = []
    for template, text in manifests.items():
        if template.endswith(".yaml"):
            every += filter(None, yaml.load_all(text, _Strict))
    return every


def the(kind: str, name: str, among: Iterable[Document]) -> Document:
    """The only object of this kind and name; `name` is without the release's."""
    found = [one for one in among if one["kind"] == kind and one["metadata"]["name"] == f"{RELEASE}-{name}"]
    assert len(found) == 1, f"{len(found)} {kind} {name}"
    return found[0]


def merged(*layers: Values) -> Values:
    """Values files and `--set` as Helm merges them: later ones win."""
    result: Values = {}
    for layer in layers:
        for key, value in layer.items():
            below = result.get(key)
            result[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def defaults() -> Values:
    return _load("values.yaml")


def on_cpus() -> Values:
    return _load("values-cpu.yaml")


def _load(name: str) -> Values:
    values: Values = yaml.safe_load((CHART / name).read_text(encoding="utf-8"))
    return values


def _serve() -> None:
    from helm_python import Chart, HelmError

    chart = Chart.load(CHART)
    for line in sys.stdin:
        try:
            output: dict[str, Any] = {"manifests": chart.render(json.loads(line), name=RELEASE, namespace=NAMESPACE)}
        except HelmError as error:
            output = {"error": str(error)}
        print(json.dumps(output), flush=True)


if __name__ == "__main__":
    _serve()

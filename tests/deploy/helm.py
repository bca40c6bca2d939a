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
from collections.abc import Iterable
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
    given = output(values)
    if "error" in given:
        raise RefusedError(given["error"])
    return documents(given["manifests"])


def output(values: Values) -> dict[str, Any]:
    """Helm's output: `manifests` by template, or `error`. Raises RuntimeError if its process ended."""
    renderer = _renderer()
    assert renderer.stdin is not None
    assert renderer.stdout is not None
    renderer.stdin.write(json.dumps(values) + "\n")
    if line := renderer.stdout.readline():
        return dict(json.loads(line))
    raise RuntimeError(f"the process with Helm's engine ended with exit code {renderer.wait()}")


@cache
def _renderer() -> subprocess.Popen[str]:
    """A process that ends when its input does."""
    command = [sys.executable, "-m", "tests.deploy.helm"]
    renderer = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    atexit.register(renderer.communicate)
    return renderer


def documents(manifests: dict[str, str]) -> list[Document]:
    every = [yaml.load_all(text, _Strict) for template, text in manifests.items() if template.endswith(".yaml")]
    return [document for several in every for document in several if document]


def the(kind: str, name: str, among: Iterable[Document]) -> Document:
    """The only object of this kind and name; `name` is without the release's."""
    (found,) = [one for one in among if one["kind"] == kind and one["metadata"]["name"] == f"{RELEASE}-{name}"]
    return found


def merged(*layers: Values) -> Values:
    """Values files and `--set` as Helm merges them: later ones win."""
    result: Values = {}
    for layer in layers:
        for key, value in layer.items():
            below = result.get(key)
            result[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def values_file(name: str) -> Values:
    return dict(yaml.safe_load((CHART / name).read_text(encoding="utf-8")))


ON_CPUS = values_file("values-cpu.yaml")


def _serve() -> None:
    from helm_python import Chart, HelmError

    chart = Chart.load(CHART)
    for line in sys.stdin:
        try:
            given: dict[str, Any] = {"manifests": chart.render(json.loads(line), name=RELEASE, namespace=NAMESPACE)}
        except HelmError as error:
            given = {"error": str(error)}
        print(json.dumps(given), flush=True)


if __name__ == "__main__":
    _serve()

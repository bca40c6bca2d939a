"""Pods in rendered objects: their templates, and their command lines, parsed by the services' own parsers."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from unittest.mock import patch

import paceline_services.draft.__main__ as draft
import paceline_services.gateway.__main__ as gateway
import paceline_services.target.__main__ as target
from paceline_services.target import ray_replicas
from tests.deploy.helm import Document

VARIABLE = re.compile(r"\$\((\w+)\)")
FILLED = {
    "POD_NAME": "demo-0",
    "POD_IP": "10.1.2.3",
    "PACELINE_REDIS_URL": "rediss://:secret@redis.example:6380/0",
    "REDIS_PASSWORD": "secret",
}
"""Variables that Kubernetes fills in from secrets and fields."""
SERVICES: dict[str, Callable[[Sequence[str]], argparse.Namespace]] = {
    "gateway": gateway.parse,
    "target": target.parse_options,
    "draft": draft.parse_options,
}


def pod_templates(documents: Iterable[Document]) -> Iterator[tuple[str, Document]]:
    """Every pod template, with the name of its object."""
    for document in documents:
        name, spec = f"{document['kind']}/{document['metadata']['name']}", document.get("spec", {})
        if "template" in spec:
            yield name, spec["template"]
        if document["kind"] == "RayCluster":
            yield f"{name}/head", spec["headGroupSpec"]["template"]
            yield from ((f"{name}/{group['groupName']}", group["template"]) for group in spec["workerGroupSpecs"])


def containers(documents: Iterable[Document]) -> list[Document]:
    return [each for _, template in pod_templates(documents) for each in template["spec"]["containers"]]


def command_line(container: Document, filled: Mapping[str, str] = FILLED) -> list[str]:
    """Command and arguments, with $(...) filled in as Kubernetes does: from the container's own environment alone."""
    own = environment(container, filled)
    parts = [*container.get("command", ()), *container.get("args", ())]
    return [VARIABLE.sub(lambda match: own[match[1]], part) for part in parts]


def environment(container: Document, filled: Mapping[str, str] = FILLED) -> dict[str, str]:
    """The environment; a variable may refer to earlier ones."""
    own: dict[str, str] = {}
    for each in container.get("env", ()):
        value = each.get("value", filled.get(each["name"], ""))
        own[each["name"]] = VARIABLE.sub(lambda match: own[match[1]], value)
    return own


def options(container: Document) -> argparse.Namespace:
    """The options of the service in this container. Raises `SystemExit` for an invalid command line."""
    with patch.dict(os.environ, environment(container)):
        if container["name"] == "ray-head":
            return ray_replicas.parse_pool_options(pool_arguments(container))[0]
        name, *arguments = command_line(container)
        return SERVICES[name](arguments)


def pool_arguments(ray_head: Document) -> Sequence[str]:
    """A Ray head's shell starts Ray, and then becomes `paceline target` with these arguments."""
    shell, flags, script, name, *arguments = command_line(ray_head)
    assert (shell, flags, name) == ("sh", "-ec", "paceline")
    assert script.endswith('exec paceline target "$@"\n')
    return arguments

"""Pods in rendered objects: their templates, command lines, and the "restricted" security standard."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.deploy.helm import Document

VARIABLE = re.compile(r"\$\((\w+)\)")


def pod_templates(documents: Iterable[Document]) -> Iterator[tuple[str, Document]]:
    """Every pod template, with the name of its object."""
    for document in documents:
        name, spec = f"{document['kind']}/{document['metadata']['name']}", document.get("spec", {})
        if "template" in spec:
            yield name, spec["template"]
        if document["kind"] == "RayCluster":
            yield f"{name}/head", spec["headGroupSpec"]["template"]
            yield from ((f"{name}/{group['groupName']}", group["template"]) for group in spec["workerGroupSpecs"])


def command_line(container: Document, filled: Mapping[str, str]) -> list[str]:
    """Command and arguments, with $(...) filled in as Kubernetes does: from the container's own environment alone."""
    own = environment(container, filled)
    parts = [*container.get("command", ()), *container.get("args", ())]
    return [VARIABLE.sub(lambda match: own[match[1]], part) for part in parts]


def environment(container: Document, filled: Mapping[str, str]) -> dict[str, str]:
    """The environment; a variable may refer to earlier ones. `filled`: values from secrets and fields."""
    own: dict[str, str] = {}
    for each in container.get("env", ()):
        value = each.get("value", filled.get(each["name"], ""))
        own[each["name"]] = VARIABLE.sub(lambda match: own[match[1]], value)
    return own


def complaints(pod: Document) -> Iterator[str]:
    """Violations of the pod security standard "restricted" in a pod's spec: the checks of Kubernetes' documentation for
    fields that the chart could set."""
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield field
    allowed = {
        "configMap",
        "emptyDir",
        "projected",
        "secret",
        "persistentVolumeClaim",
        "downwardAPI",
        "csi",
        "ephemeral",
    }
    for volume in pod.get("volumes", ()):
        if not allowed & volume.keys():
            yield f"volume {volume['name']}"
    if pod.get("securityContext", {}).get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "seccompProfile"
    if not pod.get("securityContext", {}).get("runAsUser"):
        yield "runAsUser"
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        yield from (f"{container['name']}: {each}" for each in _of_container(container.get("securityContext", {})))


def _of_container(context: Mapping[str, Any]) -> Iterator[str]:
    wanted = {"allowPrivilegeEscalation": False, "runAsNonRoot": True, "readOnlyRootFilesystem": True}
    for key, value in wanted.items():
        if context.get(key) is not value:
            yield key
    if context.get("privileged"):
        yield "privileged"
    if context.get("capabilities") != {"drop": ["ALL"]}:
        yield "capabilities"

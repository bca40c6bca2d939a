"""Validation of rendered objects.

Kubernetes' kinds are checked against its schemas, of the oldest version that the chart allows and of the latest one;
unknown fields are refused. For custom resources no schema is packaged: this file has the fields that the chart uses.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import jsonschema
import kubernetes_validate

from tests.deploy.helm import Document
from tests.deploy.pods import SERVICES, options, pod_templates

VERSIONS = ("1.30", kubernetes_validate.latest_version())

Schema = dict[str, Any]

TEXTS = dict[str, str]
DURATION = re.compile("^[0-9]+(ms|s|m|h)$")
TYPES: dict[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer", "minimum": 0},
    bool: {"type": "boolean"},
    dict: {"type": "object"},
    TEXTS: {"type": "object", "additionalProperties": {"type": "string"}},
}
SPECS: dict[str, Any] = {
    "monitoring.coreos.com/v1/ServiceMonitor": {
        "selector": {"matchLabels": TEXTS, "matchExpressions": [{"key": str, "operator": "In", "values": [str]}]},
        "endpoints": [
            {
                "port": str,
                "path": str,
                "interval": DURATION,
                "scheme?": "https",
                "tlsConfig?": {"insecureSkipVerify": bool},
            }
        ],
    },
    "monitoring.coreos.com/v1/PrometheusRule": {
        "groups": [
            {
                "name": str,
                "rules": [
                    {"alert": str, "expr": str, "for": DURATION, "labels": TEXTS, "annotations": TEXTS},
                    {"record": re.compile("^[a-z_:]+$"), "expr": str, "labels": TEXTS},
                ],
            }
        ]
    },
    "ray.io/v1/RayCluster": {
        "headGroupSpec": {"rayStartParams": TEXTS, "template": dict},
        "workerGroupSpecs": [
            {
                "groupName": str,
                "rayStartParams": TEXTS,
                "template": dict,
                **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), int),
            }
        ],
    },
    "keda.sh/v1alpha1/ScaledObject": {
        "scaleTargetRef": {"apiVersion": str, "kind": str, "name": str},
        "minReplicaCount": int,
        "maxReplicaCount": int,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": {"stabilizationWindowSeconds": int}}}},
        "triggers": [
            {
                "type": "prometheus",
                "metricType": "AverageValue",
                "metadata": {"serverAddress": str, "query": str, "threshold": str},
            }
        ],
    },
}
"""Shapes: dicts of fields, "?" marks an optional one; lists of items of any of some shapes; types; fixed texts."""


def schema(shape: Any) -> Schema:
    """A closed schema of a shape."""
    if isinstance(shape, dict):
        properties = {name.removesuffix("?"): schema(each) for name, each in shape.items()}
        required = [name for name in shape if not name.endswith("?")]
        return {"type": "object", "additionalProperties": False, "properties": properties, "required": required}
    if isinstance(shape, list):
        return {"type": "array", "minItems": 1, "items": {"anyOf": [schema(each) for each in shape]}}
    if isinstance(shape, re.Pattern):
        return {"type": "string", "pattern": shape.pattern}
    return TYPES.get(shape, {"const": shape})


CONTAINERS: Schema = {
    "items": {
        "required": ["securityContext"],
        "properties": {
            "securityContext": {
                "const": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "runAsNonRoot": True,
                    "capabilities": {"drop": ["ALL"]},
                }
            }
        },
    }
}
RESTRICTED: Schema = {
    "required": ["securityContext", "automountServiceAccountToken"],
    "properties": {
        **{name: {"const": False} for name in ("hostNetwork", "hostPID", "hostIPC", "automountServiceAccountToken")},
        "volumes": {"items": {"propertyNames": {"enum": ["name", "emptyDir", "secret", "persistentVolumeClaim"]}}},
        "securityContext": {
            "required": ["seccompProfile", "runAsUser"],
            "properties": {"seccompProfile": {"const": {"type": "RuntimeDefault"}}, "runAsUser": {"minimum": 1}},
        },
        "containers": CONTAINERS,
        "initContainers": CONTAINERS,
    },
}
"""The pod security standard "restricted", as far as the chart could violate it; and no pod gets a token."""


def check(document: Document) -> int:
    """Raises an error for an object that Kubernetes would refuse, for a pod that is not restricted (both are a
    `jsonschema.ValidationError`), and for a command that a service does not parse (`SystemExit`).

    Returns the number of commands.
    """
    return _check(json.dumps(document, sort_keys=True))


@functools.cache
def _check(content: str) -> int:
    """Most objects are the same in many combinations of values."""
    document = json.loads(content)
    templates = [template for _, template in pod_templates([document])]
    spec = SPECS.get(f"{document['apiVersion']}/{document['kind']}")
    if spec is None:
        _check_kubernetes(document)
    else:
        jsonschema.validate(document["spec"], schema(spec))
        _check_kubernetes({"apiVersion": "v1", "kind": "ConfigMap", "metadata": document["metadata"]})
        for template in templates:
            _check_kubernetes({"apiVersion": "v1", "kind": "Pod", **template})
    for template in templates:
        jsonschema.validate(template["spec"], RESTRICTED)
    ours = [each for pod in templates for each in pod["spec"]["containers"] if each["name"] in (*SERVICES, "ray-head")]
    for container in ours:
        options(container)
    return len(ours)


def _check_kubernetes(document: Document) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)

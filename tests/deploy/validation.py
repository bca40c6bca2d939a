"""Validation of rendered objects.

Kubernetes' kinds are checked against its schemas, of the oldest version that the chart allows and of the latest one;
unknown fields are refused. For custom resources no schema is packaged: this file has closed schemas of the fields that
the chart uses.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema
import kubernetes_validate

from tests.deploy.helm import Document
from tests.deploy.pods import pod_templates

VERSIONS = ("1.30", kubernetes_validate.latest_version())

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}


def closed(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": [key for key, schema in properties.items() if not schema.get("optional")],
    }


def array(items: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": items}


def optional(schema: Schema) -> Schema:
    return {**schema, "optional": True}


REQUIREMENT = closed(key=TEXT, operator={"enum": ["In"]}, values=array(TEXT))
DURATION: Schema = {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}
ALERT = closed(alert=TEXT, expr=TEXT, **{"for": DURATION}, labels=TEXTS, annotations=TEXTS)
RECORD = closed(record={"type": "string", "pattern": "^[a-z_:]+$"}, expr=TEXT, labels=TEXTS)
ENDPOINT = closed(
    port=TEXT,
    path=TEXT,
    interval=DURATION,
    scheme=optional({"enum": ["https"]}),
    tlsConfig=optional(closed(insecureSkipVerify={"type": "boolean"})),
)
RAY_PARAMS = {"type": "object", "additionalProperties": TEXT}
RAY_CLUSTER = closed(
    headGroupSpec=closed(rayStartParams=RAY_PARAMS, template={"type": "object"}),
    workerGroupSpecs=array(
        closed(
            groupName=TEXT,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            rayStartParams=RAY_PARAMS,
            template={"type": "object"},
        )
    ),
)
SPECS: dict[tuple[str, str], Schema] = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): closed(
        selector=closed(matchLabels=TEXTS, matchExpressions=array(REQUIREMENT)),
        endpoints=array(ENDPOINT),
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): closed(
        groups=array(closed(name=TEXT, rules=array({"anyOf": [ALERT, RECORD]})))
    ),
    ("ray.io/v1", "RayCluster"): RAY_CLUSTER,
    ("keda.sh/v1alpha1", "ScaledObject"): closed(
        scaleTargetRef=closed(apiVersion=TEXT, kind=TEXT, name=TEXT),
        minReplicaCount=COUNT,
        maxReplicaCount=COUNT,
        advanced=closed(
            horizontalPodAutoscalerConfig=closed(behavior=closed(scaleDown=closed(stabilizationWindowSeconds=COUNT)))
        ),
        triggers=array(
            closed(
                type={"enum": ["prometheus"]},
                metricType={"enum": ["AverageValue"]},
                metadata=closed(serverAddress=TEXT, query=TEXT, threshold=TEXT),
            )
        ),
    ),
}


def check(document: Document) -> None:
    """Raises `jsonschema.ValidationError`, or `kubernetes_validate.SchemaNotFoundError` for an unknown kind."""
    _check(json.dumps(document))


@functools.cache
def _check(content: str) -> None:
    """Most objects are the same in many combinations of values."""
    document = json.loads(content)
    spec = SPECS.get((document["apiVersion"], document["kind"]))
    if spec is not None:
        jsonschema.validate(document["spec"], spec)
        _check_own({"apiVersion": "v1", "kind": "ConfigMap", "metadata": document["metadata"]})
        for _, template in pod_templates([document]):
            _check_own({"apiVersion": "v1", "kind": "Pod", **template})
    else:
        _check_own(document)


def _check_own(document: Document) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)

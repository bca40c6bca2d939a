"""Writes paceline/values.schema.json from values.yaml: python deploy/k8s/schema.py.

A key gets the type of its default, and the comment above it as its description. A key without a comment is an error.
`SHAPES` has the schemas that do not follow from a default. The schemas of `speculation` and `engine` come from the
services' own settings, as do the choices of the gateway's options.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml
from pydantic import AliasChoices

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.config.key_aliases import ALGORITHMS, METHOD_ALIASES, SWITCHES
from paceline.telemetry.logs import LEVELS
from paceline.vllm.engine_arguments import OURS
from paceline_services.gateway.settings import GatewaySettings

CHART = Path(__file__).parent / "paceline"
SCHEMA = CHART / "values.schema.json"

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number", "minimum": 0}
COUNT: Schema = {"type": "integer", "minimum": 0}
AT_LEAST_ONE: Schema = {"type": "integer", "minimum": 1}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
TEXTS: Schema = {"type": "array", "items": TEXT}
NAMED_TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}


def closed(properties: Mapping[str, Schema]) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": dict(properties)}


def one_of(*words: str) -> Schema:
    return {"enum": list(words)}


def speculation() -> Schema:
    """The schema of every key and name that `SpeculativeConfig` accepts. A key may have only one of its spellings."""
    schema = SpeculativeConfig.model_json_schema(by_alias=False)
    properties = schema["properties"]
    names = one_of(*properties["method"].pop("enum"), *METHOD_ALIASES)
    del properties["method"]["type"]
    several = {"type": "array", "items": names, "minItems": 1, "uniqueItems": True}
    properties["method"]["anyOf"] = [names, several, {"type": "null"}]
    twice: list[Schema] = []
    for key, field in SpeculativeConfig.model_fields.items():
        if isinstance(field.validation_alias, AliasChoices):
            spellings = [str(each) for each in field.validation_alias.choices]
            properties.update((each, properties[key]) for each in spellings)
            twice += ({"required": list(pair)} for pair in combinations(spellings, 2))
    properties.update((key, {"type": "boolean"}) for key in SWITCHES)
    properties["speculative_algorithm"] = one_of(*ALGORITHMS, *map(str.lower, ALGORITHMS))
    return {**schema, "not": {"anyOf": twice}}


def gateway_choices() -> dict[str, Schema]:
    """The schemas of the gateway's options that have one of several values."""
    chosen = [each for each in fields(GatewaySettings) if "choices" in each.metadata]
    return {re.sub("_(.)", lambda m: m[1].upper(), each.name): one_of(*each.metadata["choices"]) for each in chosen}


QUANTITIES: Schema = {"type": "object", "additionalProperties": {"type": ["string", "integer", "null"]}}
JSON_TYPES = ["string", "number", "boolean", "array", "object", "null"]
VLLM_ARGUMENTS: Schema = {
    "type": "object",
    "additionalProperties": {"type": JSON_TYPES},
    "properties": dict.fromkeys(OURS, False),
}
TOLERATION = closed(
    {
        "key": TEXT,
        "operator": one_of("Exists", "Equal"),
        "value": TEXT,
        "effect": one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
        "tolerationSeconds": COUNT,
    }
)

SHAPES: dict[str, Schema] = {
    "speculation": speculation(),
    "engine": EngineConfig.model_json_schema(by_alias=False),
    "resources": closed({"requests": QUANTITIES, "limits": QUANTITIES}),
    "headResources": closed({"requests": QUANTITIES, "limits": QUANTITIES}),
    "engineArgs": VLLM_ARGUMENTS,
    "tensorParallelSize": AT_LEAST_ONE,
    "ranksPerPod": AT_LEAST_ONE,
    "placement": one_of("pack", "spread"),
    "tolerations": {"type": "array", "items": TOLERATION},
    "nodeSelector": NAMED_TEXTS,
    "annotations": NAMED_TEXTS,
    "podAnnotations": NAMED_TEXTS,
    "env": NAMED_TEXTS,
    "labels": NAMED_TEXTS,
    "pullSecrets": TEXTS,
    "clientNamespaces": TEXTS,
    "otherReleases": TEXTS,
    "moreModels": {"type": "array", "items": {**closed({"path": TEXT, "servedName": TEXT}), "required": ["path"]}},
    "aliases": NAMED_TEXTS,
    "monitoringNamespaces": TEXTS,
    "otlpEndpoint": {"type": "string", "pattern": "^(https?://[^/].*)?$"},
    "logLevel": one_of(*LEVELS),
    **gateway_choices(),
    "pullPolicy": one_of("Always", "IfNotPresent", "Never"),
    "service.type": one_of("ClusterIP", "NodePort", "LoadBalancer"),
    "autoscaling.kind": one_of("none", "hpa", "keda"),
    "port": PORT,
    "httpPort": PORT,
    "grpcPort": PORT,
    "metricsPort": PORT,
    "maxQueue": AT_LEAST_ONE,
    "storedResponseMb": AT_LEAST_ONE,
    "hangSeconds": AT_LEAST_ONE,
    "maxReplicas": AT_LEAST_ONE,
    "minReplicas": AT_LEAST_ONE,
    "requestsPerReplica": AT_LEAST_ONE,
    "minAcceptance": {"type": "number", "minimum": 0, "maximum": 1},
    "errorShare": {"type": "number", "minimum": 0, "maximum": 1},
    "lateShare": {"type": "number", "minimum": 0, "maximum": 1},
    "firstTokenSeconds": NUMBER,
    "acceptanceLength": NUMBER,
}
"""Schemas by the last one or two parts of a key's path."""


class UndocumentedError(Exception):
    """A key has no comment above it."""


def generated() -> str:
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    root = yaml.compose(text, yaml.SafeLoader)
    schema = _object(root, yaml.safe_load(text), text.splitlines(), ())
    return json.dumps({"$schema": "http://json-schema.org/draft-07/schema#", **schema}, indent=2) + "\n"


def _object(node: yaml.Node | None, values: Mapping[str, Any], lines: list[str], path: tuple[str, ...]) -> Schema:
    assert isinstance(node, yaml.MappingNode)
    properties = {}
    for key_node, value_node in node.value:
        key, here = key_node.value, (*path, key_node.value)
        comment = " ".join(reversed(list(_above(lines, key_node.start_mark.line))))
        schema = _shape(here)
        if schema is None and isinstance(values[key], Mapping):
            schema = _object(value_node, values[key], lines, here)
        elif not comment:
            raise UndocumentedError(f"{'.'.join(here)}: write a comment above it")
        properties[key] = {**(schema or _type_of(values[key])), **({"description": comment} if comment else {})}
    return closed(properties)


def _above(lines: list[str], line: int) -> Iterator[str]:
    """The comment that ends just before this line, last line first."""
    while line and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        yield lines[line].lstrip(" #")


def _shape(path: tuple[str, ...]) -> Schema | None:
    return SHAPES.get(".".join(path[-2:])) or SHAPES.get(path[-1])


def _type_of(default: object) -> Schema:
    kinds = {bool: {"type": "boolean"}, int: COUNT, str: TEXT}
    return kinds[type(default)]


if __name__ == "__main__":
    SCHEMA.write_text(generated(), encoding="utf-8")

"""values.yaml, its schema and the templates agree: every value has a description, a use, and a check."""

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import jsonschema
import pytest
from pydantic import ValidationError

from paceline.config import SpeculativeConfig
from paceline.config.key_aliases import ALGORITHMS, METHOD_ALIASES, SWITCHES
from paceline.config.method_names import Method
from tests.deploy.combinations import CHOICES, GPU
from tests.deploy.helm import CHART, ROOT, Values, merged, output, values_file

SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
SPECULATION = SCHEMA["properties"]["speculation"]
DRAFT = {"method": "draft_model", "model": "d"}


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "deploy" / "k8s" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "path"), [("schema", CHART / "values.schema.json"), ("dashboard", CHART / "dashboards" / "paceline.json")]
)
def test_generated_files_are_fresh(name: str, path: Path) -> None:
    assert script(name).generated() == path.read_text(encoding="utf-8"), f"run python deploy/k8s/{name}.py"


def test_a_value_without_a_comment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = script("schema")
    (tmp_path / "values.yaml").write_text("# What it means.\none: 1\n\nother: 2\n", encoding="utf-8")
    monkeypatch.setattr(schema, "CHART", tmp_path)
    with pytest.raises(schema.UndocumentedError, match="other"):
        schema.generated()


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object's schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield schema
        schema = [*schema.values()]
    if isinstance(schema, list):
        for value in schema:
            yield from objects(value)


def test_the_schema_is_closed() -> None:
    found = list(objects(SCHEMA))
    assert len(found) > 20
    for each in found:
        assert each["additionalProperties"] is not True
        assert "properties" in each or "type" in each["additionalProperties"]


def errors(speculation: Values) -> list[Any]:
    """What the service complains about."""
    try:
        SpeculativeConfig.model_validate(speculation)
    except ValidationError as error:
        return error.errors()
    return []


def refused(speculation: Values) -> bool:
    """By the chart's schema."""
    return not jsonschema.Draft7Validator(SPECULATION).is_valid(speculation)


@pytest.mark.parametrize(
    "given",
    [
        *({"method": name, "model": "d", "hidden_states_path": "h"} for name in (*get_args(Method), *METHOD_ALIASES)),
        *({"method": [name, "suffix"], "model": "d"} for name in METHOD_ALIASES if METHOD_ALIASES[name] != "none"),
        *(DRAFT | {key: value} for key in SWITCHES for value in (True, False)),
        *({"speculative_algorithm": name, "speculative_draft_model_path": "d"} for name in ALGORITHMS),
        {"speculative_method": ["standalone", "prompt_lookup"], "model": "d"},
        {"method": None},
        {"speculative_algorithm": "ngram"},
        {"speculative_num_steps": 7, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 9},
    ],
    ids=str,
)
def test_the_schema_accepts_every_spelling(given: Values) -> None:
    assert not errors(given)
    assert not refused(given)
    assert "error" not in output({**GPU, "speculation": given}), "Helm applies the schema"


@pytest.mark.parametrize(
    "given",
    [
        {"method": "deepseek"},
        {"method": ["suffix", "eagle4"], "model": "d"},
        {"speculative_num_step": 3},
        DRAFT | {"heterogeneous_vocab": True},
        DRAFT | {"draft_model_path": "d"},
        DRAFT | {"use_heterogeneous_vocab": "yes"},
        DRAFT | {"parallel_drafting": "no"},
    ],
    ids=str,
)
def test_the_schema_refuses_unknown_names(given: Values) -> None:
    assert errors(given)
    assert refused(given)


@pytest.mark.parametrize("key", SPECULATION["properties"])
def test_the_schema_has_no_unknown_key_and_refuses_wrong_values(key: str) -> None:
    """Contradictions between keys are refused by the services when they start."""
    assert "extra_forbidden" not in {error["type"] for error in errors({key: {}})}
    candidates: list[Any] = [{}, [[]], -1, 0, 1e9, "", "no such word"]
    wrong = [value for value in candidates if any(error["loc"] for error in errors({key: value})[:1])]
    assert wrong or key in (*SWITCHES, "speculative_algorithm")
    assert all(refused({key: value}) for value in wrong)


CONTEXTS = [
    GPU,
    merged(GPU, CHOICES["tls"]["on"], CHOICES["redis"]["password"], CHOICES["autoscaling"]["hpa"]),
    merged(GPU, CHOICES["ray"]["on"], {"target": {"resources": {"limits": {"nvidia.com/gpu": None}}}}),
    merged(GPU, CHOICES["redis"]["external"], CHOICES["autoscaling"]["keda"]),
    merged(GPU, CHOICES["engine"]["vllm"]),
]
"""Together they switch everything on."""
OTHER: dict[str, Any] = {
    "speculation": {"num_speculative_tokens": 9},
    "engine": {"slots": 512},
    "resources": {"requests": {"cpu": "3"}},
    "nodeSelector": {"disk": "fast"},
    "annotations": {"lb": "internal"},
    "podAnnotations": {"team": "serving"},
    "env": {"NCCL_DEBUG": "INFO"},
    "engineArgs": {"seed": 1},
    "labels": {"team": "serving"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "pullSecrets": ["registry"],
    "clientNamespaces": ["apps"],
    "monitoringNamespaces": ["prometheus"],
    "otherReleases": ["small"],
    "moreModels": [{"path": "/models/llama-8b"}],
    "aliases": {"large": "llama-70b"},
    "pullPolicy": "Always",
    "type": "LoadBalancer",
    "headResources": {"requests": {"cpu": "3"}},
    "placement": "spread",
    "ranksPerPod": 2,
    "kind": "none",
    "logLevel": "debug",
    "toolCallParser": "none",
    "reasoningParser": "none",
    "generationConfig": "none",
    "cidr": "10.0.0.0/8",
    "interval": "7s",
    "otlpEndpoint": "http://collector.monitoring:4318",
}
"""Values that differ from the defaults, by the last part of their keys."""


def other(key: str, value: Any) -> Any:
    """A value that differs from this one."""
    if key in OTHER:
        return OTHER[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return f"{value}-other"
    return value / 2 if isinstance(value, float) else value + 10


def changes(values: Values, context: Values) -> Iterator[tuple[str, Values]]:
    """Each key of `values`, and what changes it alone. `context`: these values with those of a context over them."""
    for key, value in values.items():
        if isinstance(value, dict) and value and key not in OTHER:
            for name, change in changes(value, context[key]):
                yield f"{key}.{name}", {key: change}
        else:
            yield key, {key: other(key, context[key])}


def test_every_value_changes_what_is_rendered() -> None:
    """A value that no template uses changes no combination."""
    base = values_file("values.yaml")
    unused = {name for name, _ in changes(base, base)}
    for context in CONTEXTS:
        before = output(context)
        for name, change in changes(base, merged(base, context)):
            if name in unused:
                after = output(merged(context, change))
                unused -= {name} if "error" not in after and after != before else set()
    assert not unused


def keys(values: Values) -> Iterator[str]:
    for key, value in values.items():
        yield key
        if isinstance(value, dict):
            yield from keys(value)


def test_templates_use_existing_values_only() -> None:
    """Helm renders a misspelt value as nothing. Fields of its own objects are capitalised."""
    known = set(keys(values_file("values.yaml")))
    asked = {
        (template.name, field)
        for template in sorted((CHART / "templates").iterdir())
        for action in re.findall(r"\{\{.*?\}\}", template.read_text(encoding="utf-8"), re.DOTALL)
        for field in re.findall(r"\.([a-z]\w*)", re.sub(r'"[^"]*"|/\*.*?\*/', '""', action, flags=re.DOTALL))
    }
    assert len(asked) > 50
    assert not {(name, field) for name, field in asked if field not in known}

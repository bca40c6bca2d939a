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
from paceline.config.key_aliases import METHOD_ALIASES, SWITCHES
from paceline.config.method_names import Method
from tests.deploy import combinations
from tests.deploy.helm import CHART, ROOT, Values, defaults, merged, outputs, refusal
from tests.unit.test_config import OTHER_WORDS, WRONG

CHOICES = combinations.CHOICES
CONTEXTS = [
    combinations.GPU,
    merged(combinations.GPU, CHOICES["tls"]["on"], CHOICES["redis"]["password"], CHOICES["autoscaling"]["hpa"]),
    merged(combinations.GPU, CHOICES["ray"]["on"], {"target": {"resources": {"limits": {"nvidia.com/gpu": None}}}}),
    merged(combinations.GPU, CHOICES["redis"]["external"], CHOICES["autoscaling"]["keda"]),
]
"""Together they switch everything on."""


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
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield schema
        for value in schema.values():
            yield from objects(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from objects(value)


def test_the_schema_is_closed() -> None:
    found = list(objects(json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))))
    assert len(found) > 20
    for each in found:
        assert "additionalProperties" in each
        assert each["additionalProperties"] is not True
        assert "properties" in each or "type" in each["additionalProperties"]


ENOUGH = {"model": "d", "hidden_states_path": "h"}
"""Keys that satisfy every method."""
SPELLINGS: list[Values] = [
    *({"method": name, **ENOUGH} for name in (*get_args(Method), *METHOD_ALIASES)),
    *({"speculative_method": [name, "suffix"], **ENOUGH} for name, ours in METHOD_ALIASES.items() if ours != "none"),
    *({"method": "draft_model", **ENOUGH, key: value} for key in SWITCHES for value in (True, False)),
    *(given for given, _ in OTHER_WORDS),
]
UNKNOWN: list[Values] = [
    {"method": "deepseek"},
    {"method": ["suffix", "eagle4"], "model": "d"},
    {"speculative_num_step": 3},
    {"method": "draft_model", "model": "d", "heterogeneous_vocab": True},
    {"method": "draft_model", "model": "d", "draft_model_path": "d"},
    {"method": "draft_model", "model": "d", "use_heterogeneous_vocab": "yes"},
    {"method": "draft_model", "model": "d", "parallel_drafting": "no"},
]


def speculation_refused(values: Values) -> bool:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["properties"]["speculation"]
    return not jsonschema.Draft7Validator(schema).is_valid(values)


@pytest.mark.parametrize("given", SPELLINGS, ids=str)
def test_the_schema_accepts_every_spelling(given: Values) -> None:
    SpeculativeConfig.model_validate(given)
    assert not speculation_refused(given)


def test_the_schema_has_no_unknown_key() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["properties"]["speculation"]
    for key in schema["properties"]:
        with pytest.raises(ValidationError) as caught:
            SpeculativeConfig.model_validate({key: {}})
        assert "extra_forbidden" not in {error["type"] for error in caught.value.errors()}


@pytest.mark.parametrize("given", UNKNOWN, ids=str)
def test_the_schema_refuses_unknown_names(given: Values) -> None:
    with pytest.raises(ValidationError):
        SpeculativeConfig.model_validate(given)
    assert speculation_refused(given)


def test_a_wrong_value_of_one_key_is_refused_before_anything_is_installed() -> None:
    """Contradictions between keys are refused by the services when they start."""
    refused = 0
    for kind, given, _ in WRONG:
        if kind is SpeculativeConfig and not any(value != value for value in given.values()):  # JSON has no NaN
            with pytest.raises(ValidationError) as caught:
                kind.model_validate(given)
            if caught.value.errors()[0]["loc"]:
                refused += 1
                assert speculation_refused(given), given
    assert refused > 20


def test_helm_applies_the_schema_of_speculation() -> None:
    known = {"method": ["suffix", "eagle3"], "draft_model_path": "d", "speculative_num_steps": 3}
    assert not refusal({**combinations.GPU, "speculation": known})
    assert "speculation" in refusal(merged(combinations.GPU, {"speculation": {"speculative_num_step": 3}}))


OTHER: dict[str, Any] = {
    "speculation": {"num_speculative_tokens": 9},
    "engine": {"slots": 512},
    "resources": {"requests": {"cpu": "3"}},
    "nodeSelector": {"disk": "fast"},
    "annotations": {"lb": "internal"},
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
    "cidr": "10.0.0.0/8",
    "interval": "7s",
}


def other(key: str, value: Any) -> Any:
    """A value that differs from this one."""
    if key in OTHER:
        return OTHER[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value / 2
    return f"{value}-other" if isinstance(value, str) else value + 10


def leaves(values: Values, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value and key not in OTHER:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def nested(path: tuple[str, ...], value: Any) -> Values:
    for key in reversed(path):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def at(values: Values, path: tuple[str, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


def test_every_value_changes_what_is_rendered() -> None:
    """A value that no template uses changes no combination."""
    base = defaults()
    before = list(outputs(CONTEXTS))
    tried = [
        (path, number, merged(context, nested(path, other(path[-1], at(merged(base, context), path)))))
        for path, _ in leaves(base)
        for number, context in enumerate(CONTEXTS)
    ]
    used = set()
    for (path, number, _), answer in zip(tried, outputs([values for *_, values in tried]), strict=True):
        if "error" not in answer and answer != before[number]:
            used.add(path)
    unused = [".".join(path) for path, _ in leaves(base) if path not in used]
    assert not unused


def keys(values: Values) -> Iterator[str]:
    for key, value in values.items():
        yield key
        if isinstance(value, dict):
            yield from keys(value)


def test_templates_use_existing_values_only() -> None:
    """Helm renders a misspelt value as nothing. Fields of its own objects are capitalised."""
    known = set(keys(defaults()))
    asked = {
        (template.name, field)
        for template in sorted((CHART / "templates").iterdir())
        for action in re.findall(r"\{\{.*?\}\}", template.read_text(encoding="utf-8"), re.DOTALL)
        for field in re.findall(r"\.([a-z]\w*)", re.sub(r'"[^"]*"|/\*.*?\*/', '""', action, flags=re.DOTALL))
    }
    assert len(asked) > 50
    assert not {(name, field) for name, field in asked if field not in known}

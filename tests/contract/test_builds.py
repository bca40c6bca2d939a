"""The contract between builds: its fields, names and generated stubs. Unknown fields: `test_frames.py`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto

from paceline.v1 import common_pb2, draft_pb2, inference_pb2, target_pb2

ROOT = Path(__file__).resolve().parents[2]
FILES = [module.DESCRIPTOR for module in (common_pb2, draft_pb2, inference_pb2, target_pb2)]


def messages(found: Iterator[Descriptor]) -> Iterator[Descriptor]:
    for message in found:
        yield message
        yield from messages(iter(message.nested_types))


def described_field(field: FieldDescriptor) -> str:
    kind = field.message_type or field.enum_type
    name = kind.full_name if kind else FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    label = "repeated " if field.is_repeated else "optional " if field.has_presence else ""
    return f"{field.containing_type.full_name}.{field.name} = {field.number}: {label}{name}"


MESSAGES = [each for file in FILES for each in messages(iter(file.message_types_by_name.values()))]
FIELDS = [field for message in MESSAGES for field in message.fields]
ENUMS = [enum for file in FILES for enum in file.enum_types_by_name.values()]
CALLS = [call for file in FILES for service in file.services_by_name.values() for call in service.methods]


def test_the_contract_is_unchanged() -> None:
    """Add lines for new fields. Lines change or go only with a new minor version: older builds rely on them."""
    first, *agreed = (ROOT / "proto" / "agreed.txt").read_text().splitlines()
    assert first == f"paceline {'.'.join(version('paceline').split('.')[:2])}"
    values = [f"{value.name} = {value.number}: {enum.full_name}" for enum in ENUMS for value in enum.values]
    calls = [f"{call.full_name}: {call.input_type.full_name} -> {call.output_type.full_name}" for call in CALLS]
    assert agreed == sorted([*map(described_field, FIELDS), *values, *calls])


def test_stubs_are_fresh() -> None:
    command = [sys.executable, "proto/generate.py", "--check"]
    check = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stderr


def test_names_follow_the_standard_rules_of_buf() -> None:
    """The rules that proto/buf.yaml names."""
    for file in FILES:
        assert (file.package, file.name.rpartition("/")[0]) == ("paceline.v1", "paceline/v1")
        assert all(service.endswith("Service") for service in file.services_by_name)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", field.name) for field in FIELDS)
    for enum in ENUMS:
        prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper()
        assert enum.values[0].name == f"{prefix}_UNSPECIFIED"
        assert all(value.name.startswith(f"{prefix}_") for value in enum.values)
    types = [each.full_name for call in CALLS for each in (call.input_type, call.output_type)]
    assert len(set(types)) == len(types)

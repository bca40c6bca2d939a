"""The generated stubs are fresh, and the proto files keep to buf's STANDARD rules (see proto/buf.yaml)."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor

from paceline.v1 import common_pb2, draft_pb2, inference_pb2, target_pb2

FILES: list[FileDescriptor] = [module.DESCRIPTOR for module in (common_pb2, draft_pb2, inference_pb2, target_pb2)]


def messages(file: FileDescriptor) -> Iterator[Descriptor]:
    queue = list(file.message_types_by_name.values())
    while queue:
        message = queue.pop()
        yield message
        queue += message.nested_types


def enums(file: FileDescriptor) -> Iterator[EnumDescriptor]:
    yield from file.enum_types_by_name.values()
    for message in messages(file):
        yield from message.enum_types


ROOT = Path(__file__).resolve().parents[2]


def test_stubs_are_fresh() -> None:
    check = subprocess.run(
        [sys.executable, "proto/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_directory_is_the_package(file: FileDescriptor) -> None:
    assert file.package == "paceline.v1"
    assert file.name.startswith("paceline/v1/")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_enum_values_carry_their_enum(file: FileDescriptor) -> None:
    for enum in enums(file):
        prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper()
        assert enum.values[0].name == f"{prefix}_UNSPECIFIED"
        assert all(value.name.startswith(f"{prefix}_") for value in enum.values)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_fields_are_snake_case(file: FileDescriptor) -> None:
    for message in messages(file):
        assert all(re.fullmatch(r"[a-z][a-z0-9_]*", field.name) for field in message.fields)


def test_every_request_and_response_belongs_to_one_method() -> None:
    methods = [method for file in FILES for service in file.services_by_name.values() for method in service.methods]
    types = [each.full_name for method in methods for each in (method.input_type, method.output_type)]
    assert len(methods) == 6
    assert len(set(types)) == len(types)


def test_service_names_end_in_service() -> None:
    assert all(name.endswith("Service") for file in FILES for name in file.services_by_name)

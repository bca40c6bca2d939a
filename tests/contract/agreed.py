"""The contract between builds as lines of text, one for each field, enum value and call. `make proto` adds new ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto

from paceline.v1 import common_pb2, draft_pb2, inference_pb2, target_pb2

AGREED = Path(__file__).resolve().parents[2] / "proto" / "agreed.txt"
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


def contract() -> list[str]:
    """The lines of proto/agreed.txt after its first one, as this build's stubs have them."""
    values = [f"{value.name} = {value.number}: {enum.full_name}" for enum in ENUMS for value in enum.values]
    calls = [f"{call.full_name}: {call.input_type.full_name} -> {call.output_type.full_name}" for call in CALLS]
    return sorted([*map(described_field, FIELDS), *values, *calls])


if __name__ == "__main__":  # lines that changed or went stay, so that the test shows them
    first, *agreed = AGREED.read_text().splitlines()
    AGREED.write_text("\n".join([first, *sorted({*agreed, *contract()})]) + "\n")

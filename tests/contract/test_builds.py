"""Builds of one minor version are compatible: fields keep their meaning, and unknown fields are ignored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto
from google.protobuf.message import Message
from hypothesis import given

from paceline.core.growth import Growth, GrowthBatch
from paceline.core.messages import Delta, GenerationRequest
from paceline.drafting.draft_loop import DraftUpdate
from paceline.drafting.speculator import Opening
from paceline.v1 import common_pb2, draft_pb2, inference_pb2, target_pb2
from paceline.wire import draft_codec, target_codec
from tests.contract.test_frames import VOCABULARY, deltas, growths, openings, submissions

AGREED = Path(__file__).parents[2] / "proto" / "agreed.txt"
FILES = [module.DESCRIPTOR for module in (common_pb2, draft_pb2, inference_pb2, target_pb2)]
UNKNOWN_FIELD = bytes([0xC2, 0x3E, 3]) + b"new"
"""Field 1000 with three bytes."""


def describe(message: Descriptor) -> Iterator[str]:
    for field in message.fields:
        kind = field.message_type or field.enum_type
        name = kind.full_name if kind else FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
        label = "repeated " if field.is_repeated else "optional " if field.has_presence else ""
        yield f"{message.full_name}.{field.name} = {field.number}: {label}{name}"
    for nested in message.nested_types:
        yield from describe(nested)


def describe_all() -> Iterator[str]:
    for file in FILES:
        for message in file.message_types_by_name.values():
            yield from describe(message)
        enums = [*file.enum_types_by_name.values()]
        yield from (f"{value.name} = {value.number}: {enum.full_name}" for enum in enums for value in enum.values)
        for service in file.services_by_name.values():
            for call in service.methods:
                yield f"{call.full_name}: {call.input_type.full_name} -> {call.output_type.full_name}"


def test_the_contract_is_unchanged() -> None:
    """Add lines for new fields. Lines change or go only with a new minor version: older builds rely on them."""
    first, *agreed = AGREED.read_text().splitlines()
    assert first == f"paceline {'.'.join(version('paceline').split('.')[:2])}"
    assert agreed == sorted(describe_all())


def with_unknown_fields(message: Message) -> Message:
    """Add one unknown field to every message, as a newer build would."""
    for field, value in message.ListFields():
        if field.message_type and not field.message_type.GetOptions().map_entry:
            for each in value if field.is_repeated else [value]:
                with_unknown_fields(each)
    message.MergeFromString(UNKNOWN_FIELD)
    return message


@given(submissions)
def test_an_older_target_decodes_requests_of_a_newer_gateway(submission: GenerationRequest) -> None:
    wire = with_unknown_fields(target_codec.encode_submission(submission)).SerializeToString()
    assert UNKNOWN_FIELD in wire
    assert target_codec.decode_submission(target_pb2.SubmitFrame.Submit.FromString(wire)) == submission


@given(deltas())
def test_an_older_gateway_decodes_deltas_of_a_newer_target(delta: Delta) -> None:
    wire = with_unknown_fields(target_codec.encode_delta(delta, delta.request_id)).SerializeToString()
    assert target_codec.decode_delta(target_pb2.DeltaFrame.Delta.FromString(wire)) == delta


@given(openings)
def test_an_older_draft_decodes_requests_of_a_newer_target(opening: Opening) -> None:
    wire = with_unknown_fields(draft_pb2.DraftFrame(opens=[draft_codec.encode_opening(opening, 1)])).SerializeToString()
    assert draft_codec.decode_draft_frame(draft_pb2.DraftFrame.FromString(wire)) == [replace(opening, request_id=1)]


@given(growths())
def test_an_older_target_decodes_growth_of_a_newer_draft(growth: Growth) -> None:
    update = DraftUpdate(GrowthBatch.of([(1, growth)]))
    wire = with_unknown_fields(draft_codec.encode_growth_frame(update)).SerializeToString()
    assert draft_codec.decode_growth_frame(draft_pb2.GrowthFrame.FromString(wire), VOCABULARY) == update

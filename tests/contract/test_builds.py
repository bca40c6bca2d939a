"""Builds of one minor version serve side by side: none takes back what others say, or stumbles over news."""

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
from paceline.core.messages import Delta, Submission
from paceline.drafting.draft_loop import DraftUpdate
from paceline.drafting.speculator import Opening
from paceline.v1 import common_pb2, draft_pb2, inference_pb2, target_pb2
from paceline.wire import draft_codec, target_codec
from tests.contract.test_frames import VOCABULARY, deltas, growths, openings, submissions

AGREED = Path(__file__).parents[2] / "proto" / "agreed.txt"
FILES = [module.DESCRIPTOR for module in (common_pb2, draft_pb2, inference_pb2, target_pb2)]
NEWS = bytes([0xC2, 0x3E, 3]) + b"new"
"""Field 1000 with three bytes."""


def said(message: Descriptor) -> Iterator[str]:
    for field in message.fields:
        kind = field.message_type or field.enum_type
        name = kind.full_name if kind else FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
        often = "repeated " if field.is_repeated else "optional " if field.has_presence else ""
        yield f"{message.full_name}.{field.name} = {field.number}: {often}{name}"
    for nested in message.nested_types:
        yield from said(nested)


def all_said() -> Iterator[str]:
    for file in FILES:
        for message in file.message_types_by_name.values():
            yield from said(message)
        enums = [*file.enum_types_by_name.values()]
        yield from (f"{value.name} = {value.number}: {enum.full_name}" for enum in enums for value in enum.values)
        for service in file.services_by_name.values():
            for call in service.methods:
                yield f"{call.full_name}: {call.input_type.full_name} -> {call.output_type.full_name}"


def test_the_contract_is_what_was_agreed_on() -> None:
    """Add lines for what is new. A line may change or go only with the minor version: an older build relies on it."""
    first, *agreed = AGREED.read_text().splitlines()
    assert first == f"paceline {'.'.join(version('paceline').split('.')[:2])}"
    assert agreed == sorted(all_said())


def future(message: Message) -> Message:
    """As a build would say it that knows one more field of every message."""
    for field, value in message.ListFields():
        if field.message_type and not field.message_type.GetOptions().map_entry:
            for each in value if field.is_repeated else [value]:
                future(each)
    message.MergeFromString(NEWS)
    return message


@given(submissions)
def test_an_older_target_takes_a_newer_gateway_s_requests(submission: Submission) -> None:
    wire = future(target_codec.encode_submission(submission)).SerializeToString()
    assert NEWS in wire
    assert target_codec.decode_submission(target_pb2.SubmitFrame.Submit.FromString(wire)) == submission


@given(deltas())
def test_an_older_gateway_takes_a_newer_target_s_deltas(delta: Delta) -> None:
    wire = future(target_codec.encode_delta(delta, delta.request_id)).SerializeToString()
    assert target_codec.decode_delta(target_pb2.DeltaFrame.Delta.FromString(wire)) == delta


@given(openings)
def test_an_older_draft_takes_a_newer_target_s_requests(opening: Opening) -> None:
    wire = future(draft_pb2.DraftFrame(opens=[draft_codec.encode_opening(opening, 1)])).SerializeToString()
    assert draft_codec.decode_draft_frame(draft_pb2.DraftFrame.FromString(wire)) == [replace(opening, request_id=1)]


@given(growths())
def test_an_older_target_takes_a_newer_draft_s_growth(growth: Growth) -> None:
    grown = DraftUpdate(GrowthBatch.of([(1, growth)]))
    wire = future(draft_codec.encode_growth_frame(grown)).SerializeToString()
    assert draft_codec.decode_growth_frame(draft_pb2.GrowthFrame.FromString(wire), VOCABULARY) == grown

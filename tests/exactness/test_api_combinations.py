"""Slices of `make combinations` and `make schemas`, and that no field of the API is missing among the rules."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from random import Random
from types import NoneType
from typing import Any, get_args

import pytest
from google.protobuf.message import Message
from pydantic import BaseModel

from paceline_services.gateway.generation.bodies import ChatBody, CompletionBody
from paceline_services.gateway.structured.structural_tag import Format
from tests.combinations.__main__ import compare_all, served_model
from tests.combinations.api_answers import api_client, as_grpc
from tests.combinations.request_rules import NOT_COMBINED, Combination, each_alone
from tests.combinations.schemas import validate_all

ALONE = [sent for seed in range(8) for sent in each_alone(Random(seed))]
WITHOUT_EFFECT = (NoneType, Any)
"""Types of fields that are accepted and ignored, or accepted only without a value."""


@pytest.fixture(scope="module")
def addresses() -> Iterator[tuple[str, str]]:
    with served_model() as addresses:
        yield addresses


def body_of(sent: Combination) -> BaseModel:
    return (ChatBody if sent.api == "chat" else CompletionBody).model_validate_json(json.dumps(sent.body))


def models_in(value: Any) -> Iterator[BaseModel]:
    """A body and the bodies in it."""
    if isinstance(value, BaseModel):
        yield value
        value = [getattr(value, name) for name in value.model_fields_set]
    if isinstance(value, list):
        for each in value:
            yield from models_in(each)


def messages_in(message: Message) -> Iterator[Message]:
    yield message
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None and not descriptor.message_type.GetOptions().map_entry:
            for each in value if descriptor.is_repeated else [value]:
                yield from messages_in(each)


def test_every_field_of_the_http_api_has_a_rule() -> None:
    """In every object of a body: a new field has to come with a rule."""
    given: dict[type[BaseModel], set[str]] = defaultdict(set)
    for sent in ALONE:
        for model in models_in(body_of(sent)):
            given[type(model)] |= model.model_fields_set
    assert {get_args(tagged)[0] for tagged in get_args(get_args(Format)[0])} <= given.keys()
    missing = {
        f"{model.__name__}.{name}"
        for model, fields in given.items()
        for name, field in model.model_fields.items()
        if field.annotation not in WITHOUT_EFFECT and name not in fields and name not in NOT_COMBINED
    }
    assert missing == set()


def test_every_field_of_the_grpc_api_has_a_rule() -> None:
    given: dict[Any, set[str]] = defaultdict(set)
    for sent in ALONE:
        if (request := as_grpc(sent)) is not None:
            for message in messages_in(request):
                given[message.DESCRIPTOR] |= {descriptor.name for descriptor, _ in message.ListFields()}
    missing = {
        f"{message.name}.{field.name}"
        for message, fields in given.items()
        for field in message.fields
        if field.name not in fields and field.name not in NOT_COMBINED
    }
    assert missing == set()


@pytest.mark.alone
async def test_speculation_changes_no_answer(addresses: tuple[str, str]) -> None:
    async with api_client(*addresses) as client:
        found = await compare_all(client, 90, seed=20, alone=False)
        assert found.differences == []
        assert found.counts["refused"] < 10
        assert min(found.counts["http"], found.counts["grpc"], found.counts["streamed"]) > 15
        assert client.accepted > 300


@pytest.mark.alone
async def test_outputs_are_valid(addresses: tuple[str, str]) -> None:
    async with api_client(*addresses) as client:
        found = await validate_all(client, 15, seed=30)
        assert found.invalid == []
        assert [found.counts[kind] for kind in ("schemas", "regexes", "tools")] == [5, 5, 5]
        assert client.accepted > 50

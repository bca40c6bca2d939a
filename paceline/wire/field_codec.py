"""Codec for messages and Python classes that name their fields alike.

A new field needs no code here: add it to the proto file and to the class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

from google.protobuf.message import Message
from pydantic import BaseModel

AnyMessage = TypeVar("AnyMessage", bound=Message)
AnyClass = TypeVar("AnyClass")


def encode_fields(message_type: type[AnyMessage], source: object, **others: object) -> AnyMessage:
    """Return a message with the fields `others`, and every other field from the attribute of the same name.

    A field is left unset if its attribute is None. Raises ValueError or TypeError if a value does not fit its field.
    """
    names = _field_names(message_type)  # type: ignore[arg-type]  # mypy: a class is not hashable
    return message_type(**{name: getattr(source, name) for name in names if name not in others}, **others)


def decode_fields(cls: type[AnyClass], message: Message, **others: object) -> AnyClass:
    """Return an instance of `cls`, a dataclass or a pydantic model, with the arguments `others`, and every other
    argument from the field of the same name.

    Arguments without a field keep their defaults. Unset optional fields become None, repeated fields lists, maps dicts.
    """
    values = others.copy()
    for name, read in _readers(cls, type(message)):  # type: ignore[arg-type]  # as above
        if name not in others:
            values[name] = read(message, name)
    return cls(**values)


def set_fields(message: Message) -> dict[str, Any]:
    """Return the fields of a message that are set, by name, with lists for repeated fields and dicts for maps."""
    return {field.name: _reader(field)(message, field.name) for field, _ in message.ListFields()}


@cache
def _field_names(message_type: type[Message]) -> Sequence[str]:
    return tuple(message_type.DESCRIPTOR.fields_by_name)


@cache
def _readers(cls: type[Any], message_type: type[Message]) -> Sequence[tuple[str, Callable[[Any, str], object]]]:
    """Return the fields that the class and the message share, each with a function that reads its value."""
    arguments = cls.model_fields if issubclass(cls, BaseModel) else {field.name for field in dataclasses.fields(cls)}
    fields = [field for field in message_type.DESCRIPTOR.fields if field.name in arguments]
    return [(field.name, _reader(field)) for field in fields]


def _reader(field: Any) -> Callable[[Any, str], object]:
    if field.has_presence:
        return lambda message, name: getattr(message, name) if message.HasField(name) else None
    if not field.is_repeated:
        return getattr
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return lambda message, name: dict(getattr(message, name))
    return lambda message, name: list(getattr(message, name))

"""What a parser finds. The texts of events of one kind, joined, do not depend on how the model's text was cut."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Some of the text that a model thinks before it answers. An empty text, which formats yield, is its end."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Some of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call begins. `index` counts the calls of one message from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """Some of the arguments of a call that has begun, as JSON. They are JSON only if the model wrote JSON."""

    index: int
    text: str


Event = Reasoning | Content | ToolCall | ToolArguments

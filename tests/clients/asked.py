"""What every client asks for, and what it must get."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

T = TypeVar("T")

URL = os.environ["PACELINE_URL"]
"""The gateway's, without /v1."""
MODEL = "pydoc"
QUESTION = "What does json.dumps do?"
CODE = "def read_lines(path):\n"
LIMIT = 200
"""Tokens of an output; the answer to the question has fewer."""


class Forecast(BaseModel):
    """Ask for a forecast."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Köln", "東京"]
    days: Literal[1, 3, 7]
    hourly: bool


SCHEMA = Forecast.model_json_schema()
"""Bounded: even a model that makes no sense fills it within a few tokens."""
FORECAST = {"name": "forecast", "description": "The weather of the next days.", "parameters": SCHEMA}


def speculated(call: Callable[[dict[str, Any]], T]) -> T:
    """Return `call({})`, which must equal `call({"speculative": False})`. The argument is what the body has beside."""
    drafted, plain = call({}), call({"speculative": False})
    assert drafted == plain
    return drafted

"""Chats that extract facts from sentences as JSON. Names are invented, so an answer must copy them."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline_lab.training.family.docstring_chats import Chat

SYLLABLES = (
    "ba bel bor ca cor da del dor el fa fen gar gil ha hol ka kel kor la len lor ma mar mel mi mor na nel no o pa per "
    "ra ren ro sa sel sor ta tel tor u va vel vor wa wen yo za zen"
)
ASKED = ("Extract the {things} as JSON:", "List the {things} as JSON:", "Write the {things} as a JSON list:")

Value = str | int


@dataclass(frozen=True, slots=True)
class ExtractionKind:
    """One kind of record: its name in the plural, its sentences, and its random fields."""

    things: str
    sentences: Sequence[str]
    fields: Mapping[str, Callable[[random.Random], Value]]


def extractions(count: int, seed: int) -> list[Chat]:
    """`count` chats. Another seed gives other facts, though the shortest names recur."""
    rng = random.Random(seed)
    return [_chat(rng.choice(KINDS), rng) for _ in range(count)]


def _chat(kind: ExtractionKind, rng: random.Random) -> Chat:
    records = [{field: value(rng) for field, value in kind.fields.items()} for _ in range(rng.randint(3, 7))]
    sentence = rng.choice(kind.sentences)
    text = " ".join(sentence.format(**record) for record in records)
    return [
        {"role": "user", "content": f"{rng.choice(ASKED).format(things=kind.things)}\n\n{text}"},
        {"role": "assistant", "content": "[\n" + ",\n".join(f"  {json.dumps(record)}" for record in records) + "\n]"},
    ]


def _name(rng: random.Random) -> str:
    return "".join(rng.choices(SYLLABLES.split(), k=rng.randint(2, 3))).capitalize()


def _host(rng: random.Random) -> str:
    return f"{_name(rng).lower()}-{rng.randint(1, 99)}"


def _year(rng: random.Random) -> int:
    return rng.randint(1801, 2020)


def _count(rng: random.Random) -> int:
    return rng.randint(2, 900)


def _port(rng: random.Random) -> int:
    return rng.randint(1024, 9999)


def _state(rng: random.Random) -> str:
    return rng.choice(("running", "stopped", "failed", "starting"))


KINDS = (
    ExtractionKind(
        "people",
        (
            "{name} was born in {city} in {born}.",
            "In {born}, {name} was born in {city}.",
            "{name} ({born}) is from {city}.",
        ),
        {"name": _name, "city": _name, "born": _year},
    ),
    ExtractionKind(
        "servers",
        ("The server {host} listens on port {port} and is {state}.", "{host}:{port} is {state}."),
        {"host": _host, "port": _port, "state": _state},
    ),
    ExtractionKind(
        "parcels",
        ("{count} boxes went from {start} to {end}.", "From {start} to {end} we sent {count} boxes."),
        {"start": _name, "end": _name, "count": _count},
    ),
    ExtractionKind(
        "books",
        ("{author} wrote {title} in {year}.", "{title}, by {author}, came out in {year}."),
        {"title": _name, "author": _name, "year": _year},
    ),
)


def record_schemas() -> list[dict[str, Any]]:
    """A JSON schema for the records of each kind."""
    rng = random.Random(0)
    types = {str: "string", int: "integer"}
    return [
        {
            "type": "object",
            "properties": {name: {"type": types[type(value(rng))]} for name, value in kind.fields.items()},
            "required": list(kind.fields),
            "additionalProperties": False,
        }
        for kind in KINDS
    ]

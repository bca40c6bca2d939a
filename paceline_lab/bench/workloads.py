"""Workloads for the shipped model: text outside its training data.

The code comes from the library files that training held out. The questions are about functions of these files and
of well-known modules; the shipped model answers in the manner of a docstring, right or wrong. Edits and facts are
generated as in training, from the held-out files and with other names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.doctor.prompt_file import QUESTIONS, code_prompts
from paceline_lab.training.family.docstring_chats import Chat
from paceline_lab.training.family.edit_chats import edits
from paceline_lab.training.family.extraction_chats import extractions, record_schemas
from paceline_lab.training.family.stdlib_corpus import held_out_files, read_source

CHATS = 4
"""Chats of each repetitive workload."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one kind: `bodies` for the route `path`."""

    name: str
    path: str
    bodies: Sequence[dict[str, Any]]


def workloads() -> list[Workload]:
    questions = [{"messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
    return [
        Workload("code completion", "/v1/completions", [{"prompt": prompt} for prompt in code_prompts()]),
        Workload("question answering", "/v1/chat/completions", questions),
    ]


def repetitive_workloads() -> list[Workload]:
    """Workloads in which most of an answer is a copy from the prompt: code editing and JSON extraction."""
    sources = [read_source(path) for path in held_out_files()]
    editing = [_body(chat) for chat in edits(sources, CHATS, seed=101)]
    return [Workload("code editing", "/v1/chat/completions", editing), extraction_workload()]


def extraction_workload() -> Workload:
    chats = extractions(CHATS, seed=102)
    return Workload("JSON extraction", "/v1/chat/completions", [_body(chat) for chat in chats])


def extraction_schema() -> dict[str, Any]:
    """A schema of every right answer in `extraction_workload`."""
    return {"type": "array", "items": {"anyOf": record_schemas()}}


def _body(chat: Chat) -> dict[str, Any]:
    """A request for the answer to the first turn."""
    return {"messages": chat[:1]}

"""What the shipped model is measured on: text that it never saw.

The code comes from the library files that training held out. The questions are about functions of these files and
of well-known modules; the shipped model answers in the manner of a docstring, right or wrong. Edits and facts to
extract are made up as those that it was trained on were, from these files and with other names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.doctor.default_prompts import QUESTIONS, code_prompts
from paceline_lab.training.family.docstring_chats import Chat
from paceline_lab.training.family.edit_chats import edits
from paceline_lab.training.family.extraction_chats import extractions
from paceline_lab.training.family.stdlib_corpus import held_out_files, read_source

ASKED = 4
"""Chats of a kind that are asked for."""


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
    """Where most of an answer stands in its prompt: code editing and JSON extraction."""
    sources = [read_source(path) for path in held_out_files()]
    return [
        Workload("code editing", "/v1/chat/completions", [_asked(chat) for chat in edits(sources, ASKED, seed=101)]),
        Workload("JSON extraction", "/v1/chat/completions", [_asked(chat) for chat in extractions(ASKED, seed=102)]),
    ]


def _asked(chat: Chat) -> dict[str, Any]:
    """The body of a request for what comes after the first turn."""
    return {"messages": chat[:1]}

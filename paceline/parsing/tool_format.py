"""What a family's way to write tool calls has to say of itself."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from paceline.parsing.text_reader import Steps, TextReader

ParseCalls = Callable[..., Steps[None]]
"""`parse(reader, names, after_marker=...)`: consume the whole text behind the reasoning, yielding its events. `names`:
of the request's tools. `after_marker`: whether reasoning came before."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write tool calls. Names are those of vLLM's `--tool-call-parser`."""

    name: str
    parse: Callable[[TextReader, Collection[str], bool], Steps[None]]
    markers: tuple[str, ...]
    """Texts of the tokens that structure the output. Special tokens among them reach the parser as text."""
    template_signs: tuple[str, ...]
    """Texts of a chat template that has this format; the template must have all of them."""
    begin: str
    """The text before a call's name. With `middle` and `end`: how a grammar writes a call."""
    middle: str
    """The text between a call's name and its arguments, a JSON object."""
    end: str
    separator: str = ""
    """The text between two calls."""
    opening: str = ""
    """The text before the first call."""
    closing: str = ""
    """The text behind the last call."""

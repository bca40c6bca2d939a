"""Which formats a model's output has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.parsing.formats.hermes import HERMES
from paceline.parsing.reasoning import REASONING_FORMATS, ReasoningFormat
from paceline.parsing.tool_format import ToolFormat

AUTO, NONE = "auto", "none"
TOOL_FORMATS: Mapping[str, ToolFormat] = {HERMES.name: HERMES}


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The formats of one model. None: its output has no such part."""

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None


def choose_format(template: str | None, *, tools: str = AUTO, reasoning: str = AUTO) -> OutputFormat:
    """The formats by name; `auto`: those that the source of the chat template shows, `none`: none.

    Raises KeyError for an unknown name.
    """
    source = template or ""
    shown = (each for each in TOOL_FORMATS.values() if all(sign in source for sign in each.template_signs))
    thought = (each for each in REASONING_FORMATS.values() if not each.always and each.end in source)
    return OutputFormat(
        next(thought, None) if reasoning == AUTO else None if reasoning == NONE else REASONING_FORMATS[reasoning],
        next(shown, None) if tools == AUTO else None if tools == NONE else TOOL_FORMATS[tools],
    )

"""What a family's way to write tool calls has to say of itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from paceline.parsing.text_reader import Steps, TextReader

JsonSchema: TypeAlias = Mapping[str, object]
Tools: TypeAlias = Mapping[str, JsonSchema]
"""The schemas of the arguments of a request's tools, by the tools' names."""
JSON_CALL = ('{"name": "', '", "arguments": ', "}")
"""See `ToolFormat.call`."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write tool calls. Names are those of vLLM's `--tool-call-parser`."""

    name: str
    parse: Callable[[TextReader, Tools], Steps[None]]
    """`parse(reader, tools)`: consume the whole text behind the reasoning, yielding its events. What only looks like a
    call is content."""
    markers: tuple[str, ...]
    """Texts of the tokens that structure the output. Special tokens among them reach the parser as text."""
    template_signs: tuple[str, ...]
    """Texts of a chat template that has this format; the template must have all of them."""
    call: tuple[str, str, str]
    """How a grammar writes a call: the text before its name, between that and its arguments, a JSON object, and behind
    them."""
    separator: str = ""
    """The text between two calls."""
    opening: str = ""
    """The text before the first call."""
    closing: str = ""
    """The text behind the last call."""
    id_style: Literal["openai", "mistral"] = "openai"
    """Mistral's templates want ids of nine letters and digits."""
    reads_reasoning: bool = False
    """Whether `parse` finds the reasoning, too."""
    wraps_content: bool = False
    """Whether markers stand around the answer, too. `parse` drops them."""

    @property
    def reads_every_text(self) -> bool:
        """Whether `parse` also reads the outputs of requests without tools."""
        return self.reads_reasoning or self.wraps_content

    @property
    def first_marker(self) -> str:
        """The marker with which calls begin; "": they may begin without one."""
        written = (self.opening + self.call[0]).lstrip()
        return next((marker for marker in self.markers if marker and written.startswith(marker)), "")

    def call_id(self, request_id: str, index: int) -> str:
        """The id of a request's call. It is derived, so that a stream that is resumed repeats it."""
        digits = hashlib.sha256(f"{request_id}/{index}".encode()).hexdigest()
        return digits[:9] if self.id_style == "mistral" else f"call_{digits[:24]}"

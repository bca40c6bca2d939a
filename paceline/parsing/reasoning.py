"""Reasoning before the answer, between two markers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.parsing.events import Reasoning
from paceline.parsing.text_reader import Steps, TextReader


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around a family's reasoning. Names are those of vLLM's `--reasoning-parser`."""

    name: str
    begin: str
    end: str
    always: bool = False
    """Whether each answer begins with reasoning even where neither prompt nor answer has the first marker."""

    def begins_inside(self, prompt: str) -> bool:
        """Whether an answer to this rendered prompt begins with reasoning."""
        opened, closed = prompt.rfind(self.begin), prompt.rfind(self.end)
        return prompt.rstrip().endswith(self.begin) or (self.always and closed <= opened)

    def parse(self, reader: TextReader, *, inside: bool) -> Steps[bool]:
        """Consume the reasoning, if the text begins with it. Returns whether it did."""
        if not inside:
            reader.mark()
            yield from reader.space()
            inside = bool((yield from reader.accept(self.begin)))
            if not inside:
                reader.reset()
                return False
            reader.commit()
        else:
            yield from reader.accept(self.begin)  # a model may write the marker once more
        yield from reader.until((self.end,), Reasoning, after_marker=True)
        return True


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    each.name: each
    for each in (
        ReasoningFormat("deepseek_r1", "<think>", "</think>", always=True),
        ReasoningFormat("qwen3", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    )
}

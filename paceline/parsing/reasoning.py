"""Reasoning before the answer, between two markers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.parsing.text_reader import Content, Reasoning, Steps, TextReader, ToolCall

QUOTABLE = re.compile(r"[^|｜]+")
"""Markers of which models think, in the middle of a line. At the beginning of a line they may begin a call."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around a family's reasoning. Names are those of vLLM's `--reasoning-parser`."""

    name: str
    begin: str
    end: str
    template_signs: tuple[str, ...] = ()
    """Texts of a chat template that has this format; the template must have all of them. (): chosen only by name."""
    always: bool = False
    """Whether each answer begins with reasoning even where neither prompt nor answer has the first marker."""
    answer: str = ""
    """The text before every answer, with reasoning or without. "": an answer has no marker of its own."""
    tokens: tuple[str, ...] = ()
    """Texts of the tokens in markers that consist of several."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of tokens that a parser must see."""
        return (self.begin, self.end, *self.tokens)

    def begins_inside(self, prompt: str) -> bool:
        """Whether an answer to this rendered prompt begins with reasoning."""
        opened, closed = prompt.rfind(self.begin), prompt.rfind(self.end)
        return prompt.rstrip().endswith(self.begin) or (self.always and closed <= opened)

    def begins(self, reader: TextReader, *, inside: bool) -> Steps[bool]:
        """Consume the first marker, if the text begins with it. Returns whether reasoning comes next.

        An end without a beginning is consumed, too.
        """
        reader.mark()
        found = yield from reader.skip(self.begin, self.end)  # also inside: some models write the marker once more
        if not found:
            reader.reset()
        return found == self.begin or (not found and inside)

    def parse(
        self, reader: TextReader, opening: str, answer: Callable[[], Steps[object]], *, wrapped: bool
    ) -> Steps[bool]:
        """Consume the reasoning and white space behind it. Returns whether `answer` has read all that follows.

        A call ends reasoning whose end is missing. `opening`: the marker before calls; "": there is none. `answer`
        reads the text behind the reasoning, from that marker on. What it takes for content is still reasoning, unless
        the answer is `wrapped` in markers of that kind, too.
        """
        markers = (self.end, opening) if opening else (self.end,)
        while (marker := (yield from reader.until(markers, Reasoning))) and marker == opening:
            if not reader.begins_line and QUOTABLE.fullmatch(opening):
                yield Reasoning(reader.since_mark())
            elif (yield from self._answer(reader, answer(), wrapped=wrapped)):
                return True
        yield Reasoning("")
        yield from reader.space()
        return False

    def _answer(self, reader: TextReader, steps: Steps[object], *, wrapped: bool) -> Steps[bool]:
        """Read the answer if it begins with a call; otherwise the text that looks like one, as reasoning."""
        reader.reset()
        for event in steps:
            if isinstance(event, ToolCall) or (wrapped and event is not None):
                reader.dropped = self.end
                yield Reasoning("")
                yield event
                yield from steps
                return True
            if isinstance(event, Content):
                yield Reasoning(event.text)
                return False
            yield event
        return False


HARMONY_REASONING = ReasoningFormat(
    "openai_gptoss",
    "<|channel|>analysis<|message|>",
    "<|end|>",
    template_signs=("<|start|>", "<|channel|>", "<|message|>"),
    answer="<|channel|>final<|message|>",
)
"""gpt-oss: its tool format reads the reasoning, because it may come again after a call."""

KIMI_TOKENS = ("<|open|>", "<|close|>", "<|sep|>")
THINK_TAGS = ("deepseek_v3", "glm45", "hunyuan_a13b", "kimi_k2", "minimax_m2")
"""Further names for `<think>` and `</think>`."""
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    each.name: each
    for each in (
        HARMONY_REASONING,
        ReasoningFormat(
            "kimi_k3",
            "<|open|>think<|sep|>",
            "<|close|>think<|sep|>",
            template_signs=("<|open|>", "<|close|>"),
            tokens=KIMI_TOKENS,
        ),
        ReasoningFormat("gemma4", "<|channel>thought", "<channel|>", ("<|channel>thought",), tokens=("<|channel>",)),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]", template_signs=("[THINK]",)),
        ReasoningFormat(
            "cohere_command3", "<|START_THINKING|>", "<|END_THINKING|>", template_signs=("<|START_THINKING|>",)
        ),
        ReasoningFormat("apertus", "<|inner_prefix|>", "<|inner_suffix|>", template_signs=("<|inner_prefix|>",)),
        ReasoningFormat("minimax_m3", "<mm:think>", "</mm:think>", template_signs=("<mm:think>",)),
        ReasoningFormat("solar_open", "<|think|>", "<|end|>", template_signs=("<|think|>", "<|tool_call:begin|>")),
        ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>", template_signs=("<seed:think>",)),
        ReasoningFormat("hy_v3", "<think:opensource>", "</think:opensource>", template_signs=("think", ":opensource")),
        ReasoningFormat("hy_v4", "<think:6124c78e>", "</think:6124c78e>", template_signs=("think", ":6124c78e")),
        ReasoningFormat("qwen3", "<think>", "</think>", template_signs=("</think>",)),
        *(ReasoningFormat(name, "<think>", "</think>") for name in THINK_TAGS),
        ReasoningFormat("deepseek_r1", "<think>", "</think>", always=True),
    )
}
"""By name, in the order in which a chat template is compared with them."""

REASONING_WORDS = re.compile(r"\b(reasoning_content|thinking|enable_thinking)\b")
"""What chat templates call reasoning, whatever its markers are."""

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

    def parse(self, reader: TextReader, *, inside: bool) -> Steps[bool]:
        """Consume the reasoning and white space behind it, if the text begins with it. Returns whether it did."""
        reader.mark()
        begun = yield from reader.skip(self.begin)  # also inside: some models write the marker once more
        if not begun and not inside:
            reader.reset()
            return False
        yield from reader.until((self.end,), Reasoning)
        yield Reasoning("")
        yield from reader.space()
        return True


HARMONY_REASONING = ReasoningFormat(
    "openai_gptoss",
    "<|channel|>analysis<|message|>",
    "<|end|>",
    template_signs=("<|start|>", "<|channel|>", "<|message|>"),
    answer="<|channel|>final<|message|>",
)
"""gpt-oss: its tool format reads the reasoning, because it may come again after a call."""

KIMI_TOKENS = ("<|open|>", "<|close|>", "<|sep|>")
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
        *(ReasoningFormat(name, "<think>", "</think>") for name in ("deepseek_v3", "glm45", "kimi_k2", "minimax_m2")),
        ReasoningFormat("deepseek_r1", "<think>", "</think>", always=True),
    )
}
"""By name, in the order in which a chat template is compared with them."""

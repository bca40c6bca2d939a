"""A request's tools as a grammar that makes the model call them."""

from __future__ import annotations

import json
from dataclasses import dataclass

from paceline.parsing.reasoning import ReasoningFormat
from paceline.parsing.tool_format import ToolFormat, Tools
from paceline.parsing.tool_grammar import forced_call_grammar
from paceline.text import Tokenizer


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """For `GrammarChecks.checked`, see `forced_call_grammar`."""

    tool_format: ToolFormat
    tools: Tools
    parallel: bool
    reasoning: ReasoningFormat | None = None
    relaxed: frozenset[str] = frozenset()

    @property
    def field(self) -> str:
        return "tools"

    def identity(self) -> bytes:
        form, names = self.tool_format, (self.tool_format.name, self.reasoning and self.reasoning.name)
        texts = *form.call, form.separator, form.opening, form.closing  # names may be shared
        return json.dumps(["tools", *names, *texts, self.parallel, sorted(self.relaxed), self.tools]).encode()

    def to_grammar(self, tokenizer: Tokenizer) -> str:
        return forced_call_grammar(
            self.tool_format,
            self.tools,
            tokenizer,
            parallel=self.parallel,
            reasoning=self.reasoning,
            relaxed=self.relaxed,
        )

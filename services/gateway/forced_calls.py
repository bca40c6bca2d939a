"""A request's tools as a grammar that makes the model call them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.parsing.tool_format import ToolFormat
from paceline.parsing.tool_grammar import forced_call_grammar
from paceline.text import Tokenizer


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """For `GrammarChecks.checked`, see `forced_call_grammar`."""

    tool_format: ToolFormat
    tools: Mapping[str, Mapping[str, Any]]
    """By name, the JSON schema of the arguments."""
    parallel: bool

    @property
    def field(self) -> str:
        return "tools"

    def identity(self) -> bytes:
        return json.dumps(["tools", self.tool_format.name, self.parallel, self.tools]).encode()

    def to_grammar(self, tokenizer: Tokenizer) -> str:
        return forced_call_grammar(self.tool_format, self.tools, tokenizer, parallel=self.parallel)

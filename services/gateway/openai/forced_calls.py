"""Calls that a request forces on the model: `tool_choice` is `required` or names a function."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.grammar import GrammarError
from paceline.parsing.tool_format import ToolFormat
from paceline.text import Tokenizer
from paceline_services.gateway.openai.bodies import ChatBody
from paceline_services.gateway.openai.output_parsing import tool_format
from paceline_services.gateway.openai.tool_bodies import NamedToolChoice
from paceline_services.gateway.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """A `GrammarSource`: one call or, if `parallel`, one or more of these functions."""

    format: ToolFormat
    tools: Mapping[str, dict[str, Any]]
    """By name, the schemas of the functions' parameters."""
    tokenizer: Tokenizer
    parallel: bool

    @property
    def field(self) -> str:
        """The field to name when the grammar cannot be compiled."""
        return "tool_choice"

    @property
    def identity(self) -> str:
        """Equal for equal grammars."""
        return json.dumps([self.format.name, self.tools, self.tokenizer.fingerprint, self.parallel])

    def to_grammar(self) -> str:
        """Raises `GrammarError`."""
        raise GrammarError("required and named functions are not supported yet, only auto and none")


def forced_calls(body: ChatBody, model: ServedModel) -> ForcedCalls | None:
    """The calls that the request forces; None: none. Raises `InvalidRequestError`."""
    form = tool_format(body, model)
    if form is None or body.tool_choice in (None, "auto"):
        return None
    named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedToolChoice) else None
    functions = [tool.function for tool in body.offered_tools if named in (None, tool.function.name)]
    schemas = {function.name: function.parameters or {} for function in functions}
    parallel = named is None and body.parallel_tool_calls is not False
    return ForcedCalls(form, schemas, model.tokenizer, parallel)

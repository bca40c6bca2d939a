"""What tools and reasoning mean for a chat's output: how it is read, and the calls that a request forces."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.grammar.reasoning_matcher import ALWAYS, ReasoningGate
from paceline.parsing import OutputParser
from paceline.parsing.output_format import OutputFormat
from paceline.parsing.reasoning import ReasoningFormat
from paceline.parsing.tool_format import ToolFormat, Tools
from paceline.parsing.tool_grammar import forced_call_grammar, grammar_start
from paceline.text import Tokenizer
from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.generation.bodies import ChatBody
from paceline_services.gateway.generation.served_model import ServedModel
from paceline_services.gateway.generation.tool_bodies import NamedToolChoice
from paceline_services.gateway.structured.output import ANY_TEXT, CheckedGrammar


@dataclass(frozen=True, slots=True)
class OutputParsing:
    """How the output is read, and where in it a grammar begins."""

    parser: Callable[[], OutputParser] | None = None
    shown_tokens: frozenset[int] = frozenset()
    gate: ReasoningGate = ALWAYS


def output_parsing(body: ChatBody, prompt: str, model: ServedModel, *, calls: bool) -> OutputParsing:
    """How to read the output: reasoning if the model has it, calls if the request offers tools.

    `prompt`: as text. `calls`: whether the request's grammar forces calls. Raises `InvalidRequestError`.
    """
    form, tools = model.output_format, tool_format(body, model)
    if tools is None and not (form.tools is not None and form.tools.reads_every_text):
        form = OutputFormat(form.reasoning)
    if form == OutputFormat():
        return OutputParsing()
    schemas = {tool.function.name: tool.function.parameters or {} for tool in body.offered_tools}
    continued = (body.messages[-1].content or "") if body.continue_final_message else ""
    markers = {model.tokenizer.token_id(marker) for marker in form.markers}
    return OutputParsing(
        partial(form.parser, schemas, inside=form.begins_inside(prompt, continued)),
        frozenset(token for token in model.tokenizer.special_ids if token in markers),
        grammar_start(form, prompt, model.tokenizer, calls=calls, continued=continued),
    )


def tool_format(body: ChatBody, model: ServedModel) -> ToolFormat | None:
    """How the model writes calls of the request's tools; None: it offers none.

    Raises `InvalidRequestError` if no format is known for the model.
    """
    if not body.offered_tools:
        return None
    if model.output_format.tools is None:
        message = "tools: this gateway knows no format of tool calls for this model; --tool-call-parser can name one"
        raise InvalidRequestError(message, param="tools")
    return model.output_format.tools


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


async def forced_grammar(body: ChatBody, model: ServedModel) -> CheckedGrammar:
    """The grammar of the calls that the request forces on the model; `ANY_TEXT`: it forces none.

    A `response_format` is one of the text, and calls that are forced leave no text. Raises `InvalidRequestError` or
    `OverloadedError`.
    """
    form, tools = tool_format(body, model), forced_tools(body)
    if form is None or not tools:
        return ANY_TEXT
    if body.structured_outputs:
        message = "tool_choice: a forced call and structured_outputs cannot both say what the output must be"
        raise InvalidRequestError(message, param="tool_choice")
    parallel = body.tool_choice == "required" and body.parallel_tool_calls is not False
    relaxed = {tool.function.name for tool in body.offered_tools if tool.function.strict is False}
    calls = ForcedCalls(form, tools, parallel, model.output_format.reasoning, frozenset(relaxed & tools.keys()))
    return await model.grammars.checked(calls, model.tokenizer)


def forced_tools(body: ChatBody) -> dict[str, dict[str, Any]]:
    """By name, the schemas of the functions one of which the model must call; empty: it need not call any."""
    if body.tool_choice in (None, "auto"):
        return {}
    named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedToolChoice) else None
    functions = [tool.function for tool in body.offered_tools if named in (None, tool.function.name)]
    return {function.name: function.parameters or {} for function in functions}

"""How the output of a chat request is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from paceline.grammar.reasoning_matcher import ALWAYS, ReasoningGate
from paceline.parsing import OutputParser
from paceline.parsing.output_format import OutputFormat
from paceline.parsing.tool_format import ToolFormat
from paceline.parsing.tool_grammar import grammar_start
from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.generation.bodies import ChatBody
from paceline_services.gateway.generation.served_model import ServedModel


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

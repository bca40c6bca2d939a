"""Calls that a request forces on the model: `tool_choice` is `required` or names a function."""

from __future__ import annotations

from typing import Any

from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.generation.bodies import ChatBody
from paceline_services.gateway.generation.output_parsing import tool_format
from paceline_services.gateway.generation.served_model import ServedModel
from paceline_services.gateway.generation.tool_bodies import NamedToolChoice
from paceline_services.gateway.structured.forced_calls import ForcedCalls
from paceline_services.gateway.structured.output import ANY_TEXT, CheckedGrammar


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

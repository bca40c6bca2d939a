"""How the output of a chat request is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from paceline.parsing import Event, OutputParser, ToolArguments, ToolCall
from paceline.parsing.reasoning import ReasoningFormat
from paceline.parsing.tool_format import ToolFormat
from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.openai.bodies import ChatBody
from paceline_services.gateway.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class OutputParsing:
    """The fields of `GenerationRequest` that say how its output is read."""

    parser: Callable[[], OutputParser] | None = None
    shown_tokens: frozenset[int] = frozenset()


class SingleCallParser(OutputParser):
    """Leaves out every call but the first: `parallel_tool_calls: false`, as in vLLM."""

    def feed(self, text: str, *, last: bool = False) -> list[Event]:
        events = super().feed(text, last=last)
        return [each for each in events if not (isinstance(each, ToolCall | ToolArguments) and each.index)]


def output_parsing(body: ChatBody, prompt: str, model: ServedModel) -> OutputParsing:
    """How to read the output: reasoning if the model has it, calls if the request offers tools.

    `prompt`: as text. Raises `InvalidRequestError`.
    """
    reasoning, tools = model.output_format.reasoning, tool_format(body, model)
    if reasoning is None and tools is None:
        return OutputParsing()
    markers = [*((reasoning.begin, reasoning.end) if reasoning else ()), *(tools.markers if tools else ())]
    parser = partial(
        OutputParser if body.parallel_tool_calls is not False else SingleCallParser,
        reasoning,
        tools,
        names=[tool.function.name for tool in body.offered_tools],
        inside=reasoning is not None and _begins_inside(reasoning, body, prompt),
    )
    return OutputParsing(parser, _special(markers, model))


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


def _begins_inside(reasoning: ReasoningFormat, body: ChatBody, prompt: str) -> bool:
    """Whether the output begins with reasoning. A message that is continued may end in the middle of it."""
    if not body.continue_final_message:
        return reasoning.begins_inside(prompt)
    final = body.messages[-1].content or ""
    return final.rfind(reasoning.begin) > final.rfind(reasoning.end)


def _special(markers: Iterable[str], model: ServedModel) -> frozenset[int]:
    """The markers that are special tokens."""
    tokens = (model.tokenizer.token_id(marker) for marker in markers)
    return frozenset(token for token in tokens if token in model.tokenizer.special_ids)

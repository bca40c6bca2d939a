"""A model's text as the parts of a chat message: reasoning, content and tool calls, found as the text arrives.

No torch, no web: the gateway and `paceline.LLM` use it. `formats` has a file per family of models.
"""

from paceline.parsing.output_format import OutputFormat, OutputParser, choose_format
from paceline.parsing.text_reader import Content, Event, Reasoning, ToolArguments, ToolCall

__all__ = [
    "Content",
    "Event",
    "OutputFormat",
    "OutputParser",
    "Reasoning",
    "ToolArguments",
    "ToolCall",
    "choose_format",
]

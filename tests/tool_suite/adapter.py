"""`paceline.parsing` as an engine of `canitoolcall`, whose runner replays fixtures through it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from canitoolcall.adapters.base import Adapter, ReplayInput, Support, ToolSpec
from canitoolcall.results import ParseResult, StreamAccumulator

from paceline import __version__
from paceline.parsing import Content, Event, OutputFormat, OutputParser, Reasoning, ToolArguments, ToolCall
from paceline.parsing.output_format import choose_format

FORMATS: Mapping[str, tuple[str, str]] = {
    "deepseek-ai/DeepSeek-V3-0324": ("deepseek_v3", "none"),
    "deepseek-ai/DeepSeek-V3.1": ("deepseek_v31", "deepseek_v3"),
    "deepseek-ai/DeepSeek-V3.2": ("deepseek_v32", "deepseek_v3"),
    "deepseek-ai/DeepSeek-V4-Flash": ("deepseek_v4", "deepseek_v3"),
    "deepseek-ai/DeepSeek-V4.1-Flash": ("deepseek_v41", "deepseek_v3"),
    "google/gemma-4-31B-it": ("gemma4", "gemma4"),
    "meta-llama/Llama-3.3-70B-Instruct": ("llama3_json", "none"),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": ("llama4_pythonic", "none"),
    "mistralai/Devstral-Small-2507": ("mistral", "none"),
    "mistralai/Magistral-Small-2506": ("mistral", "qwen3"),
    "mistralai/Magistral-Small-2509": ("mistral", "mistral"),
    "mistralai/Ministral-3-14B-Instruct-2512": ("mistral", "none"),
    "mistralai/Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai/Mistral-7B-Instruct-v0.3": ("mistral", "none"),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": ("mistral", "none"),
    "moonshotai/Kimi-K2-Instruct-0905": ("kimi_k2", "none"),
    "moonshotai/Kimi-K2.6": ("kimi_k2", "kimi_k2"),
    "moonshotai/Kimi-K3": ("kimi_k3", "kimi_k3"),
    "openai/gpt-oss-20b": ("openai", "openai_gptoss"),
    "Qwen/Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen/Qwen3-4B-Instruct-2507": ("hermes", "none"),
    "Qwen/Qwen3-4B-Thinking-2507": ("hermes", "qwen3"),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": ("qwen3_coder", "none"),
    "Qwen/Qwen3-Coder-Next": ("qwen3_coder", "none"),
    "Qwen/Qwen3.5-9B": ("qwen3_coder", "qwen3"),
    "Qwen/Qwen3.8-27B": ("qwen3_coder", "qwen3"),
    "zai-org/GLM-4.5": ("glm45", "glm45"),
    "zai-org/GLM-4.7": ("glm47", "glm45"),
    "zai-org/GLM-5.3": ("glm47", "glm45"),
}
"""`--tool-call-parser` and `--reasoning-parser`, by a fixture's reference model."""

SPECIAL = r"<\|[^<>\s]{1,40}>|<｜[^<>\s｜]{1,40}｜>|<[a-z_]{1,40}\|>|\[/?[A-Z_]{2,20}\]"
"""How special tokens look in these families. No tokenizer of theirs is at hand."""
PIECES = re.compile(rf"{SPECIAL}|｜DSML｜|</?\w+>|\s?\w{{1,5}}|\s+|.", re.DOTALL)
"""Texts of the pseudo-tokens into which an output is cut."""


class PacelineAdapter(Adapter):
    """Reads pseudo-tokens as the gateway reads tokens: special tokens that are no markers of the format are hidden."""

    name = "paceline"
    pinned_version = __version__
    supports_text_deltas = True

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._pieces: list[str] = []

    def version(self) -> str:
        return __version__

    def supports(self, family: str, model: str) -> Support:
        return Support(True) if model in FORMATS else Support(False, f"no format is known for {model}")

    def parser_config(self, raw: ReplayInput) -> dict[str, Any]:
        tools, reasoning = FORMATS[raw.model]
        return {"tool_call_parser": tools, "reasoning_parser": reasoning}

    def units(self, raw: ReplayInput) -> list[int]:
        return [self._id(piece) for piece in PIECES.findall(raw.text)]

    def special_token_ids(self, raw: ReplayInput) -> Collection[int]:
        return [index for index, piece in enumerate(self._pieces) if re.fullmatch(SPECIAL, piece)]

    def parse(self, raw: ReplayInput, tools: Sequence[ToolSpec]) -> ParseResult:
        return self.parse_stream(raw, [self.units(raw)], tools)

    def parse_stream(self, raw: ReplayInput, chunks: Sequence[Sequence[int]], tools: Sequence[ToolSpec]) -> ParseResult:
        markers = _format(raw).markers
        hidden = {index for index in self.special_token_ids(raw) if self._pieces[index] not in markers}
        texts = ("".join(self._pieces[index] for index in chunk if index not in hidden) for chunk in chunks)
        return self.parse_stream_text(raw, list(texts), tools)

    def parse_stream_text(self, raw: ReplayInput, deltas: Sequence[str], tools: Sequence[ToolSpec]) -> ParseResult:
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        form = _format(raw)
        parser = form.parser(schemas, inside=form.begins_inside(raw.generation_prompt or ""))
        return _result(parser, deltas)

    def _id(self, piece: str) -> int:
        if piece not in self._ids:
            self._ids[piece] = len(self._pieces)
            self._pieces.append(piece)
        return self._ids[piece]


def _format(raw: ReplayInput) -> OutputFormat:
    return choose_format(*FORMATS[raw.model], None)


def _result(parser: OutputParser, deltas: Iterable[str]) -> ParseResult:
    """What a client has at the end of the stream."""
    received = StreamAccumulator()
    events = [event for delta in deltas for event in parser.feed(delta)]
    for event in [*events, *parser.feed("", last=True)]:
        _receive(received, event)
    return received.result()


def _receive(received: StreamAccumulator, event: Event) -> None:
    match event:
        case Content(text):
            received.add_content(text)
        case Reasoning(text):
            received.add_reasoning(text)
        case ToolCall(index, name):
            received.add_tool_call(index, name=name)
        case ToolArguments(index, text):
            received.add_tool_call(index, arguments=text)

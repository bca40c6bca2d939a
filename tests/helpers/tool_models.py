"""Models with tools and reasoning: the shipped tokenizer with markers, and a chat template that has them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from paceline.model_names import resolve_model

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TEMPLATE = r"""
{%- if tools -%}
{{- '<|im_start|>system\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\n' -}}{%- endfor -%}
{{- 'Write <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.reasoning -%}{{- '<think>\n' + message.reasoning_content + '\n</think>\n' -}}{%- endif -%}
{{- message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson -}}
{{- '}</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
"""
"""As those of Qwen 3."""


def save_tool_model(folder: Path, *, special: bool) -> str:
    """A model's folder without weights. `special`: whether the markers are special tokens."""
    source = Path(resolve_model("pydoc"))
    backend = Backend.from_file(str(source / "tokenizer.json"))
    add = backend.add_special_tokens if special else backend.add_tokens
    add([AddedToken(marker, special=special, normalized=False) for marker in MARKERS])
    backend.save(str(folder / "tokenizer.json"))
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return str(folder)


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"

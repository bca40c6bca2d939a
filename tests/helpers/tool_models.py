"""Models with tools and reasoning: the shipped tokenizer with markers, and a chat template that has them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
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


LIKE = {"<tool_call>": " (", "</tool_call>": ").", "<think>": "\n", "</think>": "."}
"""By marker, the token that a model with weights confuses it with: so it writes markers unasked, now and then."""


def save_tool_model(folder: Path, *, special: bool, name: str = "pydoc") -> str:
    """A model's folder without weights. `special`: whether the markers are special tokens. `name`: a shipped model."""
    source = Path(resolve_model(name))
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


def save_tool_weights(folder: Path, name: str) -> str:
    """A shipped model's folder with its weights, and a row of its embedding for each marker."""
    save_tool_model(folder, special=True, name=name)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    weights = load_file(Path(resolve_model(name)) / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    rows = [table[backend.encode(LIKE[marker], add_special_tokens=False).ids[-1]] * 1.05 for marker in MARKERS]
    weights["model.embed_tokens.weight"] = torch.cat([table, torch.stack(rows).to(table.dtype)])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": len(table) + len(MARKERS)}))
    return str(folder)

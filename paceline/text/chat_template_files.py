"""Where a model's chat templates are: one by the name `default`, and maybe more, such as `tool_use` and `rag`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.gguf.gguf_file import GgufFile

DEFAULT = "default"
TOOL_USE = "tool_use"
"""The template for requests with tools, where a model has one of its own for them."""
GGUF_KEY = "tokenizer.chat_template"
"""Of the default; those with a name have it behind a dot."""
GGUF_NAMES = "tokenizer.chat_templates"


def folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name. As in transformers: from *.jinja files if there are any, else from `config`, which is the content of
    tokenizer_config.json; and for a processor's model from chat_template.json.

    Raises ValueError for a file that is no UTF-8 text or JSON.
    """
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (path := folder / "chat_template.jinja").is_file():
        files[DEFAULT] = path
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    template = config.get("chat_template")
    if template is None and (path := folder / "chat_template.json").is_file():
        template = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {} if template is None else {DEFAULT: template}


def gguf_templates(file: GgufFile) -> dict[str, str]:
    """By name. Raises `GgufError`."""
    names = [DEFAULT, *(file.get(GGUF_NAMES, list) or ())]
    found = {name: file.get(GGUF_KEY if name == DEFAULT else f"{GGUF_KEY}.{name}", str) for name in names}
    return {name: template for name, template in found.items() if template is not None}

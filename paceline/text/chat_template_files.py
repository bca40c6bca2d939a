"""Where a model's chat templates are: one by the name `default`, and maybe more, such as `tool_use` and `rag`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.gguf.gguf_file import GgufFile
from paceline.model_names import BrokenFileError, json_object

DEFAULT = "default"
TOOL_USE = "tool_use"
"""The template for requests with tools, where a model has one of its own for them."""
GGUF_KEY = "tokenizer.chat_template"
"""Of the default; those with a name have it behind a dot."""
GGUF_NAMES = "tokenizer.chat_templates"


def folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name. As in transformers: from *.jinja files if there are any, else from `config`, which is the content of
    tokenizer_config.json; and for a processor's model from chat_template.json.

    Raises `BrokenFileError`.
    """
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (path := folder / "chat_template.jinja").is_file():
        files[DEFAULT] = path
    if files:
        return {name: _text(path) for name, path in files.items()}
    source, template = folder / "tokenizer_config.json", config.get("chat_template")
    if template is None and (path := folder / "chat_template.json").is_file():
        source, template = path, json_object(path).get("chat_template")
    named: dict[Any, Any]
    if isinstance(template, list):
        entries = [each for each in template if isinstance(each, dict) and isinstance(each.get("name"), str)]
        named = {each["name"]: each.get("template") for each in entries}
    else:
        named = {} if template is None else {DEFAULT: template}
    if not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise BrokenFileError(f"chat_template in {source} is no text: download it again")
    return named


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BrokenFileError(f"{path} is no text, download it again: {error}") from error


def gguf_templates(file: GgufFile) -> dict[str, str]:
    """By name. Raises `GgufError`."""
    names = [DEFAULT, *(file.get(GGUF_NAMES, list) or ())]
    found = {name: file.get(GGUF_KEY if name == DEFAULT else f"{GGUF_KEY}.{name}", str) for name in names}
    return {name: template for name, template in found.items() if template is not None}

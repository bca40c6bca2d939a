"""Chat templates, rendered as transformers renders them, but without transformers: it imports torch.

A model's publisher writes the template and clients write the messages, so rendering is sandboxed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.gguf.gguf_file import GgufFile
from paceline.model_names import BrokenFileError, json_object

Message = Mapping[str, Any]

CONTINUE_HERE = "CONTINUE_FINAL_MESSAGE_TAG "
TEMPLATE_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""Errors besides jinja2's own: of Python operations on the wrong operands."""


class ChatTemplateError(Exception):
    """The template refused the messages; the message is the template's."""


class ChatTemplate:
    """A model's chat template. It can use the model's special tokens: `bos_token`, `eos_token`, ..."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises `ChatTemplateError` if the template does not parse."""
        try:
            self._template = _environment().from_string(source)
        except (TemplateError, SyntaxError, *TEMPLATE_ERRORS) as error:  # SyntaxError: of Python code made from it
            raise ChatTemplateError(f"the model's chat template does not parse: {error}") from error
        self.source = source
        self.variables = meta.find_undeclared_variables(_environment().parse(source))
        """Variables that the template reads: no other has an effect."""
        self._special_tokens = dict(special_tokens)
        self._roles: dict[str, bool] = {}

    def has_turn(self, role: str) -> bool:
        """Whether the template knows this role by name and shows what it says."""
        if role not in self._roles:
            self._roles[role] = f'"{role}"' in self.source.replace("'", '"') and self._shows(role)
        return self._roles[role]

    def _shows(self, role: str) -> bool:
        shown = "what they say"
        try:
            return shown in self.render([{"role": role, "content": shown}, {"role": "user", "content": "."}])
        except ChatTemplateError:
            return False

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `continue_final_message`: it ends where the last message's content ends.

        `variables`: further variables of the template, such as `tools`. Raises `ChatTemplateError`.
        """
        if continue_final_message:
            final = {**messages[-1], "content": messages[-1]["content"] + CONTINUE_HERE}
            messages = [*messages[:-1], final]
        context = {"tools": None, "documents": None, **self._special_tokens, **(variables or {})}
        context |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._template.render(context)
        except (TemplateError, *TEMPLATE_ERRORS) as error:
            raise ChatTemplateError(str(error)) from error
        return _cut_at_mark(text) if continue_final_message else text


def _cut_at_mark(text: str) -> str:
    at = text.rfind(CONTINUE_HERE.strip())
    if at < 0:
        raise ChatTemplateError("the template does not show the final message, so it cannot be continued")
    kept = text[:at]
    return kept if text.startswith(CONTINUE_HERE, at) else kept.rstrip()  # the template trims the content


def _environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training. Here only its body matters."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own protocol

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT002 - templates may pass it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT002
) -> str:
    # jinja2's own filter escapes HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


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

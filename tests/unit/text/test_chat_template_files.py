"""Chat templates by name: from files as transformers writes them, from GGUF files, and by `--chat-template`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from paceline.text import ChatTemplateError, Tokenizer
from paceline_services.gateway.generation.bodies import TokenizeChatBody
from paceline_services.gateway.generation.chat_prompt import render_chat
from tests.helpers.checkpoints import save_checkpoint
from tests.unit.text.test_gguf_tokenizer import byte_level_metadata, load

SAYS = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TEMPLATES = {
    "default": "plain {{ messages[0].content }}",
    "tool_use": "{{ tools | length }} tools, {{ messages[0].content }}",
    "rag": "{% if %}",
}
"""One that is not asked for does not have to parse."""


def folder_of(path: Path, templates: Mapping[str, str] | str, *, files: bool = True) -> str:
    """A model's folder, as transformers writes it: the templates in *.jinja files, or in a configuration."""
    save_checkpoint(path)
    backend = Backend(models.WordLevel({"0": 0}, unk_token="0"))
    written = PreTrainedTokenizerFast(tokenizer_object=backend)
    written.chat_template = templates
    written.save_pretrained(path, save_jinja_files=files)
    return str(path)


def rendered(tokenizer: Tokenizer, **fields: object) -> str:
    return render_chat(TokenizeChatBody.model_validate({"messages": [SAYS], **fields}), tokenizer)


@pytest.mark.parametrize("files", [True, False])
def test_a_request_with_tools_takes_the_template_for_tools(tmp_path: Path, *, files: bool) -> None:
    tokenizer = Tokenizer.load(folder_of(tmp_path, TEMPLATES, files=files))
    assert (tmp_path / "additional_chat_templates").is_dir() is files
    assert rendered(tokenizer) == "plain hi"
    assert rendered(tokenizer, tools=[]) == "plain hi"
    assert rendered(tokenizer, tools=[TOOL]) == "1 tools, hi"


@pytest.mark.parametrize("files", [True, False])
def test_a_single_template_serves_both(tmp_path: Path, *, files: bool) -> None:
    tokenizer = Tokenizer.load(folder_of(tmp_path, TEMPLATES["tool_use"], files=files))
    assert rendered(tokenizer, tools=[TOOL]) == "1 tools, hi"
    assert tokenizer.template_for(tools=False) is tokenizer.template_for(tools=True)


def test_a_file_comes_before_the_configuration(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "old", files=False)
    assert rendered(Tokenizer.load(folder)) == "old"
    (tmp_path / "chat_template.jinja").write_text("new")
    assert rendered(Tokenizer.load(folder)) == "new"


def test_a_processors_template_serves_where_the_tokenizer_has_none(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    assert Tokenizer.load(str(tmp_path)).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert rendered(Tokenizer.load(str(tmp_path))) == "of the processor"


def test_a_gguf_file_has_named_templates_too(tmp_path: Path) -> None:
    keys = {"": "default", ".tool_use": "tool_use"}
    named = {f"tokenizer.chat_template{end}": TEMPLATES[name] for end, name in keys.items()}
    tokenizer = load(tmp_path, byte_level_metadata() | named | {"tokenizer.chat_templates": ["tool_use"]})
    assert (rendered(tokenizer), rendered(tokenizer, tools=[TOOL])) == ("plain hi", "1 tools, hi")


def test_an_operators_template_replaces_one_that_does_not_parse(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {**TEMPLATES, "default": "{% if %}", "tool_use": "{% if %}"})
    tokenizer = Tokenizer.load(folder)
    with pytest.raises(ChatTemplateError, match="does not parse"):
        tokenizer.prepare()
    (tmp_path / "mine.jinja").write_text("{{ tools | length }}")
    tokenizer.use_chat_template(str(tmp_path / "mine.jinja"))
    tokenizer.prepare()
    assert rendered(tokenizer, tools=[TOOL]) == "1"


def test_an_operator_chooses_a_template(tmp_path: Path) -> None:
    """By name or from a file; then it serves all chats."""
    tokenizer = Tokenizer.load(folder_of(tmp_path, TEMPLATES))
    (tmp_path / "mine.jinja").write_text("mine {{ messages[0].content }} {{ tools }}")
    tokenizer.use_chat_template(str(tmp_path / "mine.jinja"))
    assert rendered(tokenizer) == "mine hi None"
    assert rendered(tokenizer, tools=[TOOL]).startswith("mine hi [")
    tokenizer.use_chat_template("default")
    assert rendered(tokenizer) == "plain hi"
    with pytest.raises(ChatTemplateError, match="does not parse"):
        tokenizer.use_chat_template("rag")
    with pytest.raises(ValueError, match=r"nor a template of the model \(default, rag, tool_use\)"):
        tokenizer.use_chat_template("none.jinja")

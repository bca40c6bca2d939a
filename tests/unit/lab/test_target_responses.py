"""Text for a head to learn from: prompts, and the answers that a target gives to them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.config import SamplingParams
from paceline.llm import LLM
from paceline.text import Tokenizer
from paceline_lab.training.heads import target_responses
from paceline_lab.training.heads.everyday_prompts import LONGEST_TEXT, SHORTEST_TEXT, everyday_prompts, free_paragraphs
from paceline_lab.training.heads.text_files import read_documents
from tests.helpers.gguf_files import tiny_config, write_gguf

TOKENS = 12


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a chat template, and positions for whole prompts."""
    path = tmp_path_factory.mktemp("target") / "tiny.gguf"
    write_gguf(path, tiny_config("llama", max_position_embeddings=2048), "Q8_0")
    return path


def answered(target: Path, out: Path, prompts: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The chats that the command leaves in its file."""
    options = ("--target", str(target), "--out", str(out), "--prompts", str(prompts), "--tokens", str(TOKENS))
    monkeypatch.setattr(sys, "argv", ["target_responses", *options, "--threads", "1"])
    assert target_responses.main() == 0
    return [json.loads(line)["messages"] for line in out.read_text(encoding="utf-8").splitlines()]


def test_prompts_are_of_every_kind_and_none_comes_twice() -> None:
    prompts = everyday_prompts(400, seed=3)
    assert everyday_prompts(20, seed=3) == prompts[:20]
    assert everyday_prompts(20, seed=4) != prompts[:20]
    assert {len(chat) for chat in prompts} == {1}
    assert {message["role"] for [message] in prompts} == {"user"}
    asked = [message["content"] for [message] in prompts]
    assert len(set(asked)) == 400
    paragraphs = free_paragraphs()
    assert sum(any(text in each for text in paragraphs) for each in asked) > 60
    assert sum("Python" in each and "`" in each for each in asked) > 20
    assert sum(each.startswith(("Give me five tips", "Write a poem")) for each in asked) > 5


def test_paragraphs_are_prose_of_a_fitting_length() -> None:
    paragraphs = free_paragraphs()
    assert len(paragraphs) == len(set(paragraphs)) > 300
    assert all(SHORTEST_TEXT <= len(each) <= LONGEST_TEXT and "\n" not in each for each in paragraphs)


def test_answers_are_the_targets_own_and_go_on_where_they_ended(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_responses, "BATCH", 2)
    first = answered(target, tmp_path / "answers.jsonl", 3, monkeypatch)
    chats = answered(target, tmp_path / "answers.jsonl", 5, monkeypatch)
    assert chats[:3] == first
    assert [chat[:1] for chat in chats] == everyday_prompts(5, seed=0)
    whole = answered(target, tmp_path / "whole.jsonl", 5, monkeypatch)
    assert whole == chats
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    texts = [
        answer.text for answer in LLM(str(target), None, {"slots": 8192}).chat([chat[:1] for chat in chats], greedy)
    ]
    same = [chat[1]["content"] == text for chat, text in zip(chats, texts, strict=True)]
    assert same == [temperature == 0 for temperature in (0.0, 0.7, 0.0, 1.0, 0.0)]


def test_answers_are_text_to_train_on(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [chat] = answered(target, tmp_path / "answers.jsonl", 1, monkeypatch)
    [document] = read_documents([tmp_path / "answers.jsonl"], str(target), [])
    text = Tokenizer.load(str(target)).decode(document.tolist())
    assert chat[0]["content"] in text
    assert "assistant" in text

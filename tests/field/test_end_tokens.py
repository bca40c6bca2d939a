"""End tokens that the vocabulary does not have are left out, and the log names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.llm import LLM
from paceline.model import load
from tests.helpers.checkpoints import change_config, save_checkpoint
from tests.helpers.gguf_files import tiny_config, write_gguf
from tests.helpers.llamas import VOCABULARY

CONFIG = EngineConfig(slots=256)


def named_in(folder: Path, file: str, ends: Any) -> Path:
    save_checkpoint(folder)
    if file == "config.json":
        (folder / "generation_config.json").unlink()
        change_config(folder, eos_token_id=ends)
    else:
        (folder / file).write_text(json.dumps({"eos_token_id": ends}))
    return folder


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("quantization", [None, "q8_0"])
@pytest.mark.parametrize(
    ("ends", "left"), [([2, 0, 5000], (2, 0)), (-1, ()), ([VOCABULARY, VOCABULARY - 1], (VOCABULARY - 1,))]
)
def test_those_of_a_folder(
    tmp_path: Path, file: str, quantization: Any, ends: Any, left: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    folder = named_in(tmp_path, file, ends)
    model = load(str(folder), CONFIG.model_copy(update={"quantization": quantization}))
    assert model.eos_token_ids == left
    [line] = [each for each in caplog.messages if "left out" in each]
    assert f"the vocabulary of {VOCABULARY} tokens" in line


def test_a_model_whose_only_end_is_none_answers_up_to_its_limit(tmp_path: Path) -> None:
    llm = LLM(str(named_in(tmp_path, "generation_config.json", [5000])), engine_config={"slots": 256})
    [answer] = llm.generate([[3, 1, 4]])
    assert len(answer.tokens) == 16


@pytest.mark.parametrize("ends", ["two", [2.5], [[2]], True])
def test_what_is_no_token_id_is_refused_by_name(tmp_path: Path, ends: Any) -> None:
    with pytest.raises(ValueError, match=r"eos_token_id in .*generation_config.json is .*: it has to be a token id"):
        load(str(named_in(tmp_path, "generation_config.json", ends)), CONFIG)


@pytest.mark.parametrize("key", ["eos_token_id", "eot_token_id"])
@pytest.mark.parametrize("id_", [5000, -1])
def test_those_of_a_gguf_file(tmp_path: Path, key: str, id_: int, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_config("qwen2"), metadata={f"tokenizer.ggml.{key}": id_})
    assert all(0 <= each < 320 for each in load(str(path), CONFIG).eos_token_ids)
    assert f"tokenizer.ggml.{key} is {id_}, and tokenizer.ggml.tokens has 320 entries: left out" in caplog.text

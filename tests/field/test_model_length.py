"""The length of a model before its first target is up, which the gateway reads without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from paceline.model.rope import positions_in
from paceline.model_defaults import model_length
from tests.helpers.openai_stack import counts, open_stack

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LINEAR = {"type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"model_type": "llama", "max_position_embeddings": 512}, 512),
        ({"model_type": "qwen2", "max_position_embeddings": 512, "rope_scaling": YARN}, 2048),
        ({"model_type": "qwen2", "max_position_embeddings": 4096, "rope_scaling": YARN}, 4096),
        ({"model_type": "qwen3", "max_position_embeddings": 512, "rope_parameters": {**YARN, "rope_theta": 1e6}}, 2048),
        (
            {"model_type": "llama", "max_position_embeddings": 512, "rope_scaling": {"type": "linear", "factor": 2.0}},
            512,
        ),
        ({"model_type": "gpt2", "n_positions": 256}, 256),
    ],
)
def test_it_is_what_a_target_takes_from_the_same_file(config: dict[str, Any], length: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_length(str(tmp_path)) == length == positions_in(AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize("config", [{"max_position_embeddings": "many"}, {"rope_scaling": 5}, {"text_config": 5}, {}])
def test_a_file_that_does_not_say_has_none(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_length(str(tmp_path)) is None
    assert model_length("table:64") is None


async def test_a_gateway_tells_it_until_a_target_says_what_it_serves() -> None:
    async with open_stack() as stack:
        [model] = (await stack.http.get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("pydoc", 2048)
    async with open_stack(counts, context=128) as stack:
        [model] = (await stack.http.get("/v1/models")).json()["data"]
        assert model["max_model_len"] == 128

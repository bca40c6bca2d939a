"""Hidden states as files: what a request's positions were computed as, however the request was served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from paceline.config import EngineConfig, SamplingParams
from paceline.llm import LLM
from paceline.model import Lane, load
from tests.checkpoints import save_checkpoint

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [2, 7, 1, 8]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("target")))


def extracted(folder: Path) -> dict[tuple[int, ...], torch.Tensor]:
    """States by token ids."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found[tuple(file.get_tensor("token_ids").tolist())] = file.get_tensor("hidden_states")
    return found


def llm(checkpoint: str, folder: Path, **engine: object) -> LLM:
    config = {
        "method": "extract_hidden_states",
        "hidden_states_path": str(folder),
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "draft_placement": "target",
    }
    return LLM(checkpoint, config, {"slots": 512, **engine})


@pytest.mark.parametrize("rows", [8, 256])
def test_every_position_of_prompt_and_output_is_written(checkpoint: str, tmp_path: Path, rows: int) -> None:
    """In chunks of the prefill or at once, and after a hit in the prefix cache, bit for bit what the model computes."""
    served = llm(checkpoint, tmp_path / "states", max_num_batched_rows=rows)
    sampling = SamplingParams(temperature=0.0, max_tokens=6)
    answers = [served.generate([prompt], sampling)[0] for prompt in (*PROMPTS, PROMPTS[0])]
    found = extracted(tmp_path / "states")
    assert len(list((tmp_path / "states").iterdir())) == 3
    for prompt, answer in zip(PROMPTS, answers, strict=False):
        tokens = [*prompt, *answer.tokens]
        assert torch.equal(found[tuple(tokens)], computed(checkpoint, tokens[:-1]))


def test_files_of_an_earlier_run_are_kept(checkpoint: str, tmp_path: Path) -> None:
    for _ in range(2):
        llm(checkpoint, tmp_path).generate([PROMPTS[1]], SamplingParams(max_tokens=1))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["0000001.safetensors", "0000002.safetensors"]


def computed(checkpoint: str, tokens: list[int]) -> torch.Tensor:
    model = load(checkpoint, EngineConfig(slots=512))
    lane = Lane()
    lane.slots = list(range(1, len(tokens) + 1))
    hidden = model.run([lane.row(token, i) for i, token in enumerate(tokens)], [], (0, 1, 2)).hidden
    assert hidden is not None
    return hidden

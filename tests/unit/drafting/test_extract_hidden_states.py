"""Hidden states as files: the target's states of every position, however the request was served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from paceline.config import EngineConfig, SamplingParams
from paceline.drafting.methods.extract_hidden_states import ExtractHiddenStates
from paceline.drafting.speculator import Commit, Context, Opening
from paceline.llm import LLM
from paceline.model import SlotTable, load
from tests.helpers.checkpoints import save_checkpoint

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


@pytest.mark.parametrize("rows", [8, 256])
def test_every_position_of_prompt_and_output_is_written(checkpoint: str, tmp_path: Path, rows: int) -> None:
    """In one or several prefill chunks, and after a prefix cache hit, bit for bit as the model computes them."""
    config = {
        "method": "extract_hidden_states",
        "hidden_states_path": str(tmp_path / "states"),
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "draft_placement": "target",
    }
    served = LLM(checkpoint, config, {"slots": 512, "max_num_batched_rows": rows})
    sampling = SamplingParams(temperature=0.0, max_tokens=6)
    completions = [served.generate([prompt], sampling)[0] for prompt in (*PROMPTS, PROMPTS[0])]
    found = extracted(tmp_path / "states")
    assert len(list((tmp_path / "states").iterdir())) == 3
    for prompt, completion in zip(PROMPTS, completions, strict=False):
        tokens = [*prompt, *completion.tokens]
        assert torch.equal(found[tuple(tokens)], computed(checkpoint, tokens[:-1]))


def states(*positions: int) -> torch.Tensor:
    """Of two layers; each value is its position."""
    return torch.tensor(positions, dtype=torch.bfloat16)[:, None, None].repeat(1, 2, 3)


def opened(folder: Path, tokens: list[int]) -> ExtractHiddenStates:
    speculator = ExtractHiddenStates(folder, (0, 9))
    speculator.open(Opening(1, tokens, 0, SamplingParams(), 4, 8))
    return speculator


def test_states_that_arrive_twice_are_written_once(tmp_path: Path) -> None:
    """After a move or a preemption states arrive again; commits may have none."""
    speculator = opened(tmp_path, [5, 6, 7])
    speculator.context(Context(1, 0, states(0, 1)))
    speculator.context(Context(1, 0, states(0)))
    speculator.commit(Commit(1, 2, [8, 9], 1, None))
    speculator.context(Context(1, 1, states(1, 2, 3)))
    speculator.commit(Commit(1, 4, [3], 0, states(4)))
    speculator.close(1)
    [path] = tmp_path.iterdir()
    with safe_open(path, "pt") as file:
        assert file.get_tensor("token_ids").tolist() == [5, 6, 7, 8, 9, 3]
        assert torch.equal(file.get_tensor("hidden_states"), states(0, 1, 2, 3, 4))
        assert file.metadata() == {"layers": "[0, 9]"}


def test_tokens_end_with_the_last_one_that_is_known_to_follow(tmp_path: Path) -> None:
    """A cancelled request: the other states never arrived."""
    speculator = opened(tmp_path, [5, 6, 7])
    speculator.context(Context(1, 0, states(0)))
    speculator.commit(Commit(1, 2, [8], 0, None))
    speculator.close(1)
    assert list(extracted(tmp_path)) == [(5, 6)]


def test_a_request_without_states_leaves_no_file(tmp_path: Path) -> None:
    speculator = opened(tmp_path / "new", [5, 6])
    speculator.close(1)
    speculator.close(1)
    speculator.context(Context(1, 0, states(0)))
    speculator.commit(Commit(2, 1, [8], 0, states(1)))
    speculator.close(2)
    assert list((tmp_path / "new").iterdir()) == []


def test_numbers_go_on_after_the_largest_of_an_earlier_run(tmp_path: Path) -> None:
    for name in ("0000007.safetensors", "0000003.safetensors", "notes.safetensors", "0000009.partial"):
        (tmp_path / name).touch()
    speculator = opened(tmp_path, [5, 6])
    speculator.context(Context(1, 0, states(0)))
    speculator.close(1)
    assert (tmp_path / "0000008.safetensors").stat().st_size > 0
    assert (tmp_path / "0000007.safetensors").stat().st_size == 0


def computed(checkpoint: str, tokens: list[int]) -> torch.Tensor:
    model = load(checkpoint, EngineConfig(slots=512))
    slot_table = SlotTable()
    slot_table.slots = list(range(1, len(tokens) + 1))
    hidden = model.run([slot_table.row(token, i) for i, token in enumerate(tokens)], [], (0, 1, 2)).hidden
    assert hidden is not None
    return hidden

"""The widened copy of a model has the model's logits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from paceline import family
from paceline.config import EngineConfig, SamplingParams
from paceline.drafting.methods.eagle3 import Eagle3Network
from paceline.llm import LLM
from paceline.model import SlotTable, load
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.text import Tokenizer
from paceline_lab.training.family.widened_family import TIMES, widened_family, write_target
from tests.helpers.checkpoints import change_config, save_checkpoint
from tests.helpers.head_formulas import Eagle3 as Eagle3Formula
from tests.helpers.llamas import VOCABULARY

CLOSE = 1e-4
"""Tolerance for logits around 10 in float32: sums over more terms are rounded differently."""


@pytest.fixture(scope="module")
def pydoc_wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and head."""
    return widened_family(tmp_path_factory.mktemp("family"))


def source(folder: Path, **changes: object) -> Path:
    """A small Llama, with changes of its configuration."""
    change_config(save_checkpoint(folder / "source"), **changes)
    return folder / "source"


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    network = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return network(ids).logits


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_logits_are_those_of_the_original(epsilon: float, tmp_path: Path) -> None:
    """Also with an epsilon that decides, as it does for small states: a copy that kept it would say something else."""
    narrow, wide, ids = source(tmp_path, rms_norm_eps=epsilon), tmp_path / "wide", torch.arange(VOCABULARY)[None]
    write_target(narrow, wide)
    original = logits(narrow, ids)
    assert original.abs().max() > 5
    assert (logits(wide, ids) - original).abs().max() < CLOSE
    was, now = (json.loads((folder / "config.json").read_text()) for folder in (narrow, wide))
    factors = [now[key] / was[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")]
    assert factors == [TIMES, TIMES, 1]
    assert (wide / "tokenizer.json").read_bytes() == (narrow / "tokenizer.json").read_bytes()


def test_the_shipped_model_has_the_same_choices_widened(pydoc_wide: tuple[Path, Path]) -> None:
    """At every position of its greedy continuation, in float32."""
    weights = load_file(pydoc_wide[0] / "model.safetensors")
    assert sum(each.numel() for each in weights.values()) == 188_273_664
    assert "188,273,664" in (pydoc_wide[0] / "README.md").read_text()
    narrow = family.path(family.NAMES[0])
    prompt = torch.tensor([Tokenizer.load(str(narrow)).encode("def area(")])
    network = LlamaForCausalLM.from_pretrained(narrow, dtype=torch.float32)
    ids = network.generate(prompt, max_new_tokens=32, do_sample=False)
    original, widened = logits(narrow, ids), logits(pydoc_wide[0], ids)
    assert (original - widened).abs().max() < CLOSE
    assert torch.equal(original.argmax(-1), widened.argmax(-1))


@pytest.mark.parametrize("times", [4, 16])
def test_the_hybrid_has_the_same_logits_widened(times: int, tmp_path: Path) -> None:
    """And guesses the same by its layer for multi-token prediction."""
    source = family.path(family.HYBRID)
    write_target(source, wide := tmp_path / "wide", times)
    always = {"method": "mtp", "num_speculative_tokens": 3, "draft_schedule": "lockstep", "row_budget": False}
    greedy = SamplingParams(temperature=0.0, max_tokens=60)
    answers = []
    for model in (source, wide):
        llm = LLM(str(model), {**always, "draft_placement": "target"}, {"slots": 512, "dtype": "float32"})
        answers += llm.generate(["def area("], greedy)
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].speculation.accepted_tokens == answers[1].speculation.accepted_tokens > 10
    table, ids, config = SlotTable(range(1, 61)), answers[0].tokens, EngineConfig(slots=256, dtype="float32")
    rows = [table.row(token, i) for i, token in enumerate(ids)]
    narrow, wider = (load(str(each), config).run(rows, range(60)).logits for each in (source, wide))
    assert narrow.std() > 1
    assert (narrow - wider).abs().max() < CLOSE * times


def test_its_head_has_the_same_logits(pydoc_wide: tuple[Path, Path]) -> None:
    """By the formula, after eight tokens, with zeros in the added part of the states."""

    def head_logits(head: Path, target: Path, states: torch.Tensor) -> torch.Tensor:
        tensors, target_tensors = (
            {name: each.float() for name, each in load_file(folder / "model.safetensors").items()}
            for folder in (head, target)
        )
        embedding = target_tensors["model.embed_tokens.weight"]
        formula = Eagle3Formula(tensors, embedding, embedding)
        return formula(range(len(states)), formula.encode(states))[0]

    states = torch.randn(8, 3, 256, generator=torch.Generator().manual_seed(1))
    narrow = head_logits(family.path("pydoc-eagle3"), family.path(family.NAMES[0]), states)
    wide = head_logits(pydoc_wide[1], pydoc_wide[0], torch.nn.functional.pad(states, (0, 768)))
    assert narrow.std() > 1
    assert (narrow - wide).abs().max() < CLOSE


def test_its_head_fits_the_widened_target_alone(pydoc_wide: tuple[Path, Path]) -> None:
    lent = load(family.NAMES[0], EngineConfig(slots=256)).target_weights()
    lent = replace(lent, config=LlamaConfig.from_pretrained(pydoc_wide[0]))
    assert Eagle3Network(Checkpoint(pydoc_wide[1]), lent, slots=16).description.hidden_state_layers
    with pytest.raises(CheckpointError, match="hidden size 256"):
        Eagle3Network(Checkpoint(family.path("pydoc-eagle3")), lent, slots=16)


def test_an_existing_copy_is_kept(pydoc_wide: tuple[Path, Path]) -> None:
    before = (pydoc_wide[0] / "model.safetensors").stat()
    assert widened_family(pydoc_wide[0].parent) == pydoc_wide
    assert (pydoc_wide[0] / "model.safetensors").stat().st_ino == before.st_ino


@pytest.mark.parametrize(
    ("kind", "tensor", "message"), [("gemma3", "", "only Llamas and dense"), ("llama", "mystery", "mystery")]
)
def test_a_refused_model_leaves_nothing_behind(kind: str, tensor: str, message: str, tmp_path: Path) -> None:
    other = source(tmp_path, model_type=kind)
    if tensor:
        save_file({f"model.layers.0.{tensor}.weight": torch.ones(2, 2)}, other / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        write_target(other, tmp_path / "wide")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]

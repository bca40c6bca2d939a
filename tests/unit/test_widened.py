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
from paceline.config import EngineConfig
from paceline.drafting.methods.eagle3 import Eagle3Network
from paceline.model import load
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.text import Tokenizer
from paceline_lab.training.family.widened_family import TIMES, widened_family, write_target
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.head_formulas import Eagle3 as Eagle3Formula
from tests.helpers.llamas import VOCABULARY

CLOSE = 1e-4
"""Tolerance for logits around 10 in float32: sums over more terms are rounded differently."""


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("narrow"))


@pytest.fixture(scope="module")
def wide(narrow: Path) -> Path:
    write_target(narrow, narrow.parent / "wide")
    return narrow.parent / "wide"


@pytest.fixture(scope="module")
def pydoc_wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return widened_family(tmp_path_factory.mktemp("family"))


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    network = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return network(ids).logits


def test_logits_are_those_of_the_original(narrow: Path, wide: Path) -> None:
    """Also for states that are small compared with epsilon, as the first layer's embeddings are."""
    ids = torch.arange(VOCABULARY)[None]
    original = logits(narrow, ids)
    assert original.abs().max() > 5
    assert (logits(wide, ids) - original).abs().max() < CLOSE


def test_epsilon_counts_where_states_are_small(tmp_path: Path) -> None:
    """With an epsilon that decides, a copy that kept it would say something else."""
    source = save_checkpoint(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    write_target(source, tmp_path / "wide")
    ids = torch.arange(VOCABULARY)[None]
    assert (logits(tmp_path / "wide", ids) - logits(source, ids)).abs().max() < CLOSE


def test_every_size_is_multiplied(wide: Path, narrow: Path) -> None:
    was, now = (json.loads((folder / "config.json").read_text()) for folder in (narrow, wide))
    assert now["hidden_size"] == TIMES * was["hidden_size"]
    assert now["intermediate_size"] == TIMES * was["intermediate_size"]
    assert now["num_attention_heads"] == was["num_attention_heads"]
    assert (wide / "tokenizer.json").read_bytes() == (narrow / "tokenizer.json").read_bytes()
    assert "for benchmarks" in (wide / "README.md").read_text()


def test_it_has_188_million_parameters(pydoc_wide: tuple[Path, Path]) -> None:
    weights = load_file(pydoc_wide[0] / "model.safetensors")
    parameters = sum(each.numel() for each in weights.values())
    assert parameters == 188_273_664
    assert f"{parameters:,}" in (pydoc_wide[0] / "README.md").read_text()


def test_the_shipped_model_has_the_same_choices_widened(pydoc_wide: tuple[Path, Path]) -> None:
    """At every position of its greedy continuation, in float32."""
    source = family.path(family.NAMES[0])
    prompt = torch.tensor([Tokenizer.load(str(source)).encode("def area(")])
    network = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = network.generate(prompt, max_new_tokens=32, do_sample=False)
    original, widened = logits(source, ids), logits(pydoc_wide[0], ids)
    assert (original - widened).abs().max() < CLOSE
    assert torch.equal(original.argmax(-1), widened.argmax(-1))


def test_its_head_has_the_same_logits(pydoc_wide: tuple[Path, Path]) -> None:
    """With zeros in the added part of the states."""
    states = torch.randn(8, 3, 256, generator=torch.Generator().manual_seed(1))
    narrow = head_logits(family.path("pydoc-eagle3"), family.path(family.NAMES[0]), states)
    wide = head_logits(pydoc_wide[1], pydoc_wide[0], torch.nn.functional.pad(states, (0, 768)))
    assert narrow.std() > 1
    assert (narrow - wide).abs().max() < CLOSE


def head_logits(head: Path, target: Path, states: torch.Tensor) -> torch.Tensor:
    """By the formula, of a prompt of eight tokens after which a target has these states."""
    tensors, target_tensors = (
        {name: each.float() for name, each in load_file(folder / "model.safetensors").items()}
        for folder in (head, target)
    )
    embedding = target_tensors["model.embed_tokens.weight"]
    formula = Eagle3Formula(tensors, embedding, embedding)
    return formula(range(len(states)), formula.encode(states))[0]


def test_its_head_fits_the_widened_target_alone(pydoc_wide: tuple[Path, Path]) -> None:
    lent = load(family.NAMES[0], EngineConfig(slots=256)).target_weights()
    lent = replace(lent, config=LlamaConfig.from_pretrained(pydoc_wide[0]))
    assert Eagle3Network(Checkpoint(pydoc_wide[1]), lent, slots=16).hidden_state_layers
    with pytest.raises(CheckpointError, match="hidden size 256"):
        Eagle3Network(Checkpoint(family.path("pydoc-eagle3")), lent, slots=16)


def test_an_existing_copy_is_kept(pydoc_wide: tuple[Path, Path]) -> None:
    before = (pydoc_wide[0] / "model.safetensors").stat()
    assert widened_family(pydoc_wide[0].parent) == pydoc_wide
    assert (pydoc_wide[0] / "model.safetensors").stat().st_ino == before.st_ino


def test_other_kinds_are_refused(narrow: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((narrow / "config.json").read_text())
    save_file(load_file(narrow / "model.safetensors"), other / "model.safetensors")
    (other / "config.json").write_text(json.dumps(config | {"model_type": "gemma3"}))
    with pytest.raises(CheckpointError, match="only Llamas"):
        write_target(other, tmp_path / "wide")
    assert not (tmp_path / "wide").exists()


def test_a_failure_leaves_nothing_behind(narrow: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((narrow / "config.json").read_text())
    save_file({"model.layers.0.mystery.weight": torch.ones(2, 2)}, other / "model.safetensors")
    with pytest.raises(CheckpointError, match="mystery"):
        write_target(other, tmp_path / "wide")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]

"""Heads whose configuration names all sizes are loaded without transformers, whose import takes seconds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import family
from paceline.drafting.heads.head_config import PlainDecoder, head_config, head_rotary
from paceline.model.checkpoint import Checkpoint, CheckpointError
from tests.helpers.checkpoints import change_config
from tests.helpers.head_checkpoints import llama_config, save_head

HEADS = ("pydoc-eagle", "pydoc-eagle3", *family.PUBLISHED_HEADS.values())


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("theta", [None, 1e6])
def test_its_keys_and_angles_are_those_of_transformers(
    name: str, theta: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(family.path(name))
    plain = head_config(checkpoint, theta)
    assert isinstance(plain, PlainDecoder)
    monkeypatch.setattr(PlainDecoder, "of", lambda keys: None)
    full: Any = head_config(checkpoint, theta)
    keys = asdict(plain)
    assert keys.pop("rope_theta") == full.rope_parameters["rope_theta"] == (theta or 1e4)
    assert keys == {key: getattr(full, key) for key in keys}
    ours, theirs = (head_rotary(config, 500, "cpu") for config in (plain, full))
    assert torch.equal(ours.cosines, theirs.cosines)
    assert torch.equal(ours.sines, theirs.sines)


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": None},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"partial_rotary_factor": 1.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"layer_types": ["sliding_attention"], "sliding_window": 64},
        {"num_hidden_layers": "1"},
        {"num_hidden_layers": 0.5},
    ],
)
def test_transformers_reads_all_others(changes: dict[str, object], tmp_path: Path) -> None:
    shutil.copyfile(family.path("pydoc-eagle3") / "config.json", tmp_path / "config.json")
    change_config(tmp_path, **changes)
    (tmp_path / "model.safetensors").symlink_to(family.path("pydoc-eagle3") / "model.safetensors")
    assert PlainDecoder.of(json.loads((tmp_path / "config.json").read_text())) is None
    if "num_hidden_layers" in changes:
        with pytest.raises(CheckpointError, match="describes no decoder"):
            head_config(Checkpoint(tmp_path))
    else:
        assert not isinstance(head_config(Checkpoint(tmp_path)), PlainDecoder)


@pytest.mark.parametrize(
    ("types", "complaint"),
    [
        (["sliding_attention"] * 2, "describes no decoder: .*layer_types"),
        (["chunked_attention"], "has layers of type 'chunked_attention' in layer_types"),
    ],
)
def test_layers_of_another_number_or_kind_are_refused(types: list[str], complaint: str, tmp_path: Path) -> None:
    config = llama_config(layer_types=types, sliding_window=64)
    checkpoint = Checkpoint(save_head(tmp_path, {"fc.weight": torch.zeros(1)}, config))
    with pytest.raises(CheckpointError, match=complaint):
        head_config(checkpoint)


def test_a_head_in_the_targets_process_takes_no_transformers() -> None:
    code = """if True:
        import sys
        from pathlib import Path
        from types import SimpleNamespace
        import torch
        from paceline import family
        from paceline.drafting.methods.eagle3 import Eagle3Network
        from paceline.model.checkpoint import Checkpoint
        from paceline.model.target_weights import TargetWeights

        embedding = torch.zeros(4096, 256)
        shape = SimpleNamespace(num_hidden_layers=6, hidden_size=256)
        target = TargetWeights(
            *(lambda: embedding, lambda x: x @ embedding.T, Path("target"), shape, torch.float32),
            *(torch.device("cpu"), 4096, 512, ""),
        )
        Eagle3Network(Checkpoint(family.path("pydoc-eagle3")), target, 256)
        sys.exit("transformers" in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0

"""A model that brings code, and code in the place of data: neither runs unless it was asked for."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from paceline.config import EngineConfig
from paceline.model.model_loader import load
from paceline.model.target_weights import load_target_weights

ROOT = Path(__file__).parents[3]
EVIL = """
from pathlib import Path
from transformers import PretrainedConfig

Path({trace!r}).touch()

class EvilConfig(PretrainedConfig):
    model_type = "evil"
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """There if the model's code has run."""
    return tmp_path / "it-ran"


@pytest.fixture
def evil(tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "configuration_evil.py").write_text(EVIL.format(trace=str(trace)))
    mapped = {"AutoConfig": "configuration_evil.EvilConfig", "AutoModelForCausalLM": "configuration_evil.EvilModel"}
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": mapped}))
    return str(folder)


def test_a_model_s_own_code_does_not_run(evil: str, trace: Path) -> None:
    with pytest.raises(ValueError, match="--trust-remote-code if you trust it"):
        load(evil, EngineConfig())
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_target_weights(evil, None, "cpu")
    assert not trace.exists()


def test_it_runs_if_that_is_asked_for(evil: str, trace: Path) -> None:
    """The counter-example: there is a trace then. It is no model, so it cannot be loaded all the same."""
    with pytest.raises((ValueError, AttributeError)):
        load(evil, EngineConfig(trust_remote_code=True))
    assert trace.exists()


def calls(path: Path) -> set[str]:
    """Of functions that run what they read."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            safe = any(each.arg == "weights_only" and ast.unparse(each.value) == "True" for each in node.keywords)
            if name in ("eval", "exec", "pickle.loads", "pickle.load", "marshal.loads", "yaml.load"):
                found.add(name)
            if name == "torch.load" and not safe:
                found.add(name)
    return found


def test_only_the_pipe_inside_a_service_unpickles() -> None:
    """Both of its ends belong to one service; what peers send is decoded and checked before it gets there."""
    sources = [path for folder in ("paceline", "services") for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 200
    dangerous = {str(path.relative_to(ROOT)): calls(path) for path in sources}
    assert {path: names for path, names in dangerous.items() if names} == {"paceline/ipc/pipe.py": {"pickle.loads"}}

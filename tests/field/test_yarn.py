"""YaRN as Qwen documents it: contexts up to factor x original, with transformers' logits beyond the original length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Starcoder2Config, Starcoder2ForCausalLM

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.llm import LLM
from paceline.memory_plan import plan_memory
from paceline.model import Model, SlotTable, load
from tests.helpers.checkpoints import change_config, save_tokenizer
from tests.helpers.gguf_files import tiny_config, write_gguf

ORIGINAL, FACTOR = 64, 4.0
LONGEST = int(ORIGINAL * FACTOR)
YARN = {"factor": FACTOR, "original_max_position_embeddings": ORIGINAL}
CONFIG = EngineConfig(slots=512, max_model_len=LONGEST, dtype="float32")
SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": ORIGINAL},
}
FORMS = {
    "as Qwen documents it": {"rope_scaling": {"rope_type": "yarn", **YARN}, "rope_theta": 1e6},
    "old key": {"rope_scaling": {"type": "yarn", **YARN}, "rope_theta": 1e6},
    "as transformers 5 writes it": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
}


def save(folder: Path, kind: type[Any] = Qwen2ForCausalLM, settings: type[Any] = Qwen2Config) -> Any:
    """A random network without scaling, on disk."""
    torch.manual_seed(5)
    network = kind(settings(**SIZES, initializer_range=0.25, rope_theta=1e6)).eval()
    network.save_pretrained(folder)
    save_tokenizer(folder, range(64))
    return network


def errors(model: Model, network: nn.Module, vocabulary: int = 64) -> Tensor:
    """By position, relative to the largest logit."""
    tokens = [(7 * i + 3) % vocabulary for i in range(LONGEST - 8)]
    table = SlotTable(range(1, len(tokens) + 1))
    ours = model.run([table.row(token, i) for i, token in enumerate(tokens)], range(len(tokens))).logits
    with torch.inference_mode():
        theirs = network(input_ids=torch.tensor([tokens])).logits[0]
    return (ours - theirs).abs().amax(-1) / theirs.abs().max()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("native", [True, False])
def test_logits_are_those_of_transformers(
    tmp_path: Path, form: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path)
    change_config(tmp_path, rope_parameters=None, rope_scaling=None)
    change_config(tmp_path, **FORMS[form])
    if not native:
        monkeypatch.setattr("paceline.model.network_factory.DTYPES", {})
    model = load(str(tmp_path), CONFIG)
    assert model.max_model_len == LONGEST
    network = Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert network.model.rotary_emb.attention_scaling > 1.1
    assert errors(model, network).max() < 1e-4


def test_a_model_of_transformers_own_layers(tmp_path: Path) -> None:
    save(tmp_path, Starcoder2ForCausalLM, Starcoder2Config)
    change_config(tmp_path, **FORMS["as transformers 5 writes it"])
    network = Starcoder2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert errors(load(str(tmp_path), CONFIG), network).max() < 1e-4


def test_packed_weights(tmp_path: Path) -> None:
    save(tmp_path)
    change_config(tmp_path, **FORMS["as transformers 5 writes it"])
    network = Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    off = errors(load(str(tmp_path), CONFIG.model_copy(update={"quantization": "q8_0"})), network)
    assert off[ORIGINAL:].mean() < 1.5 * off[:ORIGINAL].mean() < 0.1, "rounding alone"


@pytest.mark.parametrize("kind", ["qwen2", "starcoder2"])
def test_a_gguf_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tiny.gguf"
    rope = {"rope_type": "yarn", "rope_theta": 1e6, **YARN}
    network = write_gguf(path, tiny_config(kind, max_position_embeddings=ORIGINAL, rope_parameters=rope))
    model = load(str(path), CONFIG)
    assert model.max_model_len == LONGEST
    off = errors(model, network, 320)
    assert off[ORIGINAL:].mean() < 1.5 * off[:ORIGINAL].mean() < 0.03, "rounding alone"


def test_the_longest_context_is_the_default_and_no_more_is_served(tmp_path: Path) -> None:
    save(tmp_path)
    change_config(tmp_path, **FORMS["as transformers 5 writes it"])
    assert load(str(tmp_path), EngineConfig(slots=512)).max_model_len == LONGEST
    planned = plan_memory(EngineConfig(), SpeculativeConfig(), str(tmp_path), target=True, draft=False)
    assert planned.slots is not None
    assert planned.slots >= LONGEST
    with pytest.raises(ValueError, match=f"max_model_len {LONGEST + 1} exceeds the {LONGEST} positions"):
        load(str(tmp_path), CONFIG.model_copy(update={"max_model_len": LONGEST + 1}))


def test_a_configuration_that_counts_them_already(tmp_path: Path) -> None:
    """As DeepSeek's and gpt-oss's: the longest context is not multiplied again."""
    save(tmp_path)
    change_config(tmp_path, max_position_embeddings=LONGEST, **FORMS["as transformers 5 writes it"])
    assert load(str(tmp_path), EngineConfig(slots=512)).max_model_len == LONGEST


def test_speculation_changes_no_token_beyond_the_original_length(tmp_path: Path) -> None:
    save(tmp_path)
    change_config(tmp_path, **FORMS["as transformers 5 writes it"])
    lockstep = {"draft_schedule": "lockstep", "row_budget": False}
    llm = LLM(str(tmp_path), {"method": "draft_model", "model": str(tmp_path), **lockstep}, CONFIG)
    prompt, sampling = [(7 * i + 3) % 64 for i in range(ORIGINAL)], SamplingParams(temperature=0.0, max_tokens=100)
    plain, drafted = (llm.generate([prompt], sampling, speculative=each)[0] for each in (False, True))
    assert drafted.tokens == plain.tokens
    assert drafted.speculation.drafted_tokens > 0

"""GGUF files where a model may stand: found, loaded dequantised, planned for; and bad ones refused in a sentence.

Logits are those of the network that a file was written from, and of transformers' own loading where it reads the kind.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from paceline.cli.deployment import DeploymentOptions, plan_deployment
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.doctor.candidates import candidates
from paceline.drafting import complete_config
from paceline.drafting.vocabulary.vocabulary_mapping import Vocabulary
from paceline.gguf.gguf_config import GgufSettings
from paceline.launcher import StartError
from paceline.memory_plan import packed_memory, plan_memory
from paceline.model import Model, SlotTable, load
from paceline.model.gguf_weights import computes_in_bfloat16
from paceline.model.loading import outline, read_gguf
from paceline.model.packed_model import PackedModel
from paceline.model.target_weights import load_target_weights
from paceline.model.transformers_setup import model_config
from paceline.model_names import ModelNotFoundError, configuration, resolve_model, served_name
from tests.helpers.gguf_files import KINDS, YARN, tiny_config, write_gguf
from tests.helpers.gguf_states import STATE_KINDS

CONFIG = EngineConfig(slots=256, dtype="float32")
TOKENS = [7 * n % 320 for n in range(40)]
READ_BY_TRANSFORMERS = ("llama", "qwen2", "gemma2", "gemma3_text", "phi3", "starcoder2")
"""Model types whose tiny files transformers 5.24 opens: for others it lacks the kind, or sizes that the file has."""
CONFIGURED_BY_TRANSFORMERS = ("llama", "qwen2", "starcoder2")
"""And whose configuration it reads whole: not Gemma's query scale, nor the share of Phi's heads that turns."""
LLAMA3: dict[str, Any] = {
    **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny-Q8_0.gguf", tiny_config("qwen2"))
    return tmp_path / "tiny-Q8_0.gguf"


def logits_of(network: nn.Module, tokens: list[int] = TOKENS) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = network(input_ids=torch.tensor([tokens])).logits[0]
    return logits


def model_logits(model: Model) -> torch.Tensor:
    table = SlotTable(range(model.slots, model.slots - len(TOKENS), -1))
    rows = [table.row(token, position) for position, token in enumerate(TOKENS)]
    return model.run(rows, range(len(TOKENS))).logits


def read(path: Path) -> nn.Module:
    return read_gguf(path, model_config(path), torch.float32)


@pytest.mark.parametrize("model_type", KINDS)
def test_a_dequantised_network_is_the_one_that_was_written(model_type: str, tmp_path: Path) -> None:
    network = write_gguf(tmp_path / "model.gguf", tiny_config(model_type), "Q4_0")
    assert torch.equal(logits_of(read(tmp_path / "model.gguf")), logits_of(network))


def test_the_bias_of_a_router_stays_float32(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written = write_gguf(path, tiny_config("lfm2_moe"), "F32")
    network = read_gguf(path, model_config(path), torch.bfloat16)
    name = "model.layers.1.feed_forward.expert_bias"
    assert network.get_parameter("model.embed_tokens.weight").dtype == torch.bfloat16
    assert torch.equal(network.get_buffer(name), written.get_buffer(name))


@pytest.mark.parametrize("model_type", READ_BY_TRANSFORMERS)
def test_a_dequantised_network_is_that_of_transformers(model_type: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_config(model_type), "Q8_0")
    ours = read(tmp_path / "model.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    expected = dict(theirs.named_parameters())
    assert dict(ours.named_parameters()).keys() == expected.keys()
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    if model_type in CONFIGURED_BY_TRANSFORMERS:
        assert torch.equal(logits_of(ours), logits_of(theirs))


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"head_dim": 64, "rope_parameters": LLAMA3, "max_position_embeddings": 131072}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"rope_parameters": YARN}),
        ("nemotron_h", {"attention_bias": True, "mlp_bias": True}),
        ("nemotron_h", {"n_groups": 1, "use_conv_bias": False}),
        ("qwen3_5_text", {"linear_num_value_heads": 2}),
        ("gemma2", {"num_hidden_layers": 46, "hidden_size": 32, "query_pre_attn_scalar": 8}),
    ],
)
def test_other_settings_reach_the_network(model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    network = write_gguf(tmp_path / "model.gguf", tiny_config(model_type, **changes), "Q8_0")
    tokens = TOKENS * 5  # beyond the length that YaRN scales
    assert torch.equal(logits_of(read(tmp_path / "model.gguf"), tokens), logits_of(network, tokens))


@pytest.mark.parametrize(
    "model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt_oss", "phi3", *STATE_KINDS]
)
def test_a_loaded_model_computes_what_the_file_says(model_type: str, tmp_path: Path) -> None:
    network = write_gguf(tmp_path / "model.gguf", tiny_config(model_type), "F32")
    model = load(str(tmp_path / "model.gguf"), CONFIG)
    expected = logits_of(network)
    assert (model_logits(model) - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (model.vocabulary_size, model.max_model_len, model.eos_token_ids) == (320, 256, (0, 2))


def test_mistral_3_is_packed_in_the_order_of_its_rows(tmp_path: Path) -> None:
    """Its rows are reordered as in `llama` files."""
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_config("ministral3", rope_parameters={"rope_type": "default", "rope_theta": 10000.0}), "F32")
    model, expected = load(str(path), CONFIG), logits_of(read(path))
    assert isinstance(model, PackedModel)
    assert (model_logits(model) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_packed_model_refuses_a_tensor_that_it_would_ignore(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}
    write_gguf(tmp_path / "model.gguf", tiny_config("llama"), extra_tensors=extra)
    with pytest.raises(ValueError, match=r"has the tensor blk.0.attn_q_norm.weight, which a llama does not have"):
        load(str(tmp_path / "model.gguf"), CONFIG)


def test_what_is_dequantised_is_said_with_its_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_gguf(tmp_path / "said.gguf", tiny_config("gemma2"))
    with caplog.at_level(logging.INFO):
        network = read_gguf(tmp_path / "said.gguf", model_config(tmp_path / "said.gguf"), torch.bfloat16)
    size = sum(each.nbytes for each in network.parameters())
    assert f"said.gguf: dequantised to bfloat16: {size / 2**30:.2f} GiB" in caplog.messages
    assert {each.dtype for each in network.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("quantization", "computes", "dtype"),
    [("Q8_0", True, torch.bfloat16), ("Q8_0", False, torch.float32), ("F32", True, torch.float32)],
)
def test_a_file_becomes_bfloat16_where_the_cpu_computes_in_it(
    quantization: str, computes: bool, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_config("gemma2"), quantization)
    monkeypatch.setattr("paceline.model.gguf_weights.computes_in_bfloat16", lambda device: computes)
    assert next(outline(str(tmp_path / "model.gguf"), EngineConfig()).parameters()).dtype == dtype


def test_a_split_file_is_one_model(tmp_path: Path) -> None:
    network = write_gguf(tmp_path / "model.gguf", tiny_config("qwen2"), "Q8_0", part_tensors=10)
    first = tmp_path / "model-00001-of-00003.gguf"
    assert len(list(tmp_path.glob("*.gguf"))) == 3
    assert torch.equal(logits_of(read(first)), logits_of(network))
    assert resolve_model(str(first)) == resolve_model(str(tmp_path)) == str(first)
    assert served_name(str(first), None) == "model"
    (tmp_path / "model-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelNotFoundError, match=r"is one of 3 parts, and model-00002-of-00003.gguf is missing"):
        resolve_model(str(first))
    with pytest.raises(ModelNotFoundError, match=r"later part: name the first, model-00001-of-00003.gguf"):
        resolve_model(str(tmp_path / "model-00003-of-00003.gguf"))


def test_a_path_or_a_folder_with_one_file_names_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert resolve_model(file.name) == resolve_model(".") == str(file)
    assert (served_name(str(file), None), served_name(str(file), "mine")) == ("tiny-Q8_0", "mine")
    shutil.copyfile(file, file.parent / "mmproj-tiny.gguf")  # images, not a model
    assert resolve_model(".") == str(file)
    shutil.copyfile(file, file.parent / "other.gguf")
    with pytest.raises(ModelNotFoundError, match=r"has 2 models \(other.gguf, tiny-Q8_0.gguf, ...\): name one of them"):
        resolve_model(".")
    with pytest.raises(ModelNotFoundError, match=r"a model is a GGUF file, a folder with config\.json"):
        resolve_model("missing.gguf")


def test_a_folder_in_the_layout_of_transformers_goes_before_a_file_in_it(file: Path) -> None:
    (file.parent / "config.json").write_text('{"model_type": "llama"}')
    assert resolve_model(str(file.parent)) == str(file.parent)
    assert configuration(str(file.parent)) == {"model_type": "llama"}
    assert configuration(str(file))["model_type"] == "qwen2"


def test_a_file_is_a_draft_model_and_a_target(file: Path) -> None:
    plan = plan_deployment(DeploymentOptions(model=str(file), speculation=SpeculativeConfig(model=str(file))))
    assert (plan.model, plan.served_model_name) == (str(file), "tiny-Q8_0")
    assert (plan.speculation.method, plan.speculation.model) == ("draft_model", str(file))
    assert [each.name for each in candidates(str(file), [])] == ["ngram", "suffix"]
    assert complete_config(SpeculativeConfig(method="auto"), str(file)).method == "suffix"
    assert Vocabulary.load(str(file)).size == 320
    with pytest.raises(StartError, match="is a GGUF file, which vLLM is not given here"):
        plan_deployment(DeploymentOptions(model=str(file), speculation=SpeculativeConfig(), vllm=[]))


def test_a_head_reads_the_targets_matrices_from_a_file(tmp_path: Path) -> None:
    network = write_gguf(tmp_path / "model.gguf", tiny_config("qwen2"), "Q5_1")
    weights = load_target_weights(str(tmp_path / "model.gguf"), torch.float32, "cpu")
    parameters = dict(network.named_parameters())
    assert torch.equal(weights.embedding(), parameters["model.embed_tokens.weight"])
    final = torch.randn(3, 64)
    assert torch.allclose(weights.output(final), final @ parameters["lm_head.weight"].T, atol=1e-5)
    assert (weights.vocabulary_size, weights.max_model_len, weights.hidden_size) == (320, 256, 64)


def test_the_memory_of_a_file_that_stays_packed_is_its_own(file: Path) -> None:
    engine = EngineConfig(max_num_batched_rows=16)
    config = GgufSettings(**configuration(str(file)))
    need = packed_memory(str(file), config, engine)
    vectors = 4 * (2 * (2 * 64 + 64 + 2 * 32) + 64)  # norms and biases of two layers, in float32
    matrices = (2 * 320 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64)) * 34 // 32
    assert need.weights == matrices + vectors
    whole = packed_memory(str(file), config, engine.model_copy(update={"dtype": "float32"}))
    assert (whole.weights, whole.bytes_per_slot) == (need.weights, 2 * need.bytes_per_slot)
    write_gguf(file, tiny_config("qwen2"), "BF16")
    assert packed_memory(str(file), config, engine).weights == matrices * 32 // 34 * 2 + vectors


def test_the_plan_counts_what_is_dequantised_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes = {}
    for model_type in ("qwen3", "starcoder2"):
        config = tiny_config(model_type, head_dim=256, hidden_size=1024, intermediate_size=4096)
        network = write_gguf(tmp_path / f"{model_type}.gguf", config, "Q4_0")
        with caplog.at_level(logging.INFO):
            plan_memory(
                EngineConfig(), SpeculativeConfig(), str(tmp_path / f"{model_type}.gguf"), target=True, draft=False
            )
        [record] = [each for each in caplog.records if each.message == "memory planned"]
        sizes[model_type] = record.weights_gib * 2**30 / sum(each.numel() for each in network.parameters())
        caplog.clear()
    assert sizes["qwen3"] == pytest.approx(18 / 32, rel=0.05)  # bytes of a number
    assert sizes["starcoder2"] == pytest.approx(2 if computes_in_bfloat16("cpu") else 4, rel=0.05)


@pytest.mark.parametrize("end", [3, 100, 20_000, -1])
def test_a_file_that_is_cut_off_is_refused(end: int, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:end])
    with pytest.raises(ValueError, match=r"is cut off within|is no GGUF file") as caught:
        load(str(file), CONFIG)
    assert "\n" not in str(caught.value)


def test_a_bad_tensor_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_config("starcoder2"), extra_tensors={"blk.0.codes": np.ones((2, 32), np.int8)})
    with pytest.raises(ValueError, match=r"the tensor blk.0.codes is of the type I8, not read here"):
        load(str(path), CONFIG)
    write_gguf(
        path, tiny_config("starcoder2"), change=lambda name, data: data[:-1] if name == "output_norm.weight" else data
    )
    with pytest.raises(ValueError, match=r"the tensor output_norm.weight has the shape \[63\], and not \[64\]"):
        load(str(path), CONFIG)
    write_gguf(path, tiny_config("qwen2", rope_parameters=YARN), omit=["blk.1.attn_q.bias"])
    with pytest.raises(ValueError, match=r"has no tensor blk.1.attn_q.bias"):
        load(str(path), CONFIG)
    write_gguf(path, tiny_config("starcoder2"), tokens=300)
    with pytest.raises(ValueError, match=r"tokenizer.ggml.tokens has 300 tokens, but token_embd.weight has 320 rows"):
        load(str(path), CONFIG)


def test_a_file_cannot_be_shared_by_ranks(file: Path) -> None:
    with pytest.raises(ValueError, match="a GGUF file cannot be shared by ranks yet: set tensor_parallel_size to 1"):
        load(str(file), CONFIG.model_copy(update={"tensor_parallel_size": 2}))


def test_a_packed_model_takes_no_transformers(file: Path) -> None:
    """It takes seconds to import."""
    code = (
        "import sys; from paceline.llm import LLM; "
        "LLM(sys.argv[1], None, {'slots': 256}).generate('a'); "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(file)], check=False, timeout=120).returncode == 0

"""Models of real sizes with random weights, made on a device: for times and memory, not for tokens."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from paceline.config import EngineConfig
from paceline.model import Model
from paceline.model.loading import build
from paceline_lab.bench.gpu.model_shapes import Shape

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM"}
GROUP = 128
"""Weights of INT4 that share a scale."""


def make_network(shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Transformers' network, initialised on the device."""
    torch.manual_seed(1)
    with torch.device(device):
        network: nn.Module = AutoModelForCausalLM.from_config(_config(shape), dtype=dtype)
    return network.eval()


def build_model(network: nn.Module, engine: EngineConfig) -> Model:
    """The engine's model of a network, whose weights it takes over."""
    return build(network, "random", engine, fingerprint="", eos_token_ids=[])


def weight_bytes(network: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in network.parameters())


def write_config(folder: Path, shape: Shape) -> str:
    """A checkpoint without weights, for plans. Returns its name."""
    _config(shape).save_pretrained(folder)
    return str(folder)


def write_int4(folder: Path, shape: Shape, device: torch.device) -> str:
    """A checkpoint with the matrices of all layers in INT4, as compressed-tensors packs them. Returns its name."""
    with torch.device("meta"):
        network: nn.Module = AutoModelForCausalLM.from_config(_config(shape), dtype=torch.bfloat16)
    weights: dict[str, Tensor] = {}
    for name, parameter in network.named_parameters():
        packed = parameter.dim() == 2 and ".layers." in name
        tensors = _int4(parameter.shape, device) if packed else {"weight": _drawn(parameter.shape, device)}
        weights |= {f"{name.removesuffix('weight')}{each}": tensor.cpu() for each, tensor in tensors.items()}
    groups = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": groups}},
        "ignore": ["lm_head"],
    }
    write_config(folder, shape)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    Tokenizer(WordLevel({"0": 0}, unk_token="0")).save(str(folder / "tokenizer.json"))  # a model has one
    return str(folder)


def write_eagle3(folder: Path, shape: Shape, device: torch.device) -> str:
    """An EAGLE-3 head for a target of this shape, with a vocabulary of a quarter of its own. Returns its name."""
    hidden, inner, size = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * size, shape["num_key_value_heads"] * size
    columns = shape["vocab_size"] // 4
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (columns, hidden),
    }
    weights = {name: _drawn(each, device).cpu() for name, each in shapes.items()}
    weights["d2t"] = 3 * torch.arange(columns)  # every fourth token
    config = {**shape, "num_hidden_layers": 1, "draft_vocab_size": columns, "rope_theta": 10000.0}
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def _config(shape: Shape) -> PretrainedConfig:
    return AutoConfig.for_model(**shape, dtype="bfloat16", architectures=[ARCHITECTURES[shape["model_type"]]])


def _drawn(shape: tuple[int, ...] | torch.Size, device: torch.device) -> Tensor:
    drawn = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return drawn.fill_(1.0) if drawn.dim() == 1 else drawn.normal_(0.0, 0.02)


def _int4(shape: torch.Size, device: torch.device) -> dict[str, Tensor]:
    """A matrix of random codes, eight in 32 bits; its numbers are about as large as those of `_drawn`."""
    rows, width = shape
    codes = torch.randint(-(2**31), 2**31, (rows, width // 8), dtype=torch.int64, device=device)
    scales = torch.full((rows, width // GROUP), 0.004, dtype=torch.bfloat16, device=device)
    return {
        "weight_packed": codes.to(torch.int32),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, width]),
    }

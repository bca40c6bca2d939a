"""Checkpoints of heads on disk, with the names, shapes and configurations that are published; and a target for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.config import EngineConfig
from paceline.model.checkpoint import Checkpoint
from paceline.model.loading import build
from paceline.model.model import TransformersModel
from paceline.model.target_weights import TargetWeights
from tests.helpers.checkpoints import save_tokenizer

HIDDEN, INNER, HEADS, KV_HEADS = 64, 96, 4, 2
VOCABULARY, LAYERS, POSITIONS = 96, 8, 512
Config = dict[str, Any]
T = TypeVar("T")


def target_network(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Always the same one: peaked, and deep enough for the layers that EAGLE-3 heads read by default: 2, 4 and 5."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=POSITIONS,
        initializer_range=0.25,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def target_model(network: LlamaForCausalLM | None = None, *, slots: int = 1024) -> TransformersModel:
    return build(network or target_network(), "target", EngineConfig(slots=slots), "", [])


def target_weights(dtype: torch.dtype = torch.float32) -> TargetWeights:
    return target_model(target_network(dtype), slots=256).target_weights()


def save_target(folder: Path) -> Path:
    """With a tokenizer that reads token i as the number i."""
    network = target_network()
    network.generation_config.eos_token_id = network.config.eos_token_id = None
    network.save_pretrained(folder)
    save_tokenizer(folder, range(VOCABULARY))
    return folder


def random(generator: torch.Generator, *shape: int) -> Tensor:
    """A norm's weights, or a bias, around 1; or a matrix that about keeps the size of what it is given."""
    noise = torch.randn(shape, generator=generator)
    return 1 + 0.3 * noise if len(shape) == 1 else noise * 1.5 / shape[-1] ** 0.5


def layer(
    generator: torch.Generator,
    name: str,
    *,
    into: int,
    h: int = HIDDEN,
    head_dim: int | None = None,
    biases: bool = False,
    head_norms: bool = False,
) -> dict[str, Tensor]:
    """One of a Llama whose attention takes `into` numbers; without the norm before it."""
    size = head_dim or h // HEADS
    rows = {"q": HEADS * size, "k": KV_HEADS * size, "v": KV_HEADS * size}
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{x}_proj.weight": (n, into) for x, n in rows.items()}
    shapes |= {"self_attn.o_proj.weight": (h, HEADS * size), "mlp.down_proj.weight": (h, INNER)}
    shapes |= {"mlp.gate_proj.weight": (INNER, h), "mlp.up_proj.weight": (INNER, h)}
    shapes |= {"post_attention_layernorm.weight": (h,)}
    shapes |= {f"self_attn.{x}_proj.bias": (n,) for x, n in rows.items()} if biases else {}
    shapes |= {f"self_attn.{x}_norm.weight": (size,) for x in ("q", "k")} if head_norms else {}
    return {f"{name}.{key}": random(generator, *shape) for key, shape in shapes.items()}


def eagle_tensors(*, bias: bool = False, qkv_bias: bool = False, norms: bool = False) -> dict[str, Tensor]:
    """EAGLE-1's. `norms`: the three that HASS heads have more."""
    generator = torch.Generator().manual_seed(11)
    tensors = {"fc.weight": random(generator, HIDDEN, 2 * HIDDEN)}
    tensors |= layer(generator, "layers.0", into=HIDDEN, biases=qkv_bias)
    if bias:
        tensors["fc.bias"] = random(generator, HIDDEN)
    if norms:
        names = ("embed_layernorm", "layers.0.input_layernorm", "lm_head_layernorm")
        tensors |= {f"{name}.weight": random(generator, HIDDEN) for name in names}
    return tensors


def eagle3_tensors(
    *,
    states: int = 3,
    h: int = HIDDEN,
    columns: int = VOCABULARY,
    layers: int = 1,
    fc: bool = True,
    lm_head: bool = True,
    **options: Any,
) -> dict[str, Tensor]:
    """EAGLE-3's. `columns`: the tokens that it guesses, without saying which. `options`: see `layer`."""
    generator = torch.Generator().manual_seed(13)
    tensors = layer(generator, "midlayer", into=2 * h, h=h, **options)
    tensors |= {f"midlayer.{name}.weight": random(generator, h) for name in ("hidden_norm", "input_layernorm")}
    for n in range(1, layers):
        tensors |= layer(generator, f"layers.{n}", into=h, h=h, **options)
        tensors[f"layers.{n}.input_layernorm.weight"] = random(generator, h)
    tensors["norm.weight"] = random(generator, h)
    tensors |= {"fc.weight": random(generator, h, states * HIDDEN)} if fc else {}
    return tensors | ({"lm_head.weight": random(generator, columns, h)} if lm_head else {})


def reduced(ids: list[int], vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """d2t and t2d of a head that guesses these tokens of the target."""
    known = torch.zeros(vocabulary, dtype=torch.bool)
    known[ids] = True
    return {"d2t": torch.tensor(ids) - torch.arange(len(ids)), "t2d": known}


def llama_config(h: int = HIDDEN, **more: Any) -> Config:
    """What original uploads put into config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": h,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "torch_dtype": "float16",
        "tie_word_embeddings": False,
    } | more


def renamed(tensors: Mapping[str, Tensor], rename: Callable[[str], str]) -> dict[str, Tensor]:
    return {rename(name): tensor for name, tensor in tensors.items()}


def without(mapping: Mapping[str, T], *names: str) -> dict[str, T]:
    return {name: value for name, value in mapping.items() if name not in names}


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * shape[-1] ** -0.5


def save_head(folder: Path, tensors: Mapping[str, Tensor], config: Config | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_bin(folder: Path, tensors: Mapping[str, Tensor], config: Config, **options: Any) -> Path:
    """As torch saves it. `options`: of `torch.save`."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(dict(tensors), folder / "pytorch_model.bin", **options)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read_tensors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that checkpoints read from now on."""
    names: list[str] = []
    tensor = Checkpoint.tensor

    def noted(self: Checkpoint, name: str, *options: Any) -> Tensor:
        names.append(name)
        return tensor(self, name, *options)

    monkeypatch.setattr(Checkpoint, "tensor", noted)
    return names

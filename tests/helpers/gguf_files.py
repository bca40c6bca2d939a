"""Writes tiny random models as GGUF files, with llama.cpp's own package `gguf`.

`write_gguf` returns the transformers network that computes what the file says: its weights are those of the file,
dequantised. Names come from the tables of `gguf`, so that they are another source than `paceline.gguf`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.gguf_states import (
    FLOATS,
    STATE_ARCHITECTURES,
    STATE_KINDS,
    add_state_keys,
    converted_name,
    is_plus_one,
    state_shape,
    tiled_columns,
    tiled_rows,
)

CONTROL, NORMAL, UNUSED = 3, 1, 5
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""The first tokens of a tiny vocabulary. Texts end with the last."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ARCHITECTURES: Mapping[str, str] = {
    **{"mistral": "llama", "ministral3": "mistral3", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"},
    **{"gemma3_text": "gemma3", "gpt_oss": "gpt-oss"},
    **STATE_ARCHITECTURES,
}
"""llama.cpp's names of transformers' model types, where they differ."""
PERMUTED = ("llama", "mistral3", "granite", "nemotron_h")
PLUS_ONE = ("gemma2", "gemma3")
SCALES: Mapping[str, tuple[int, ...]] = {
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
    **{"IQ4_NL": (0,), "IQ4_XS": (0,)},
}
"""Where blocks that `gguf` cannot quantise have their half-precision scales, in bytes."""
BASE: Mapping[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
MOE: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
    "mistral": {"sliding_window": None, "head_dim": 32},
    "ministral3": {
        "rope_parameters": {
            **YARN,
            **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        }
    },
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8},
    "gemma3_text": {
        **{"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 7},
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "phi3": {"sliding_window": 100, "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "starcoder2": {},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {**MOE, "norm_topk_prob": True},
    "gpt_oss": {
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
        "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
    "granite": {
        **{"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22},
        "attention_multiplier": 0.07,
    },
    **STATE_KINDS,
}
"""What tiny configurations of transformers' model types have beside `BASE`."""


class View(NamedTuple):
    """A part of a parameter, in the layout of the file; what is written to `tensor` changes the parameter.

    `plus`: what the file adds to it. `shape`: the file's. `order`: of its rows in the file. `decay`: the file has the
    exponential with a minus.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    plus: float = 0.0
    order: Tensor | None = None
    decay: bool = False

    def data(self) -> np.ndarray:
        """As the file has it, float32."""
        tensor = self.tensor if self.order is None else self.tensor[self.order]
        tensor = -tensor.exp() if self.decay else tensor + self.plus
        return tensor.reshape(self.shape).numpy()

    def take(self, data: np.ndarray) -> None:
        """Change the parameter to what the file has."""
        tensor = torch.from_numpy(data.reshape(self.tensor.shape).astype(np.float32))
        tensor = tensor.neg().log() if self.decay else tensor - self.plus
        self.tensor[slice(None) if self.order is None else self.order] = tensor


def tiny_config(model_type: str, **changes: Any) -> Any:
    """transformers' configuration of a tiny model."""
    return AutoConfig.for_model(model_type, **{**BASE, **KINDS[model_type], **changes})


def write_gguf(
    path: Path,
    config: Any,
    quantization: str = "Q8_0",
    *,
    seed: int = 0,
    part_tensors: int = 0,
    omit: Collection[str] = (),
    metadata: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    tokens: int | None = None,
    pre: str = "smollm",
    change: Callable[[str, np.ndarray], np.ndarray] | None = None,
) -> nn.Module:
    """Write a random model of this configuration, and return it, in float32.

    `quantization`: of matrices, by the name of the format. `part_tensors`: tensors of each part of a split file.
    `omit`: names of tensors and keys that the file lacks. `metadata`: keys that are added or replaced. `tokens`: those
    of the vocabulary, if not as many as the embedding has rows. `change`: the data of a tensor [rows, ...] by its name,
    before it is written.
    """
    network = random_network(config, seed)
    writer = _writer(path, config, metadata or {}, omit, part_tensors)
    _add_tokenizer(writer, config.vocab_size if tokens is None else tokens, pre)
    for name, data in (_rope_tensors(config) | dict(extra_tensors or {})).items():
        writer.add_tensor(name, data)
    rng = np.random.default_rng(seed)
    for view in _views(network, config):
        packed, kind = _pack(view, quantization, rng)
        values = gguf.quants.dequantize(packed, kind) if packed.dtype == np.uint8 else packed
        view.take(values)
        if view.name not in omit:
            packed = packed if change is None else change(view.name, packed)
            writer.add_tensor(view.name, np.ascontiguousarray(packed), raw_dtype=kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return network


def random_network(config: Any, seed: int) -> nn.Module:
    """What `write_gguf` writes: its numbers before they are rounded."""
    torch.manual_seed(seed)
    network: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    _randomize(network)
    return network


def stored_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Parameters, tied ones once, and the biases of routers, which are none."""
    biases = {name: buffer for name, buffer in network.named_buffers() if name.endswith("expert_bias")}
    return dict(network.named_parameters()) | biases


def random_blocks(kind: str, rows: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of random codes, uint8 [rows, bytes], of a format in `SCALES`; numbers are as large as a layer's."""
    number = gguf.GGMLQuantizationType[kind]
    size, count = gguf.GGML_QUANT_SIZES[number]
    blocks = rng.integers(0, 256, (rows, width // size, count), dtype=np.uint8)
    scales = {at: rng.uniform(0.001, 0.01, blocks.shape[:2]) for at in SCALES[kind]}
    _set_scales(blocks, scales, 1.0)
    _set_scales(blocks, scales, width**-0.5 / gguf.quants.dequantize(blocks.reshape(rows, -1), number).std())
    return blocks.reshape(rows, -1)


def _set_scales(blocks: np.ndarray, scales: Mapping[int, np.ndarray], factor: float) -> None:
    """`scales`: of each block, by where it has them, in bytes."""
    for at, numbers in scales.items():
        blocks[..., at : at + 2] = (factor * numbers).astype(np.float16)[..., None].view(np.uint8)


def _randomize(network: nn.Module) -> None:
    """Weights whose permutations and omissions change the output: no norm is all ones, no bias zero."""
    for name, parameter in stored_tensors(network).items():
        scale = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
        nn.init.normal_(parameter, 1.0 if "norm" in name and "weight" in name else 0.0, scale)


def _pack(view: View, quantization: str, rng: np.random.Generator) -> tuple[np.ndarray, Any]:
    """The data of a tensor as it is written, and its type."""
    kind = gguf.GGMLQuantizationType[quantization]
    data, size = view.data(), gguf.GGML_QUANT_SIZES[kind][0]
    floats = "ffn_gate_inp" in view.name or view.name.endswith((".bias", *FLOATS))
    if floats or data.ndim == 1 or data.shape[-1] % size:
        return data, gguf.GGMLQuantizationType.F32
    if quantization in ("F32", "F16"):
        return data.astype({"F32": np.float32, "F16": np.float16}[quantization]), kind
    if quantization in SCALES:
        blocks = random_blocks(quantization, data.size // data.shape[-1], data.shape[-1], rng)
        return blocks.reshape(*data.shape[:-1], -1), kind
    return gguf.quants.quantize(data, kind), kind


def _views(network: nn.Module, config: Any) -> Iterator[View]:
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    [arch] = [number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, parameter in stored_tensors(network).items():
        tensor = parameter.data
        if ".experts." in name:
            yield from _expert_views(name, tensor, interleaved=architecture == "gpt-oss")
            continue
        found = names.get_name(converted_name(name), try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        found = f"{found}.weight" if name.endswith("sinks") else found
        shape = state_shape(found, tensor, config)
        if (order := tiled_rows(found, tensor, config)) is not None:
            yield View(found, tensor, shape, order=order, decay=found.endswith("ssm_a"))
        elif heads := _permuted_heads(found, architecture, config):
            yield View(found, tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2), shape)
        elif "ffn_gate_inp_shexp" in found:
            yield View(found, tensor[0], shape[1:])
        else:
            plus_one = is_plus_one(found, config) or (architecture in PLUS_ONE and found.endswith("norm.weight"))
            view = tiled_columns(found, tensor, config)
            yield View(found, view, shape, float(plus_one), decay=found.endswith("ssm_a"))


def _permuted_heads(name: str, architecture: str, config: Any) -> int:
    if architecture not in PERMUTED:
        return 0
    if ".attn_q." in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".attn_k." in name else 0


def _expert_views(name: str, tensor: Tensor, *, interleaved: bool) -> Iterator[View]:
    """Of a mixture's stacked experts; in GPT-OSS matrices are [in, out], and gate and up alternate."""
    layer, kind = name.split(".")[2], "bias" if name.endswith("bias") else "weight"
    if "down_proj" in name:
        parts = {"down": tensor}
    elif interleaved:
        parts = {"gate": tensor[..., ::2], "up": tensor[..., 1::2]}
    else:
        gate, up = tensor.chunk(2, dim=1)
        parts = {"gate": gate, "up": up}
    for part, view in parts.items():
        view = view.mT if interleaved and kind == "weight" else view
        yield View(f"blk.{layer}.ffn_{part}_exps.{kind}", view, tuple(view.shape))


class _Writer(gguf.GGUFWriter):
    """Leaves keys out, and replaces others."""

    def __init__(self, *args: Any, omit: Collection[str], replaced: Mapping[str, Any], **options: Any) -> None:
        self._omit, self._replaced = set(omit), dict(replaced)
        super().__init__(*args, **options)
        for key, value in self._replaced.items():
            super().add_key_value(key, value, gguf.GGUFValueType.get_type(value))

    def add_key_value(self, key: str, val: Any, vtype: Any, sub_type: Any = None) -> None:
        if key not in self._omit and key not in self._replaced:
            super().add_key_value(key, val, vtype, sub_type)


def _writer(path: Path, config: Any, replaced: Mapping[str, Any], omit: Collection[str], part_tensors: int) -> _Writer:
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = _Writer(None, architecture, split_max_tensors=part_tensors, omit=omit, replaced=replaced)
    experts = config.model_type == "gpt_oss"
    writer.add_name(path.stem)
    if config.model_type in STATE_KINDS:
        add_state_keys(writer, config)
        return writer
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    if config.model_type == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.model_type in ("gemma2", "gemma3_text", "phi3", "gpt_oss"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if count := getattr(config, "num_local_experts" if experts else "num_experts", 0):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.intermediate_size if experts else config.moe_intermediate_size)
    if config.model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    _add_rope(writer, config)
    return writer


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _add_rope(writer: _Writer, config: Any) -> None:
    rope = config.rope_parameters
    if "full_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_dimension_count(int(_head_dim(config) * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn", "longrope"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        ratio = config.max_position_embeddings / rope["original_max_position_embeddings"]
        writer.add_rope_scaling_attn_factors(
            (1 + np.log(ratio) / np.log(rope["original_max_position_embeddings"])) ** 0.5
        )
    if "beta_fast" in rope:
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if "llama_4_scaling_beta" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _rope_tensors(config: Any) -> dict[str, np.ndarray]:
    """Frequency factors, which a file has as tensors."""
    rope = getattr(config, "rope_parameters", {})
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{way}.weight": np.array(rope[f"{way}_factor"], np.float32) for way in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    length, size = rope["original_max_position_embeddings"], _head_dim(config)
    low, high = length / rope["low_freq_factor"], length / rope["high_freq_factor"]
    factors = []
    for index in range(0, size, 2):
        wave = 2 * np.pi * rope["rope_theta"] ** (index / size)
        smooth = (length / wave - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(1.0 if wave < high else rope["factor"] if wave > low else between)
    return {"rope_freqs.weight": np.array(factors, np.float32)}


def _add_tokenizer(writer: _Writer, size: int, pre: str) -> None:
    """Bytes, two merges, and unused tokens up to `size`."""
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [n for n in range(256) if n not in letters]
    byte_tokens = [chr(n) for n in letters] + [chr(256 + n) for n in range(len(others))]
    tokens = [*SPECIAL, *byte_tokens, "Ġt", "Ġth"]
    types = [CONTROL] * len(SPECIAL) + [NORMAL] * (len(tokens) - len(SPECIAL))
    tokens += [f"[PAD{n}]" for n in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens[:size])
    writer.add_token_types((types + [UNUSED] * (len(tokens) - len(types)))[:size])
    writer.add_token_merges(["Ġ t", "Ġt h"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)

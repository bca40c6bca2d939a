"""Names and shapes of a GGUF file's tensors, and transformers' names for them.

A tensor of transformers is one of the file or is made of several (`Source`): llama.cpp reorders rows of queries and
keys, adds one to Gemma's norms, and keeps gates and inputs of experts apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.gguf.gguf_config import IGNORED_TENSORS
from paceline.gguf.gguf_file import GgufError, GgufFile


class Change(Enum):
    """How a tensor of transformers is made from the file's."""

    NONE = auto()
    QUERY_ROWS = auto()
    """Rows of all heads are in llama.cpp's order, see `unpermuted_rows`."""
    KEY_ROWS = auto()
    """The same for the heads of keys."""
    MINUS_ONE = auto()
    ONE_ROW = auto()
    """[n] becomes [1, n]."""
    CONCATENATED = auto()
    """[experts, a, n] and [experts, b, n] become [experts, a + b, n]."""
    TRANSPOSED = auto()
    """[experts, out, in] becomes [experts, in, out]."""
    INTERLEAVED = auto()
    """Two of [experts, out, in] become [experts, in, 2 out], whose columns alternate; biases alike."""


class Source(NamedTuple):
    """The file's tensors that make one of transformers', and how."""

    names: tuple[str, ...]
    change: Change = Change.NONE


class Rule(NamedTuple):
    """A tensor of transformers. `files`: the file's, without `.weight`. `shape`: of each, in the letters of `_lengths`.

    `bare`: its name in transformers has no `.weight`; a bias then ends in `_bias`.
    """

    files: tuple[str, ...]
    shape: str
    change: Change = Change.NONE
    bare: bool = False


def unpermuted_rows(heads: int, head_size: int) -> npt.NDArray[np.intp]:
    """Row i of transformers' queries or keys is row `result[i]` of a `llama` file's.

    A rotary embedding turns pairs of elements: in the file neighbours, in transformers those half a head apart.
    """
    return np.arange(heads * head_size).reshape(heads, head_size // 2, 2).swapaxes(1, 2).reshape(-1)


def tensor_sources(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Source]:
    """By transformers' name, for all tensors. `config`: `transformers_config`'s.

    Raises `GgufError` if a tensor is missing, has another shape than the configuration says, or is unknown.
    """
    lengths, biased = _lengths(config), _biased(config)
    sources = {}
    for name, rule in _rules(config):
        for suffix in (".weight", ".bias"):
            if suffix == ".bias" and name.rpartition(".")[2] not in biased:
                continue
            files = tuple(f"{each}{suffix}" for each in rule.files)
            for each in files:
                _check_shape(file, each, _shape(rule, lengths, suffix))
            sources[_full_name(name, rule, suffix)] = Source(files, rule.change)
    known = {name for source in sources.values() for name in source.names} | IGNORED_TENSORS
    if unknown := sorted(set(file.tensors) - known):
        raise GgufError(
            f"{file.path} has the tensor {unknown[0]}, which a {config['model_type']} does not have: "
            "without it the output would be wrong"
        )
    return sources


def _biased(config: Mapping[str, Any]) -> frozenset[str]:
    """Ends of the names of what has a bias."""
    attention = ATTENTION_NAMES if config.get("attention_bias") else ()
    mlp = MLP_NAMES if config.get("mlp_bias") else ()
    return frozenset((*BIASED.get(config["model_type"], ()), *attention, *mlp))


def _full_name(name: str, rule: Rule, suffix: str) -> str:
    if not rule.bare:
        return f"{name}{suffix}"
    return name if suffix == ".weight" else f"{name}_bias"


def _shape(rule: Rule, lengths: Mapping[str, int], suffix: str) -> tuple[int, ...]:
    shape = tuple(lengths[letter] for letter in rule.shape)
    return shape if suffix == ".weight" or len(shape) == 1 else shape[:-1]


def _check_shape(file: GgufFile, name: str, expected: tuple[int, ...]) -> None:
    shape = file.tensor(name).shape
    if shape != expected:
        raise GgufError(f"{file.path}: the tensor {name} has the shape {list(shape)}, and not {list(expected)}")


def _lengths(config: Mapping[str, Any]) -> dict[str, int]:
    """V: vocabulary. H: hidden. I: inner. A: heads. D: head. Q, K: all heads of queries, of keys. F: queries, keys and
    values. G: gates and inputs. E: experts. M: inner of an expert. S: of the shared one."""
    head, heads, kv_heads = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    inner = config["intermediate_size"]
    return {
        **{"V": config["vocab_size"], "H": config["hidden_size"], "I": inner, "G": 2 * inner, "A": heads, "D": head},
        **{"Q": heads * head, "K": kv_heads * head, "F": (heads + 2 * kv_heads) * head},
        "E": config.get("num_experts", config.get("num_local_experts", 0)),
        "M": config.get("moe_intermediate_size", inner),
        "S": config.get("shared_expert_intermediate_size", 0),
    }


def _rules(config: Mapping[str, Any]) -> Iterator[tuple[str, Rule]]:
    """Transformers' names, without `.weight`."""
    plus_one = config["model_type"] in PLUS_ONE
    yield "model.embed_tokens", Rule(("token_embd",), "VH")
    yield "model.norm", Rule(("output_norm",), "H", Change.MINUS_ONE if plus_one else Change.NONE)
    if not config["tie_word_embeddings"]:
        yield "lm_head", Rule(("output",), "VH")
    for layer in range(config["num_hidden_layers"]):
        for name, rule in LAYERS[config["model_type"]].items():
            files = tuple(f"blk.{layer}.{each}" for each in rule.files)
            yield f"model.layers.{layer}.{name}", rule._replace(files=files)


ATTENTION_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_NAMES = ("gate_proj", "up_proj", "down_proj")
BIASED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("qwen2", "qwen2_moe"), ("q_proj", "k_proj", "v_proj")),
    "starcoder2": (*ATTENTION_NAMES, "c_fc", "c_proj", "input_layernorm", "post_attention_layernorm", "norm"),
    "gpt_oss": (*ATTENTION_NAMES, "router", "gate_up_proj", "down_proj"),
}
"""Ends of the names of what has a bias in every model of a type. In others the configuration says it."""
PLUS_ONE = frozenset({"gemma2", "gemma3_text"})
"""Model types whose norms the file has plus one."""
_ATTENTION: Mapping[str, Rule] = {
    "self_attn.q_proj": Rule(("attn_q",), "QH"),
    "self_attn.k_proj": Rule(("attn_k",), "KH"),
    "self_attn.v_proj": Rule(("attn_v",), "KH"),
    "self_attn.o_proj": Rule(("attn_output",), "HQ"),
}
_PERMUTED: Mapping[str, Rule] = {
    **_ATTENTION,
    "self_attn.q_proj": Rule(("attn_q",), "QH", Change.QUERY_ROWS),
    "self_attn.k_proj": Rule(("attn_k",), "KH", Change.KEY_ROWS),
}
_NORMS: Mapping[str, Rule] = {
    "input_layernorm": Rule(("attn_norm",), "H"),
    "post_attention_layernorm": Rule(("ffn_norm",), "H"),
}
_HEAD_NORMS: Mapping[str, Rule] = {
    "self_attn.q_norm": Rule(("attn_q_norm",), "D"),
    "self_attn.k_norm": Rule(("attn_k_norm",), "D"),
}
_MLP: Mapping[str, Rule] = {
    "mlp.gate_proj": Rule(("ffn_gate",), "IH"),
    "mlp.up_proj": Rule(("ffn_up",), "IH"),
    "mlp.down_proj": Rule(("ffn_down",), "HI"),
}
_EXPERTS: Mapping[str, Rule] = {
    "mlp.gate": Rule(("ffn_gate_inp",), "EH"),
    "mlp.experts.gate_up_proj": Rule(("ffn_gate_exps", "ffn_up_exps"), "EMH", Change.CONCATENATED, bare=True),
    "mlp.experts.down_proj": Rule(("ffn_down_exps",), "EHM", bare=True),
}
_SHARED_EXPERT: Mapping[str, Rule] = {
    "mlp.shared_expert_gate": Rule(("ffn_gate_inp_shexp",), "H", Change.ONE_ROW),
    "mlp.shared_expert.gate_proj": Rule(("ffn_gate_shexp",), "SH"),
    "mlp.shared_expert.up_proj": Rule(("ffn_up_shexp",), "SH"),
    "mlp.shared_expert.down_proj": Rule(("ffn_down_shexp",), "HS"),
}
_GEMMA_NORMS: Mapping[str, Rule] = {
    "input_layernorm": Rule(("attn_norm",), "H", Change.MINUS_ONE),
    "post_attention_layernorm": Rule(("post_attention_norm",), "H", Change.MINUS_ONE),
    "pre_feedforward_layernorm": Rule(("ffn_norm",), "H", Change.MINUS_ONE),
    "post_feedforward_layernorm": Rule(("post_ffw_norm",), "H", Change.MINUS_ONE),
}
_GEMMA_HEAD_NORMS: Mapping[str, Rule] = {
    name: rule._replace(change=Change.MINUS_ONE) for name, rule in _HEAD_NORMS.items()
}
_PHI3: Mapping[str, Rule] = {
    "self_attn.qkv_proj": Rule(("attn_qkv",), "FH"),
    "self_attn.o_proj": Rule(("attn_output",), "HQ"),
    "mlp.gate_up_proj": Rule(("ffn_up",), "GH"),
    "mlp.down_proj": Rule(("ffn_down",), "HI"),
}
_STARCODER2_MLP: Mapping[str, Rule] = {"mlp.c_fc": Rule(("ffn_up",), "IH"), "mlp.c_proj": Rule(("ffn_down",), "HI")}
_GPT_OSS: Mapping[str, Rule] = {
    "input_layernorm": Rule(("attn_norm",), "H"),
    "post_attention_layernorm": Rule(("post_attention_norm",), "H"),
    "self_attn.sinks": Rule(("attn_sinks",), "A", bare=True),
    "mlp.router": Rule(("ffn_gate_inp",), "EH"),
    "mlp.experts.gate_up_proj": Rule(("ffn_gate_exps", "ffn_up_exps"), "EIH", Change.INTERLEAVED, bare=True),
    "mlp.experts.down_proj": Rule(("ffn_down_exps",), "EHI", Change.TRANSPOSED, bare=True),
}
_LLAMA = {**_PERMUTED, **_NORMS, **_MLP}
_QWEN2 = {**_ATTENTION, **_NORMS, **_MLP}
LAYERS: Mapping[str, Mapping[str, Rule]] = {
    **dict.fromkeys(("llama", "mistral", "ministral3", "granite"), _LLAMA),
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, **_HEAD_NORMS},
    "gemma2": {**_ATTENTION, **_GEMMA_NORMS, **_MLP},
    "gemma3_text": {**_ATTENTION, **_GEMMA_NORMS, **_GEMMA_HEAD_NORMS, **_MLP},
    "phi3": {**_NORMS, **_PHI3},
    "starcoder2": {**_ATTENTION, **_NORMS, **_STARCODER2_MLP},
    "qwen2_moe": {**_ATTENTION, **_NORMS, **_EXPERTS, **_SHARED_EXPERT},
    "qwen3_moe": {**_ATTENTION, **_NORMS, **_HEAD_NORMS, **_EXPERTS},
    "gpt_oss": {**_ATTENTION, **_GPT_OSS},
}
"""What a layer has, by transformers' model type."""

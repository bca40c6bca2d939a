"""Names and shapes of a GGUF file's tensors, and transformers' names for them.

A tensor of transformers is one of the file or is made of several (`Source`): llama.cpp reorders rows of queries and
keys, adds one to Gemma's norms, and keeps gates and inputs of experts apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
    """[n], or [1, n], becomes [1, n]."""
    CONCATENATED = auto()
    """[experts, a, n] and [experts, b, n] become [experts, a + b, n]."""
    TRANSPOSED = auto()
    """[experts, out, in] becomes [experts, in, out]."""
    INTERLEAVED = auto()
    """Two of [experts, out, in] become [experts, in, 2 out], whose columns alternate; biases alike."""
    FLAT = auto()
    """[a, b] becomes [a b]."""
    CONVOLUTION = auto()
    """[channels, n] becomes [channels, 1, n]."""
    DECAY = auto()
    """[n, 1], all negative, become [n]: their logarithms without the sign."""
    VALUE_ROWS = auto()
    """The last rows, those of value heads, are in llama.cpp's order, see `grouped_rows`."""
    VALUE_COLUMNS = auto()
    """The same for columns."""
    VALUE_CONVOLUTION = auto()
    """`VALUE_ROWS`, then `CONVOLUTION`."""
    VALUE_DECAY = auto()
    """`VALUE_ROWS`, then `DECAY`."""


class Source(NamedTuple):
    """The file's tensors that make one of transformers', and how."""

    names: tuple[str, ...]
    change: Change = Change.NONE


class Rule(NamedTuple):
    """A tensor of transformers. `files`: the file's, without `ending`. `shape`: of each, in the letters of `_lengths`.

    `bare`: its name in transformers has no `.weight`; a bias then ends in `_bias`.
    """

    files: tuple[str, ...]
    shape: str
    change: Change = Change.NONE
    bare: bool = False
    ending: str = ".weight"


def unpermuted_rows(heads: int, head_size: int) -> npt.NDArray[np.intp]:
    """Row i of transformers' queries or keys is row `result[i]` of a `llama` file's.

    A rotary embedding turns pairs of elements: in the file neighbours, in transformers those half a head apart.
    """
    return np.arange(heads * head_size).reshape(heads, head_size // 2, 2).swapaxes(1, 2).reshape(-1)


def grouped_rows(rows: int, config: Mapping[str, Any]) -> npt.NDArray[np.intp]:
    """Row i of transformers' gated delta rule is row `result[i]` of a `qwen35` file's.

    The last rows are of value heads. Those of one key head follow each other in transformers; in the file the first of
    each key head come first, then the second. `rows`: one for each value head, or all rows of the tensor.
    """
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size = 1 if rows == values else config["linear_value_head_dim"]
    first = rows - values * size
    tiled = np.arange(first, rows).reshape(values // keys, keys, size).swapaxes(0, 1).reshape(-1)
    return np.concatenate([np.arange(first), tiled])


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
            files = tuple(f"{each}{rule.ending if suffix == '.weight' else suffix}" for each in rule.files)
            for each in files:
                _check_shape(file, each, _shape(rule, lengths, suffix), one_row=rule.change is Change.ONE_ROW)
            sources[_full_name(name, rule, suffix)] = Source(files, rule.change)
    known = {name for source in sources.values() for name in source.names} | IGNORED_TENSORS
    if unknown := sorted(name for name in set(file.tensors) - known if not name.startswith(_drafting_layers(config))):
        raise GgufError(
            f"{file.path} has the tensor {unknown[0]}, which a {config['model_type']} does not have: "
            "without it the output would be wrong"
        )
    return sources


def _drafting_layers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What the names of layers for drafting begin with, which are after the others."""
    layers = config["num_hidden_layers"]
    return tuple(f"blk.{layers + n}." for n in range(config.get("mtp_num_hidden_layers", 0)))


def _biased(config: Mapping[str, Any]) -> frozenset[str]:
    """Ends of the names of what has a bias."""
    attention = ATTENTION_NAMES if config.get("attention_bias") else ()
    mlp = MLP_NAMES if config.get("mlp_bias") else ()
    convolution = ("conv1d",) if config.get("use_conv_bias") else ()
    return frozenset((*BIASED.get(config["model_type"], ()), *attention, *mlp, *convolution))


def _full_name(name: str, rule: Rule, suffix: str) -> str:
    if not rule.bare:
        return f"{name}{suffix}"
    return name if suffix == ".weight" else f"{name}_bias"


def _shape(rule: Rule, lengths: Mapping[str, int], suffix: str) -> tuple[int, ...]:
    shape = tuple(lengths[letter] for letter in rule.shape)
    return shape if suffix == ".weight" or len(shape) == 1 else shape[:-1]


def _check_shape(file: GgufFile, name: str, expected: tuple[int, ...], *, one_row: bool) -> None:
    """`one_row`: a vector may be a matrix of one row."""
    shape = file.tensor(name).shape
    if one_row and shape[0] == 1:
        shape = shape[1:]
    if shape != expected:
        raise GgufError(f"{file.path}: the tensor {name} has the shape {list(shape)}, and not {list(expected)}")


def _lengths(config: Mapping[str, Any]) -> dict[str, int]:
    """V: vocabulary. H: hidden. I: inner. A: heads. D: head. Q, K: all heads of queries, of keys. F: queries, keys and
    values. G: gates and inputs. E: experts. M: inner of an expert. S: of the shared one. W: queries and gates."""
    head, heads, kv_heads = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    inner = config["intermediate_size"]
    return {
        **{"V": config["vocab_size"], "H": config["hidden_size"], "I": inner, "G": 2 * inner, "A": heads, "D": head},
        **{"Q": heads * head, "K": kv_heads * head, "F": (heads + 2 * kv_heads) * head, "W": 2 * heads * head},
        "E": config.get("num_experts", config.get("num_local_experts", 0)),
        "M": config.get("moe_intermediate_size", inner),
        "S": config.get("shared_expert_intermediate_size", 0),
        **_state_lengths(config),
    }


def _state_lengths(config: Mapping[str, Any]) -> dict[str, int]:
    kind = config["model_type"]
    return STATE_LENGTHS[kind](config) if kind in STATE_LENGTHS else {}


def _rules(config: Mapping[str, Any]) -> Iterator[tuple[str, Rule]]:
    """Transformers' names, without `.weight`."""
    kind = config["model_type"]
    embedding, norm, file_norm = OUTSIDE.get(kind, ("embed_tokens", "norm", "output_norm"))
    yield f"model.{embedding}", Rule(("token_embd",), "VH")
    yield f"model.{norm}", Rule((file_norm,), "H", Change.MINUS_ONE if kind in PLUS_ONE else Change.NONE)
    if not config["tie_word_embeddings"]:
        yield "lm_head", Rule(("output",), "VH")
    for layer in range(config["num_hidden_layers"]):
        for name, rule in _layer_rules(config, layer).items():
            files = tuple(f"blk.{layer}.{each}" for each in rule.files)
            yield f"model.layers.{layer}.{name}", rule._replace(files=files)


def _layer_rules(config: Mapping[str, Any], layer: int) -> Mapping[str, Rule]:
    kind = config["model_type"]
    if kind not in STATE_LAYERS:
        return LAYERS[kind]
    rules = STATE_LAYERS[kind][config.get("layer_types", config.get("layers_block_type"))[layer]]
    if kind != "lfm2_moe":
        return rules
    return {**rules, **(_LFM2_MLP if layer < config["num_dense_layers"] else _LFM2_EXPERTS)}


ATTENTION_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_NAMES = ("gate_proj", "up_proj", "down_proj")
BIASED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("qwen2", "qwen2_moe"), ("q_proj", "k_proj", "v_proj")),
    "starcoder2": (*ATTENTION_NAMES, "c_fc", "c_proj", "input_layernorm", "post_attention_layernorm", "norm"),
    "gpt_oss": (*ATTENTION_NAMES, "router", "gate_up_proj", "down_proj"),
}
"""Ends of the names of what has a bias in every model of a type. In others the configuration says it."""
OUTSIDE: Mapping[str, tuple[str, str, str]] = {
    **dict.fromkeys(("lfm2", "lfm2_moe"), ("embed_tokens", "embedding_norm", "token_embd_norm")),
    "nemotron_h": ("embeddings", "norm_f", "output_norm"),
}
"""Names of the embedding, of the last norm, and of the last norm in the file, where they differ."""
PLUS_ONE = frozenset({"gemma2", "gemma3_text", "qwen3_5_text", "qwen3_5_moe_text"})
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
_LFM2_NORMS: Mapping[str, Rule] = {
    "operator_norm": Rule(("attn_norm",), "H"),
    "ffn_norm": Rule(("ffn_norm",), "H"),
}
_LFM2_MLP: Mapping[str, Rule] = {
    "feed_forward.w1": Rule(("ffn_gate",), "IH"),
    "feed_forward.w3": Rule(("ffn_up",), "IH"),
    "feed_forward.w2": Rule(("ffn_down",), "HI"),
}
_LFM2_EXPERTS: Mapping[str, Rule] = {
    **{name.replace("mlp", "feed_forward"): rule for name, rule in _EXPERTS.items()},
    "feed_forward.expert_bias": Rule(("exp_probs_b",), "E", bare=True, ending=".bias"),
}
_LFM2_ATTENTION: Mapping[str, Rule] = {
    **_LFM2_NORMS,
    "self_attn.q_proj": Rule(("attn_q",), "QH"),
    "self_attn.k_proj": Rule(("attn_k",), "KH"),
    "self_attn.v_proj": Rule(("attn_v",), "KH"),
    "self_attn.out_proj": Rule(("attn_output",), "HQ"),
    "self_attn.q_layernorm": Rule(("attn_q_norm",), "D"),
    "self_attn.k_layernorm": Rule(("attn_k_norm",), "D"),
}
_LFM2_CONVOLUTION: Mapping[str, Rule] = {
    **_LFM2_NORMS,
    "conv.conv": Rule(("shortconv.conv",), "HL", Change.CONVOLUTION),
    "conv.in_proj": Rule(("shortconv.in_proj",), "TH"),
    "conv.out_proj": Rule(("shortconv.out_proj",), "HH"),
}
_QWEN35: Mapping[str, Rule] = {
    "input_layernorm": Rule(("attn_norm",), "H", Change.MINUS_ONE),
    "post_attention_layernorm": Rule(("post_attention_norm",), "H", Change.MINUS_ONE),
}
_QWEN35_ATTENTION: Mapping[str, Rule] = {
    **_ATTENTION,
    "self_attn.q_proj": Rule(("attn_q",), "WH"),
    **_GEMMA_HEAD_NORMS,
}
_QWEN35_DELTA: Mapping[str, Rule] = {
    "linear_attn.in_proj_qkv": Rule(("attn_qkv",), "CH", Change.VALUE_ROWS),
    "linear_attn.in_proj_z": Rule(("attn_gate",), "YH", Change.VALUE_ROWS),
    "linear_attn.in_proj_a": Rule(("ssm_alpha",), "NH", Change.VALUE_ROWS),
    "linear_attn.in_proj_b": Rule(("ssm_beta",), "NH", Change.VALUE_ROWS),
    "linear_attn.conv1d": Rule(("ssm_conv1d",), "CL", Change.VALUE_CONVOLUTION),
    "linear_attn.A_log": Rule(("ssm_a",), "N", Change.VALUE_DECAY, bare=True, ending=""),
    "linear_attn.dt_bias": Rule(("ssm_dt",), "N", Change.VALUE_ROWS, bare=True, ending=".bias"),
    "linear_attn.norm": Rule(("ssm_norm",), "P"),
    "linear_attn.out_proj": Rule(("ssm_out",), "HY", Change.VALUE_COLUMNS),
}
_NEMOTRON_NORM: Mapping[str, Rule] = {"norm": Rule(("attn_norm",), "H")}
_NEMOTRON_MAMBA: Mapping[str, Rule] = {
    "mixer.in_proj": Rule(("ssm_in",), "XH"),
    "mixer.conv1d": Rule(("ssm_conv1d",), "CL", Change.CONVOLUTION),
    "mixer.A_log": Rule(("ssm_a",), "N1", Change.DECAY, bare=True, ending=""),
    "mixer.D": Rule(("ssm_d",), "N1", Change.FLAT, bare=True, ending=""),
    "mixer.dt_bias": Rule(("ssm_dt",), "N", bare=True, ending=".bias"),
    "mixer.norm": Rule(("ssm_norm",), "BP", Change.FLAT),
    "mixer.out_proj": Rule(("ssm_out",), "HY"),
}
_NEMOTRON_ATTENTION: Mapping[str, Rule] = {name.replace("self_attn", "mixer"): rule for name, rule in _PERMUTED.items()}
_NEMOTRON_MLP: Mapping[str, Rule] = {
    "mixer.up_proj": Rule(("ffn_up",), "IH"),
    "mixer.down_proj": Rule(("ffn_down",), "HI"),
}
STATE_LAYERS: Mapping[str, Mapping[str, Mapping[str, Rule]]] = {
    "lfm2": {"full_attention": {**_LFM2_ATTENTION, **_LFM2_MLP}, "conv": {**_LFM2_CONVOLUTION, **_LFM2_MLP}},
    "lfm2_moe": {"full_attention": _LFM2_ATTENTION, "conv": _LFM2_CONVOLUTION},
    "qwen3_5_text": {
        "full_attention": {**_QWEN35, **_QWEN35_ATTENTION, **_MLP},
        "linear_attention": {**_QWEN35, **_QWEN35_DELTA, **_MLP},
    },
    "qwen3_5_moe_text": {
        "full_attention": {**_QWEN35, **_QWEN35_ATTENTION, **_EXPERTS, **_SHARED_EXPERT},
        "linear_attention": {**_QWEN35, **_QWEN35_DELTA, **_EXPERTS, **_SHARED_EXPERT},
    },
    "nemotron_h": {
        "full_attention": {**_NEMOTRON_NORM, **_NEMOTRON_ATTENTION},
        "linear_attention": {**_NEMOTRON_NORM, **_NEMOTRON_MAMBA},
        "mlp": {**_NEMOTRON_NORM, **_NEMOTRON_MLP},
    },
}
"""The same for models whose layers keep states, by the kind of a layer."""


def _lfm2_lengths(config: Mapping[str, Any]) -> dict[str, int]:
    """L: kernel of a convolution. T: its inputs and two gates."""
    return {"L": config["conv_L_cache"], "T": 3 * config["hidden_size"]}


def _qwen35_lengths(config: Mapping[str, Any]) -> dict[str, int]:
    """L: kernel of a convolution. C: its channels. N: value heads. P: value head. Y: all value heads."""
    heads, size = config["linear_num_value_heads"], config["linear_value_head_dim"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    lengths = {"C": 2 * keys + heads * size, "N": heads, "P": size, "Y": heads * size}
    return {"L": config["linear_conv_kernel_dim"], **lengths}


def _nemotron_lengths(config: Mapping[str, Any]) -> dict[str, int]:
    """L: kernel of a convolution. C: its channels. N: heads. Y: all heads. X: what a layer takes of its input. B:
    groups. P: channels of a group's norm."""
    heads, groups = config["mamba_num_heads"], config["n_groups"]
    inner = heads * config["mamba_head_dim"]
    channels = inner + 2 * groups * config["ssm_state_size"]
    lengths = {"C": channels, "N": heads, "Y": inner, "X": inner + channels + heads, "B": groups}
    return {"L": config["conv_kernel"], "1": 1, **lengths, "P": inner // groups}


STATE_LENGTHS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, int]]] = {
    "lfm2": _lfm2_lengths,
    "lfm2_moe": _lfm2_lengths,
    "qwen3_5_text": _qwen35_lengths,
    "qwen3_5_moe_text": _qwen35_lengths,
    "nemotron_h": _nemotron_lengths,
}

"""Tiny checkpoints with a multi-token-prediction layer, under the names that each family publishes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.model.transformers_setup import set_up_transformers
from tests.helpers.checkpoints import save_tokenizer

set_up_transformers()  # it then knows MiMo

VOCABULARY, SIZE, LAYERS, HEADS, KV_HEADS, HEAD = 88, 32, 2, 4, 2, 16
INNER, EXPERT_INNER, EXPERTS = 48, 24, 8
Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 24, 16, 12, 8, 16

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": SIZE,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "initializer_range": 0.25,
}
ROUTED = {
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": EXPERT_INNER,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 2,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
}
LATENT = {
    "num_key_value_heads": HEADS,
    "head_dim": ROPE,
    "q_lora_rank": Q_RANK,
    "kv_lora_rank": KV_RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
}
QWEN_EXPERTS = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": EXPERT_INNER,
    "shared_expert_intermediate_size": EXPERT_INNER,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {**ROUTED, **LATENT},
    "glm4_moe": {**ROUTED, "attention_bias": True, "use_qk_norm": True},
    "mimo": {"num_nextn_predict_layers": 1},
    "qwen3": {},
    "qwen3_next": QWEN_EXPERTS,
    "qwen3_5_text": {"mtp_num_hidden_layers": 1},
    "qwen3_5_moe_text": {**QWEN_EXPERTS, "mtp_num_hidden_layers": 1},
}


def config_of(family: str) -> Any:
    """`family`: a `model_type`."""
    return AutoConfig.for_model(family, **{**COMMON, **CONFIGS[family]})


Shapes = dict[str, tuple[int, ...]]


def layer_shapes(family: str) -> Shapes:
    """Of the published tensors, those that repeat the target's matrices aside."""
    if family == "deepseek_v3":
        return _under(f"model.layers.{LAYERS}.", DEEPSEEK_OWN | _norms() | LATENT_ATTENTION | _routed("shared_experts"))
    if family == "glm4_moe":
        attention = _attention(bias=True) | _head_norms()
        return _under(f"model.layers.{LAYERS}.", DEEPSEEK_OWN | _norms() | attention | _routed("shared_experts"))
    if family == "mimo":
        return _under("model.mtp_layers.0.", NAMED_OWN | _norms() | _attention(bias=True) | _dense("mlp.", INNER))
    if family == "qwen3":  # as the speculators library writes it
        layer = _norms() | _attention() | _head_norms() | _dense("mlp.", INNER)
        return _under("mtp_layers.0.", NAMED_OWN | layer)
    attention = _attention(queries=2 * HEADS) | _head_norms()
    feed_forward = {
        "qwen3_next": _routed("shared_expert"),
        "qwen3_5_text": _dense("mlp.", INNER),
        "qwen3_5_moe_text": FUSED_EXPERTS,
    }[family]
    return _under("mtp.", QWEN_OWN | _under("layers.0.", _norms() | attention | feed_forward))


def layer_tensors(family: str, seed: int = 3) -> dict[str, Tensor]:
    """Random: norms about their identity, products that keep sizes about the same."""
    generator = torch.Generator().manual_seed(seed)
    centre = 0.0 if is_centred(family) else 1.0
    tensors = {}
    for name, shape in layer_shapes(family).items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = centre + 0.2 * noise if "norm" in name else noise / shape[-1] ** 0.5
    return tensors


def oracle_tensors(family: str, *, half: int) -> dict[str, Tensor]:
    """A layer that computes nothing: of the two halves of what is projected, the first (0) or second (1) is the output.

    Its norms are those of a target that has learned none.
    """
    tensors = layer_tensors(family)
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.fill_(0.0 if is_centred(family) else 1.0)
        elif "o_proj" in name or "down_proj" in name:
            tensor.zero_()
        elif name.endswith(("eh_proj.weight", "fc.weight", "input_proj.weight")):
            tensor.copy_(torch.cat((torch.eye(SIZE), torch.zeros(SIZE, SIZE)), 1).roll(half * SIZE, 1))
    return tensors


def is_centred(family: str) -> bool:
    """Whether norms multiply by 1 + weight."""
    return family.startswith(("qwen3_n", "qwen3_5"))


def target_tensors(seed: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed_tokens.weight": torch.randn(VOCABULARY, SIZE, generator=generator),
        "lm_head.weight": torch.randn(VOCABULARY, SIZE, generator=generator) / SIZE**0.5,
    }


def save_matrices(folder: Path, family: str, tensors: Mapping[str, Tensor]) -> Path:
    """A checkpoint of nothing but `tensors` and the target's two matrices. Qwen3.5's is a multimodal one."""
    folder.mkdir(parents=True, exist_ok=True)
    matrices = target_tensors()
    embedding = "model.language_model.embed_tokens.weight" if "3_5" in family else "model.embed_tokens.weight"
    everything = {embedding: matrices["embed_tokens.weight"], "lm_head.weight": matrices["lm_head.weight"], **tensors}
    save_file(everything, folder / "model.safetensors")
    config = config_of(family).to_dict()
    if "3_5" in family:
        config = {"model_type": family.removesuffix("_text"), "text_config": config}
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder, range(VOCABULARY))
    return folder


def save_speculators(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    """A folder as the `speculators` library writes it."""
    folder.mkdir(parents=True)
    save_file(dict(tensors), folder / "model.safetensors")
    config = {"speculators_model_type": "mtp", "transformer_layer_config": {"model_type": "qwen3"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_target(folder: Path, family: str, tensors: Mapping[str, Tensor]) -> Path:
    """A whole target, with its multi-token-prediction layer in a file of its own, and an index.

    Its layers add little to the embedding, so a token nearly determines the next one.
    """
    torch.manual_seed(7)
    network = AutoModelForCausalLM.from_config(config_of(family))
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.mul_(0.03 if "o_proj" in name or "down_proj" in name else 1.0)
    network.save_pretrained(folder)
    main = load_file(folder / "model.safetensors")
    repeated = {}
    if family in ("deepseek_v3", "glm4_moe"):
        repeated = {
            f"model.layers.{LAYERS}.embed_tokens.weight": main["model.embed_tokens.weight"].clone(),
            f"model.layers.{LAYERS}.shared_head.head.weight": main["lm_head.weight"].clone(),
        }
    (folder / "model.safetensors").unlink()
    files = {"model-00001-of-00002.safetensors": main, "model-00002-of-00002.safetensors": {**tensors, **repeated}}
    files = {name: held for name, held in files.items() if held}
    for name, held in files.items():
        save_file(held, folder / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {tensor: name for name, held in files.items() for tensor in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_tokenizer(folder, range(VOCABULARY))
    return folder


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def _norms() -> Shapes:
    return {"input_layernorm.weight": (SIZE,), "post_attention_layernorm.weight": (SIZE,)}


def _attention(*, queries: int = HEADS, bias: bool = False) -> Shapes:
    rows = {"q_proj": queries * HEAD, "k_proj": KV_HEADS * HEAD, "v_proj": KV_HEADS * HEAD}
    shapes: Shapes = {f"{name}.weight": (count, SIZE) for name, count in rows.items()}
    if bias:
        shapes |= {f"{name}.bias": (count,) for name, count in rows.items()}
    return _under("self_attn.", shapes | {"o_proj.weight": (SIZE, HEADS * HEAD)})


def _head_norms() -> Shapes:
    return {"self_attn.q_norm.weight": (HEAD,), "self_attn.k_norm.weight": (HEAD,)}


def _dense(prefix: str, inner: int) -> Shapes:
    shapes: Shapes = {"gate_proj.weight": (inner, SIZE), "up_proj.weight": (inner, SIZE)}
    return _under(prefix, shapes | {"down_proj.weight": (SIZE, inner)})


def _routed(shared: str) -> Shapes:
    shapes: Shapes = {"mlp.gate.weight": (EXPERTS, SIZE)}
    if shared == "shared_experts":
        shapes["mlp.gate.e_score_correction_bias"] = (EXPERTS,)
    else:
        shapes["mlp.shared_expert_gate.weight"] = (1, SIZE)
    for expert in range(EXPERTS):
        shapes |= _dense(f"mlp.experts.{expert}.", EXPERT_INNER)
    return shapes | _dense(f"mlp.{shared}.", EXPERT_INNER)


DEEPSEEK_OWN: Shapes = {
    "enorm.weight": (SIZE,),
    "hnorm.weight": (SIZE,),
    "eh_proj.weight": (SIZE, 2 * SIZE),
    "shared_head.norm.weight": (SIZE,),
}
QWEN_OWN: Shapes = {
    "pre_fc_norm_embedding.weight": (SIZE,),
    "pre_fc_norm_hidden.weight": (SIZE,),
    "fc.weight": (SIZE, 2 * SIZE),
    "norm.weight": (SIZE,),
}
NAMED_OWN: Shapes = {
    "token_layernorm.weight": (SIZE,),
    "hidden_layernorm.weight": (SIZE,),
    "input_proj.weight": (SIZE, 2 * SIZE),
    "final_layernorm.weight": (SIZE,),
}
LATENT_ATTENTION: Shapes = {
    "self_attn.q_a_proj.weight": (Q_RANK, SIZE),
    "self_attn.q_a_layernorm.weight": (Q_RANK,),
    "self_attn.q_b_proj.weight": (HEADS * (NOPE + ROPE), Q_RANK),
    "self_attn.kv_a_proj_with_mqa.weight": (KV_RANK + ROPE, SIZE),
    "self_attn.kv_a_layernorm.weight": (KV_RANK,),
    "self_attn.kv_b_proj.weight": (HEADS * (NOPE + VALUE), KV_RANK),
    "self_attn.o_proj.weight": (SIZE, HEADS * VALUE),
}
FUSED_EXPERTS: Shapes = {
    "mlp.gate.weight": (EXPERTS, SIZE),
    "mlp.experts.gate_up_proj": (EXPERTS, 2 * EXPERT_INNER, SIZE),
    "mlp.experts.down_proj": (EXPERTS, SIZE, EXPERT_INNER),
    "mlp.shared_expert_gate.weight": (1, SIZE),
    "mlp.shared_expert.gate_proj.weight": (EXPERT_INNER, SIZE),
    "mlp.shared_expert.up_proj.weight": (EXPERT_INNER, SIZE),
    "mlp.shared_expert.down_proj.weight": (SIZE, EXPERT_INNER),
}

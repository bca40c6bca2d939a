"""Converts a Llama checkpoint to a GGUF file for llama.cpp.

Runs in llama.cpp's own environment, with its `gguf` package, where paceline is not installed. Weights stay bfloat16,
bit for bit; norms become float32, as llama.cpp requires. The rotary embedding of transformers pairs element i of a head
with element i + D / 2, llama.cpp's pairs neighbours: so the rows of q and k are reordered. The file has no tokenizer.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

IN_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def write_gguf(checkpoint: Path, path: Path) -> None:
    """Write the file. Raises ValueError for anything but a Llama in bfloat16."""
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"{checkpoint} is no Llama")
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    _describe(writer, config)
    for name, weight in read_bfloat16(checkpoint / "model.safetensors").items():
        if weight.ndim == 1:
            writer.add_tensor(translated(name), (weight.astype(np.uint32) << 16).view(np.float32))
            continue
        if heads := _heads(name, config):
            weight = neighbours(weight, heads)
        writer.add_tensor(
            translated(name), np.ascontiguousarray(weight).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(path)


def read_bfloat16(path: Path) -> dict[str, NDArray[np.uint16]]:
    """The tensors of a safetensors file as bit patterns, numpy has no bfloat16. Raises ValueError for other dtypes."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start, tensors = file.tell(), {}
        for name, about in header.items():
            if name == "__metadata__":
                continue
            if about["dtype"] != "BF16":
                raise ValueError(f"{name} in {path} is {about['dtype']}, not BF16")
            file.seek(start + about["data_offsets"][0])
            data = file.read(2 * math.prod(about["shape"]))
            tensors[name] = np.frombuffer(data, np.uint16).reshape(about["shape"])
    return tensors


def neighbours(weight: NDArray[np.uint16], heads: int) -> NDArray[np.uint16]:
    """Rows of q or k [heads * D, h]: row i of a head's first half, then row i of its second."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def translated(name: str) -> str:
    """llama.cpp's name of a tensor. Raises KeyError for a tensor that is not a Llama's."""
    parts = name.removeprefix("model.").removesuffix(".weight").split(".")
    if parts[0] == "layers":
        return f"blk.{parts[1]}.{IN_LAYERS['.'.join(parts[2:])]}.weight"
    return f"{OUTSIDE['.'.join(parts)]}.weight"


def _heads(name: str, config: dict[str, Any]) -> int:
    """Number of heads of a matrix whose rows must be reordered; 0 for all others."""
    if "q_proj" in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if "k_proj" in name else 0


def _describe(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")

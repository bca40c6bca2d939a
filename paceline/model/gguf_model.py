"""A GGUF file as a model, without transformers: its blocks stay packed, and native code multiplies them.

For kinds with Llama's layers, or variants of them. Others are dequantised and run by transformers' code
(`paceline.model.gguf_loading`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.config import EngineConfig
from paceline.gguf.gguf_config import GgufSettings, is_packed_kind, transformers_config
from paceline.gguf.gguf_file import GgufFile, is_gguf
from paceline.model.attention import Heads, KVCache
from paceline.model.gguf_weights import GgufWeights, dequantized
from paceline.model.layer_weights import LayerVariant, LayerWeights, QuantizedWeight, RotaryTables, Weight
from paceline.model.model import ModelInfo, ModelOutput, TransformersModel
from paceline.model.native.build import NativeUnavailableError
from paceline.model.native.native_network import NativeNetwork, head_width
from paceline.model.native.native_product import dequantize
from paceline.model.network_factory import log_once
from paceline.model.numerics import numerics_of
from paceline.model.rows import Row
from paceline.telemetry.load_phases import load_phase
from paceline.text import vocabulary_fingerprint
from paceline.text.gguf_tokenizer import eos_token_ids

MATRICES: Mapping[str, str] = {
    **{"query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj"},
    **{"output": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"},
}
"""Matrices of a layer, and transformers' names for them."""
STACKED: Mapping[str, str] = {
    **dict.fromkeys(("query", "key", "value"), "self_attn.qkv_proj"),
    **dict.fromkeys(("gate", "up"), "mlp.gate_up_proj"),
}
"""Those that some kinds have as rows of one matrix, in this order."""
HEAD_NORMS: Mapping[str, str] = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
NORMS: Mapping[str, str] = {
    **{"input_norm": "input_layernorm", "inner_norm": "post_attention_layernorm"},
    **HEAD_NORMS,
}
FOUR_NORMS: Mapping[str, str] = {
    **{"input_norm": "input_layernorm", "attention_out_norm": "post_attention_layernorm"},
    **{"inner_norm": "pre_feedforward_layernorm", "mlp_out_norm": "post_feedforward_layernorm"},
    **HEAD_NORMS,
}
"""Of a layer that norms what it adds."""
HEAD_UNIT = 32
"""Heads whose size is a multiple of it have no padding in the cache, so quantised weights need none."""
GEMMA = ("gemma2", "gemma3_text")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class GgufModel(TransformersModel):
    """Llama layers, and their variants, from a GGUF file, by native code."""

    native = has_native_attention = True

    def __init__(self, info: ModelInfo, file: GgufFile, config: GgufSettings, dtype: torch.dtype) -> None:
        """`config`: of the file. `dtype`: of keys, values, and matrices that are not quantised.

        Raises `GgufError` for a tensor that is missing, unknown or of a wrong shape, and `NativeUnavailableError`.
        """
        weights, heads = _PackedWeights(file, config, dtype), Heads.of(config)
        cache = KVCache(info.layers, info.slots, heads, dtype, torch.device("cpu"), head_width(heads))
        self._embedding = weights.matrix(EMBEDDING)
        self._variant = variant_of(config)
        self._logit_scale = 1.0 / getattr(config, "logits_scaling", 1.0)
        self._logit_cap: float | None = getattr(config, "final_logit_softcapping", None)
        rotary = layer_rotaries(file, config, info.max_model_len)
        self._network = NativeNetwork(
            [weights.layer(n, heads, rotary[n]) for n in range(info.layers)],
            heads,
            cache,
            rotary[0],
            hidden=config.hidden_size,
            eps=config.rms_norm_eps,
            scale=score_scale(config),
            embedding=self._embedding,
            norm=weights.vector("model.norm.weight"),
            head=weights.matrix(HEAD if HEAD in weights.names else EMBEDDING),
            variant=self._variant,
            layer_packed=file.release_pages,
        )
        file.release_pages()
        super().__init__(info, cache, config)

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        logits, hidden = self._network.run(rows, wanted, hidden_layers)
        return ModelOutput(self._limited(logits), hidden)

    def embedding(self) -> Tensor:
        weight = self._embedding
        whole = weight if isinstance(weight, Tensor) else dequantize(weight).to(self.dtype)
        return whole if self._variant.embedding_scale == 1.0 else whole * self._variant.embedding_scale

    def output(self, final: Tensor) -> Tensor:
        return self._limited(self._network.output(final))

    def _limited(self, logits: Tensor) -> Tensor:
        if self._logit_scale != 1.0:
            logits = logits * self._logit_scale
        return logits if self._logit_cap is None else self._logit_cap * torch.tanh(logits / self._logit_cap)


class _PackedWeights:
    """The weights of Llama layers in a file. Raises `GgufError` if there are others, or one is missing."""

    def __init__(self, file: GgufFile, config: GgufSettings, dtype: torch.dtype) -> None:
        self._weights, self._config, self._dtype = GgufWeights(file.path), config, dtype
        self.names = frozenset(self._weights.names)

    def layer(self, n: int, heads: Heads, rotary: RotaryTables) -> LayerWeights[Weight]:
        layer = f"model.layers.{n}"
        fields: dict[str, Any] = {field: self._matrix_of(layer, field, heads) for field in MATRICES}
        fields |= {f"{field}_bias": self.vector(f"{layer}.{name}.bias") for field, name in MATRICES.items()}
        norms = FOUR_NORMS if self._config.model_type in GEMMA else NORMS
        fields |= {field: self.vector(f"{layer}.{name}.weight") for field, name in norms.items()}
        if heads.head_size % HEAD_UNIT and isinstance(fields["output"], QuantizedWeight):
            fields["output"] = dequantize(fields["output"]).to(self._dtype)
        return LayerWeights(**fields, rotary=rotary, window=self._window(n))

    def matrix(self, name: str) -> Weight:
        packed = self._weights.quantized(name)
        return self._weights.tensor(name, self._dtype) if packed is None else packed

    def vector(self, name: str) -> Tensor | None:
        """A norm or a bias, float32; None if the model has none."""
        return self._weights.stored(name) if name in self.names else None

    def _matrix_of(self, layer: str, field: str, heads: Heads) -> Weight:
        """A matrix of its own, or its rows in a stacked one."""
        if (name := f"{layer}.{MATRICES[field]}.weight") in self.names:
            return self.matrix(name)
        inner, keys = self._config.intermediate_size, heads.kv_heads * heads.head_size
        sizes = {"query": keys * heads.queries_per_kv, "key": keys, "value": keys, "gate": inner, "up": inner}
        before = [other for other, stack in STACKED.items() if stack == STACKED[field]]
        start = sum(sizes[other] for other in before[: before.index(field)])
        return self.matrix(f"{layer}.{STACKED[field]}.weight")[start : start + sizes[field]]

    def _window(self, n: int) -> int:
        kinds = getattr(self._config, "layer_types", None)
        if kinds is not None and kinds[n] != "sliding_attention":
            return 0
        return int(getattr(self._config, "sliding_window", None) or 0)


def variant_of(config: GgufSettings) -> LayerVariant:
    """What a kind does otherwise than Llama."""
    if config.model_type in GEMMA:
        cap = config.attn_logit_softcapping or 0.0
        return LayerVariant("gelu_tanh", embedding_scale=config.hidden_size**0.5, softcap=cap)
    return LayerVariant(
        embedding_scale=getattr(config, "embedding_multiplier", 1.0),
        residual_scale=getattr(config, "residual_multiplier", 1.0),
    )


def score_scale(config: GgufSettings) -> float:
    """What attention's scores are multiplied by."""
    if config.model_type in GEMMA:
        return 1.0 / math.sqrt(config.query_pre_attn_scalar)
    return float(getattr(config, "attention_multiplier", config.head_dim**-0.5))


def layer_rotaries(file: GgufFile, config: GgufSettings, positions: int) -> list[RotaryTables]:
    """Of each layer; layers of one kind share theirs."""
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    ropes = config.rope_parameters
    tables = {kind: rotary_tables(file, config, ropes.get(kind, ropes), positions) for kind in dict.fromkeys(kinds)}
    return [tables[kind] for kind in kinds]


def rotary_tables(file: GgufFile, config: GgufSettings, rope: Mapping[str, Any], positions: int) -> RotaryTables:
    """Cosines and sines by transformers' formulas; with the factors of `rope_freqs.weight`, where a file has them."""
    size, scale = int(config.head_dim * rope.get("partial_rotary_factor", 1.0)), 1.0
    frequencies = 1.0 / float(rope["rope_theta"]) ** (torch.arange(0, size, 2).float() / size)
    if "rope_freqs.weight" in file.tensors:  # Llama 3.1
        frequencies = frequencies / dequantized(file.tensor("rope_freqs.weight"), torch.float32)
    elif rope["rope_type"] == "linear":
        frequencies = frequencies / float(rope["factor"])
    elif rope["rope_type"] != "default":
        frequencies, scale = _scaled_frequencies(config, rope["rope_type"], positions)
    angles = torch.arange(positions).float()[:, None] * frequencies
    return RotaryTables(angles.cos() * scale, angles.sin() * scale)


def _scaled_frequencies(config: GgufSettings, kind: str, positions: int) -> tuple[Tensor, float]:
    """YaRN's and LongRoPE's, and what tables are multiplied by: transformers' own."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    made = AutoConfig.for_model(**config.to_dict())
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](made, torch.device("cpu"), seq_len=positions)
    return frequencies, float(scale)


def packed_config(path: str, engine: EngineConfig) -> GgufSettings | None:
    """The configuration of a GGUF file whose matrices stay packed; None for any other model. Raises `GgufError`."""
    if not is_gguf(path) or torch.device(engine.device).type != "cpu" or engine.tensor_parallel_size > 1:
        return None
    config = transformers_config(GgufFile.open(path))
    return GgufSettings(**config) if is_packed_kind(config) else None


def packed_dtype(config: GgufSettings, engine: EngineConfig) -> torch.dtype:
    """Of keys, values and matrices of floats in a file whose other matrices stay packed. Raises ValueError."""
    if engine.dtype == "float16":
        raise ValueError("float16 takes a GPU: set dtype to bfloat16 or float32")
    dtype: torch.dtype = getattr(torch, config.dtype if engine.dtype == "auto" else engine.dtype)
    return dtype


def load_packed(path: str, name: str, engine: EngineConfig) -> GgufModel | None:
    """The model in a GGUF file; None if native code does not compute it.

    Raises `GgufError`, or ValueError if the engine's settings do not fit.
    """
    if (config := packed_config(path, engine)) is None:
        return None
    file = GgufFile.open(path)
    try:
        with load_phase("weights packed"):
            model = GgufModel(_info(file, name, config, engine), file, config, packed_dtype(config, engine))
    except NativeUnavailableError as error:
        log_once(f"no native pass, {file.path.name} is dequantised: {error}")
        return None
    model.numerics = numerics_of(model, " gguf")
    return model


def _info(file: GgufFile, name: str, config: GgufSettings, engine: EngineConfig) -> ModelInfo:
    longest = engine.max_model_len or config.max_position_embeddings
    if longest > config.max_position_embeddings:
        raise ValueError(
            f"max_model_len {longest} exceeds the {config.max_position_embeddings} positions of {name}: lower it"
        )
    return ModelInfo(
        name=name,
        vocabulary_size=config.vocab_size,
        max_model_len=longest,
        layers=config.num_hidden_layers,
        slots=engine.slot_count,
        eos_token_ids=tuple(eos_token_ids(file)),
        fingerprint=vocabulary_fingerprint(str(file.path)),
        folder=file.path,
        rows_invariant=True,
    )

"""Multi-token prediction: drafting with the layer that was trained with the target and is part of its checkpoint.

After DeepSeek-V3 (2024). With E the embedding of a row's token, h its feature and N norms:

    x = layer(projection [ N_token(E) ; N_hidden(h) ]);  y = N_final(x);  logits = the target's output matrix · y

The feature of a row is the target's state after its final norm; the feature of a draft token's row is its parent's y.
Some engines feed back x for GLM, or zero the embedding of the first row; both change only the acceptance rate.

A layer of the Llama kind runs like other heads (`LlamaHead`), and so does Qwen3.5's where there is native code. Any
other layer is transformers' own, with a KV cache of ours. Embedding and output matrix are the target's; copies in the
checkpoint are not read. Of several such layers, the first one drafts at every depth.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from paceline.config.engine_config import Quantization
from paceline.drafting.best_first import RowOutput
from paceline.drafting.heads.head_config import is_speculators_format
from paceline.drafting.heads.head_network import HeadNetwork, build_head_speculator
from paceline.drafting.heads.llama_head import LlamaHead
from paceline.drafting.heads.mtp_layouts import SPECULATORS_LIBRARY, MtpFamily, MtpLayout, family_of
from paceline.drafting.heads.mtp_weights import MtpWeights
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.speculator import Speculator
from paceline.model import qwen35
from paceline.model.attention import ATTENTION, Heads, use_pass
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.decoder import is_llama_kind, layer_of
from paceline.model.layer_weights import RotaryTables, StateFusion
from paceline.model.layers import pad_rows
from paceline.model.native.build import NativeUnavailableError
from paceline.model.native.native_attention import NativeAttention
from paceline.model.native_linear import PassRows, called_linear, take_over, use_pass_rows
from paceline.model.network_factory import log_once, make_attention
from paceline.model.rows import Row, SlotTable
from paceline.model.target_weights import TargetWeights

log = logging.getLogger(__name__)


def load_mtp(
    checkpoint: Checkpoint, target: TargetWeights, slots: int, quantization: Quantization | None = None
) -> HeadNetwork:
    """The layer in `checkpoint`: the target's own, or one of the `speculators` library.

    `quantization`: see `LlamaHead`. Raises `CheckpointError` if there is no such layer or it does not fit the target;
    ValueError if the target's family has no known layout, or if `quantization` cannot be had.
    """
    family = family_of(target.config)
    layout = SPECULATORS_LIBRARY if is_speculators_format(checkpoint) else family.layout
    if layout is None:
        raise CheckpointError(
            f"the checkpoints of {family.name} have no multi-token-prediction layer, and {checkpoint} is not of the "
            "`speculators` library: choose another method, or a `model` of that kind"
        )
    weights = MtpWeights(checkpoint, layout, target.layers)
    config = mtp_layer_config(target.config, sparse=weights.sparse)
    with torch.device("meta"):
        layer: Any = MtpLayer(family, config, layout)
    layer.load_state_dict(weights.of(layer, target.dtype, target.device), assign=True)
    count = int(getattr(target.config, family.count_key, None) or 1)
    if count > 1:
        log.warning("of %d multi-token-prediction layers of %s the first one drafts", count, checkpoint)
    layer.eval().requires_grad_(False)
    rotary = family.find(family.rotary)(config).to(target.device)
    name = checkpoint.folder.name
    if (made := _llama_head(target, name, slots, layer, rotary, config, quantization)) is not None:
        return made
    if quantization is not None:
        log_once(f"the draft layer of {family.name} stays as it is stored: quantization is for Llama's layers")
    return TransformersHead(target, name, slots, layer, rotary, config)


def _llama_head(
    target: TargetWeights,
    name: str,
    slots: int,
    layer: MtpLayer,
    rotary: nn.Module,
    config: Any,
    quantization: Quantization | None,
) -> LlamaHead | None:
    """None if the layer is of another kind, or of Qwen3.5's without native code for it."""
    norms: Any = layer.token_norm, layer.hidden_norm, layer.final_norm
    if is_llama_kind(config):
        block, (token_norm, hidden_norm, final_norm) = layer_of(layer.block), (norm.weight for norm in norms)
    elif qwen35.runs_natively(config):
        block = qwen35.attention_layer_of(layer.block)
        token_norm, hidden_norm, final_norm = map(qwen35.norm_of, norms)
    else:
        return None
    projection = layer.projection.weight
    if layer.hidden_first:
        projection = torch.cat(projection.chunk(2, 1)[::-1], 1)
    with suppress(NativeUnavailableError):
        return LlamaHead(
            target,
            "mtp",
            name,
            slots,
            [block],
            config,
            fusion=StateFusion(token_norm, hidden_norm, projection),
            embedding=target.embedding(),
            norm=final_norm,
            output=target.output,
            rotary=RotaryTables.of(rotary, target.max_model_len),
            feeds_back_normed=True,
            quantization=quantization,
        )
    return None


def mtp_layer_config(config: Any, *, sparse: bool) -> Any:
    """The target's text configuration, changed so that its layer 0 is the multi-token-prediction layer.

    `sparse`: the layer has experts. Which of the target's layers are dense does not tell.
    """
    own = copy.deepcopy(config)
    own.layer_types = ["full_attention"]
    own.first_k_dense_replace = 0 if sparse else 1  # DeepSeek, GLM
    own.mlp_only_layers, own.decoder_sparse_step = [] if sparse else [0], 1  # Qwen
    own._attn_implementation = ATTENTION
    # transformers sets this when it builds a model, which a draft worker does not do.
    own._experts_implementation = own._experts_implementation or "eager"
    return own


class MtpLayer(nn.Module):
    """A decoder layer with two norms and a projection before it and a final norm after it.

    `MtpLayout` maps the parameters' names.
    """

    def __init__(self, family: MtpFamily, config: Any, layout: MtpLayout) -> None:
        super().__init__()
        size, norm = config.hidden_size, family.find("RMSNorm")
        self.token_norm = norm(size, eps=config.rms_norm_eps)
        self.hidden_norm = norm(size, eps=config.rms_norm_eps)
        self.projection = nn.Linear(2 * size, size, bias=False)
        self.block = family.find("DecoderLayer")(config, 0)
        self.final_norm = norm(size, eps=config.rms_norm_eps)
        self.hidden_first = layout.hidden_first

    def forward(self, embedded: Tensor, hidden: Tensor, **block_inputs: Any) -> Tensor:
        """Both [1, R, H] → [1, R, H]."""
        halves = self.token_norm(embedded), self.hidden_norm(hidden)
        x = self.projection(torch.cat(halves[::-1] if self.hidden_first else halves, -1))
        y: Tensor = self.final_norm(self.block(x, **block_inputs))
        return y


class TransformersHead(HeadNetwork):
    """A layer that transformers runs, for kinds other than Llama's."""

    def __init__(
        self, target: TargetWeights, model: str, slots: int, layer: MtpLayer, rotary: nn.Module, config: Any
    ) -> None:
        """`config`: of the layer, see `mtp_layer_config`."""
        super().__init__(target, "mtp", model, slots)
        self._layer = layer
        self._embedding, self._output = target.embedding(), target.output
        self._rotary = rotary
        like = torch.empty(0, dtype=target.dtype, device=target.device)
        positions = min(slots, target.max_model_len)
        self._attention, _ = make_attention(1, Heads.of(config), slots, positions, like)
        if isinstance(self._attention, NativeAttention):
            with torch.inference_mode(), called_linear(layer) as linear:
                self.run([SlotTable([1]).row(0, 0)], like.new_zeros(1, target.hidden_size), [0])
            take_over(linear)

    def run(self, rows: Sequence[Row], features: Tensor | None, wanted: Sequence[int]) -> RowOutput:
        assert features is not None
        this = self._attention(rows)
        positions = this.positions.unsqueeze(0)
        embedded = self._embedding[this.tokens].unsqueeze(0)
        count = len(rows), len(this.tokens)
        with use_pass(this), use_pass_rows(PassRows(count, count)):
            y = self._layer(
                embedded,
                pad_rows(features, len(this.tokens)).unsqueeze(0),
                position_embeddings=self._rotary(embedded, positions),
                attention_mask=None,
                position_ids=positions,
            )[0]
        final = y[list(wanted)]
        return RowOutput(self._output(final), final)


def build(inputs: MethodInputs) -> Speculator:
    engine = inputs.engine
    return build_head_speculator(
        inputs, load_mtp(inputs.checkpoint, inputs.target, engine.slot_count, engine.quantization)
    )


def matches(checkpoint: Checkpoint) -> bool:
    """Whether this is a target's checkpoint with modules for multi-token prediction."""
    keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
    return any(checkpoint.config.get(key) for key in keys) or any(n.startswith("mtp.") for n in checkpoint.names)

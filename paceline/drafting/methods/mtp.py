"""Multi-token prediction: drafting with the layer that was trained with the target and lies in its checkpoint.

After DeepSeek-V3 (2024). With E the embedding of a row's token, h its feature and N norms:

    x = layer(projection [ N_token(E) ; N_hidden(h) ]);  y = N_final(x);  logits = the target's output matrix · y

The feature of the first row after a target's state is that state, behind the target's final norm; the next row's is y.
Some engines feed back x for GLM, or zero the embedding of the first row; either only changes how well is guessed.

A layer of the Llama kind runs as those of other heads do (`HeadLayers`); any other is transformers' own, over keys and
values of its own. Embedding and output matrix are the target's; where a checkpoint repeats them they are not read. Of
several modules the first one drafts at every depth.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.drafting.heads.head_config import is_speculators_format
from paceline.drafting.heads.head_layers import HeadLayers
from paceline.drafting.heads.head_network import HeadOutput
from paceline.drafting.heads.mtp_layouts import SPECULATORS_LIBRARY, MtpFamily, MtpLayout, family_of
from paceline.drafting.heads.mtp_weights import MtpWeights
from paceline.model.attention import ATTENTION, Heads, use_pass
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.decoder import is_llama_kind, layer_of
from paceline.model.layer_weights import StateFusion
from paceline.model.layers import pad_rows
from paceline.model.network_factory import make_attention
from paceline.model.rows import Row
from paceline.model.target_weights import TargetWeights

log = logging.getLogger(__name__)


def load_mtp(checkpoint: Checkpoint, lent: TargetWeights, slots: int) -> MtpNetwork:
    """The layer in `checkpoint`: the target's own, or one of the `speculators` library.

    Raises `CheckpointError` if there is none, or it does not fit the target.
    """
    family = family_of(lent.config)
    layout = _layout(family, checkpoint)
    weights = MtpWeights(checkpoint, layout, lent.layers)
    config = mtp_layer_config(lent.config, sparse=weights.sparse)
    with torch.device("meta"):
        layer = MtpLayer(family, config, layout)
    layer.load_state_dict(weights.of(layer, lent.dtype, lent.device), assign=True)
    count = int(getattr(lent.config, family.count_key, None) or 1)
    if count > 1:
        log.warning("of %d multi-token-prediction layers of %s the first one drafts", count, checkpoint)
    layer.eval().requires_grad_(False)
    rotary = family.find(family.rotary)(config)
    compute = _llama_layers if is_llama_kind(config) else TransformersLayers
    return MtpNetwork(lent, checkpoint.folder.name, slots, compute(layer, rotary, config, slots, lent))


def _layout(family: MtpFamily, checkpoint: Checkpoint) -> MtpLayout:
    if is_speculators_format(checkpoint):
        return SPECULATORS_LIBRARY
    if family.layout is None:
        raise CheckpointError(
            f"the checkpoints of {family.name} have no multi-token-prediction layer, and {checkpoint} is none of the "
            "`speculators` library: choose another method, or a `model` of that kind"
        )
    return family.layout


def mtp_layer_config(config: Any, *, sparse: bool) -> Any:
    """The target's text configuration for its multi-token-prediction layer: layer 0, with full attention.

    `sparse`: the layer has experts. That families have dense layers at some places says nothing about this one.
    """
    own = copy.deepcopy(config)
    own.layer_types = ["full_attention"]
    own.first_k_dense_replace = 0 if sparse else 1  # DeepSeek, GLM
    own.mlp_only_layers, own.decoder_sparse_step = [] if sparse else [0], 1  # Qwen
    own._attn_implementation = ATTENTION
    own._experts_implementation = own._experts_implementation or "eager"  # no model has set that of a borrowed one
    return own


class MtpLayer(nn.Module):
    """The layer with its two norms, its projection and its final norm; parameters by these names."""

    def __init__(self, family: MtpFamily, config: Any, layout: MtpLayout) -> None:
        super().__init__()
        size, norm = config.hidden_size, family.find("RMSNorm")
        self.token_norm = norm(size, eps=config.rms_norm_eps)
        self.hidden_norm = norm(size, eps=config.rms_norm_eps)
        self.projection = nn.Linear(2 * size, size, bias=False)
        self.block = family.find("DecoderLayer")(config, 0)
        self.final_norm = norm(size, eps=config.rms_norm_eps)
        self.hidden_first = layout.hidden_first

    def forward(self, embedded: Tensor, hidden: Tensor, **of_the_block: Any) -> Tensor:
        """Both [1, R, H] → [1, R, H]."""
        halves = self.token_norm(embedded), self.hidden_norm(hidden)
        x = self.projection(torch.cat(halves[::-1] if self.hidden_first else halves, -1))
        y: Tensor = self.final_norm(self.block(x, **of_the_block))
        return y


class MtpNetwork:
    """The `HeadNetwork` of method `mtp`."""

    ids: Tensor | None = None

    def __init__(self, lent: TargetWeights, model: str, slots: int, layers: HeadLayers | TransformersLayers) -> None:
        self.model = model
        self.hidden_state_layers: Sequence[int] = (lent.final_layer,)
        self.position_limit = lent.max_model_len
        self.slots = slots
        self._layers = layers

    def encode(self, states: Tensor) -> Tensor:
        """Features are what the final norm gives, [n, 1, H] → [n, H]."""
        return self._layers.to_device(states[:, 0])

    def run(self, rows: Sequence[Row], features: Tensor, wanted: Sequence[int]) -> HeadOutput:
        return self._layers(rows, features, wanted)


def _llama_layers(layer: Any, rotary: nn.Module, config: Any, slots: int, lent: TargetWeights) -> HeadLayers:
    projection = layer.projection.weight
    if layer.hidden_first:
        projection = torch.cat(projection.chunk(2, 1)[::-1], 1)
    return HeadLayers(
        [layer_of(layer.block)],
        config,
        slots,
        lent,
        fusion=StateFusion(layer.token_norm.weight, layer.hidden_norm.weight, projection),
        embedding=lent.embedding(),
        norm=layer.final_norm.weight,
        output=lent.output,
        rotary=rotary,
        feeds_back_normed=True,
    )


class TransformersLayers:
    """As `HeadLayers`, for layers of other kinds."""

    def __init__(self, layer: MtpLayer, rotary: nn.Module, config: Any, slots: int, lent: TargetWeights) -> None:
        """`config`: of the layer, see `mtp_layer_config`."""
        self._layer = layer
        self._embedding, self._output = lent.embedding(), lent.output
        self._rotary = rotary.to(lent.device)
        like = torch.empty(0, dtype=lent.dtype, device=lent.device)
        self._attention, self._cache = make_attention(1, Heads.of(config), slots + 1, like)

    def to_device(self, states: Tensor) -> Tensor:
        return states.to(self._cache.data)

    def __call__(self, rows: Sequence[Row], features: Tensor, wanted: Sequence[int]) -> HeadOutput:
        this = self._attention(rows)
        positions = this.positions.unsqueeze(0)
        embedded = self._embedding[this.tokens].unsqueeze(0)
        with use_pass(this):
            y = self._layer(
                embedded,
                pad_rows(features).unsqueeze(0),
                position_embeddings=self._rotary(embedded, positions),
                attention_mask=None,
                position_ids=positions,
            )[0]
        final = y[list(wanted)]
        return HeadOutput(self._output(final), final)

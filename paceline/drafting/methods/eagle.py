"""EAGLE-1 and EAGLE-2 heads (Li et al. 2024): a decoder layer that imitates the target's last state.

    x      = fc([embedding of token i + 1; final-norm state of position i])
    x      = x + attention(x)            the first layer has no norm before it
    x      = x + mlp(norm(x))
    logits = the target's output matrix of x; the next row is fed with x

The two differ in the tree that is grown, not in weights; here it is grown best first, like EAGLE-2's. Heads that were
trained with more norms (HASS; the speculators library with `layernorms`) have tensors for them, and are run with them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.drafting.heads.head_config import head_config
from paceline.drafting.heads.head_layers import HeadLayers, llama_layers
from paceline.drafting.heads.head_network import HeadOutput
from paceline.drafting.heads.head_vocabulary import head_embedding
from paceline.drafting.heads.head_weights import HeadWeights
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.layer_weights import StateFusion
from paceline.model.rows import Row
from paceline.model.target_weights import TargetWeights

NAME_PREFIXES = (
    ("model.", ""),
    ("fusion_fc.", "fc."),
    ("transformer.", "layers.0."),
    ("hidden_layernorm.", "layers.0.input_layernorm."),
    ("embedding_layernorm.", "embed_layernorm."),
    ("pre_lm_head_layernorm.", "lm_head_layernorm."),
)
"""How conversions call what the original calls otherwise, by how the names begin."""


class EagleNetwork:
    """A `HeadNetwork` over keys and values of its own."""

    def __init__(
        self, checkpoint: Checkpoint, lent: TargetWeights, slots: int, rope_theta: float | None = None
    ) -> None:
        """Raises `CheckpointError` if this is no EAGLE-1 or -2 head for this target."""
        config = head_config(checkpoint, rope_theta)
        weights = HeadWeights(checkpoint, lent, _renamed)
        h = int(config.hidden_size)
        if h != lent.hidden_size:
            raise CheckpointError(
                f"{checkpoint} is a head for hidden size {h}, {lent.name} has {lent.hidden_size}: choose one for it"
            )
        self.model = checkpoint.folder.name
        self.hidden_state_layers: Sequence[int] = (lent.final_layer,)
        self.slots, self.position_limit = slots, lent.max_model_len
        self.ids: Tensor | None = None
        fusion = StateFusion(
            token_norm=weights.take_optional("embed_layernorm.weight", h),
            projection=weights.take("fc.weight", h, 2 * h),
            projection_bias=weights.take_optional("fc.bias", h),
        )
        self._layers = HeadLayers(
            llama_layers(weights, config, h),
            config,
            slots,
            lent,
            fusion=fusion,
            embedding=head_embedding(weights, lent, h),
            norm=weights.take_optional("lm_head_layernorm.weight", h),
            output=lent.output,
        )
        weights.refuse_unused("EAGLE heads", but=("lm_head.weight", "token_map"))

    def encode(self, states: Tensor) -> Tensor:
        return self._layers.to_device(states[:, 0])

    def run(self, rows: Sequence[Row], features: Tensor, wanted: Sequence[int]) -> HeadOutput:
        return self._layers(rows, features, wanted)


def is_eagle(checkpoint: Checkpoint) -> bool:
    """By its tensors: a layer, and an `fc` that takes two vectors of the width that it gives."""
    stored = {_renamed(name): name for name in checkpoint.names}
    shape = checkpoint.shape(stored["fc.weight"]) if "fc.weight" in stored else ()
    return "layers.0.self_attn.q_proj.weight" in stored and len(shape) == 2 and shape[1] == 2 * shape[0]


def _renamed(name: str) -> str:
    for old, new in NAME_PREFIXES:
        if name.startswith(old):
            name = new + name.removeprefix(old)
    return name

"""EAGLE-1 and EAGLE-2 heads (Li et al. 2024): a decoder layer that approximates the target's last hidden state.

    x      = fc([embedding of token i + 1; final-norm state of position i])
    x      = x + attention(x)            the first layer has no norm before it
    x      = x + mlp(norm(x))
    logits = the target's output matrix of x; the next row's feature is x

EAGLE-1 and -2 differ in the shape of the tree, not in weights; here the tree is grown best first, like EAGLE-2's. Heads
trained with more norms (HASS; the speculators library with `layernorms`) have tensors for them, which are used.
"""

from __future__ import annotations

from paceline.config.engine_config import Quantization
from paceline.drafting.heads.head_config import head_config, require_hidden_size
from paceline.drafting.heads.head_network import build_head_speculator
from paceline.drafting.heads.head_weights import HeadWeights, normalised_name
from paceline.drafting.heads.llama_head import LlamaHead, llama_layers
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.speculator import Speculator
from paceline.model.checkpoint import Checkpoint
from paceline.model.layer_weights import StateFusion
from paceline.model.target_weights import TargetWeights

RENAMES = (
    (r"^model\.", ""),
    (r"^fusion_fc\.", "fc."),
    (r"^transformer\.", "layers.0."),
    (r"^hidden_layernorm\.", "layers.0.input_layernorm."),
    (r"^embedding_layernorm\.", "embed_layernorm."),
    (r"^pre_lm_head_layernorm\.", "lm_head_layernorm."),
)
"""To the original's names, from those of conversions."""


class EagleNetwork(LlamaHead):
    """Features are outputs of the last layer, [n, h]."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: TargetWeights,
        slots: int,
        rope_theta: float | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        """`quantization`: see `LlamaHead`.

        Raises `CheckpointError` if the checkpoint is not an EAGLE-1 or -2 head for this target."""
        config = head_config(checkpoint, rope_theta)
        weights = HeadWeights(checkpoint, target, RENAMES)
        h = int(config.hidden_size)
        require_hidden_size(checkpoint, target, h)
        fusion = StateFusion(
            token_norm=weights.take_optional("embed_layernorm.weight", h),
            projection=weights.take("fc.weight", h, 2 * h),
            projection_bias=weights.take_optional("fc.bias", h),
        )
        super().__init__(
            target,
            "eagle",
            checkpoint.folder.name,
            slots,
            llama_layers(weights, config, h, first_norm_optional=True),
            config,
            fusion=fusion,
            embedding=weights.embedding(h),
            norm=weights.take_optional("lm_head_layernorm.weight", h),
            output=target.output,
            quantization=quantization,
        )
        weights.refuse_unused("EAGLE heads", but=("lm_head.weight", "token_map"))


def matches(checkpoint: Checkpoint) -> bool:
    """By the tensors: a decoder layer, and an `fc` [h, 2 * h]."""
    stored = {normalised_name(name, RENAMES): name for name in checkpoint.names}
    shape = checkpoint.shape(stored["fc.weight"]) if "fc.weight" in stored else ()
    return "layers.0.self_attn.q_proj.weight" in stored and len(shape) == 2 and shape[1] == 2 * shape[0]


def build(inputs: MethodInputs) -> Speculator:
    engine = inputs.engine
    network = EagleNetwork(
        inputs.checkpoint, inputs.target, engine.slot_count, inputs.config.rope_theta, engine.quantization
    )
    return build_head_speculator(inputs, network)

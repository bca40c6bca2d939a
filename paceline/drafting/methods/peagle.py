"""P-EAGLE: an EAGLE-3 head that was trained to predict several tokens in one pass.

    rows:           ... (h_n-2, t_n-1)  (h_n-1, t_n)  (m, mask)  (m, mask)  (m, mask)      causal attention
    distributions:                           n+1         n+2        n+3        n+4

m is a learned vector; it replaces the target's hidden states, which a mask token does not have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.drafting.block import Blocks, MaskTokens
from paceline.drafting.heads.head_config import mask_token
from paceline.drafting.heads.head_network import HeadNetwork
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.methods.eagle3 import load_eagle3, target_layers
from paceline.drafting.network_speculator import NetworkSpeculator
from paceline.drafting.speculator import Speculator
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.target_weights import TargetWeights

__all__ = ["build", "mask_tokens", "matches", "target_layers"]

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")


def build(inputs: MethodInputs) -> Speculator:
    limits = inputs.limits
    network = mask_tokens(load_eagle3(inputs, "peagle"), inputs.checkpoint, inputs.target, limits.tokens_per_pass)
    return NetworkSpeculator(Blocks(network, limits))


def matches(checkpoint: Checkpoint) -> bool:
    """Whether there is a state for mask tokens; an EAGLE-3 head has none."""
    return "mask_hidden" in checkpoint.names


@torch.inference_mode()
def mask_tokens(
    network: HeadNetwork, checkpoint: Checkpoint, target: TargetWeights, tokens_per_pass: int
) -> MaskTokens:
    """`network`: the EAGLE-3 head in `checkpoint`.

    Raises `CheckpointError` if the checkpoint has no mask token or no `mask_hidden`, or if they do not fit.
    """
    embedding = checkpoint.find("embed_tokens.weight")
    rows = target.vocabulary_size if embedding is None else checkpoint.shape(embedding)[0]
    mask = mask_token(checkpoint, checkpoint.config, MASK_KEYS, rows)
    layers = len(network.description.hidden_state_layers)
    return MaskTokens(network, mask, tokens_per_pass, network.encode(_mask_hidden(checkpoint, target, layers)))


def _mask_hidden(checkpoint: Checkpoint, target: TargetWeights, layers: int) -> Tensor:
    """[1, layers, H]. Raises `CheckpointError` if it is missing or has another size."""
    name = checkpoint.find("mask_hidden")
    if name is None:
        raise CheckpointError(f"{checkpoint} has no tensor mask_hidden: it is an EAGLE-3 head, not a P-EAGLE one")
    mask = checkpoint.tensor(name, target.dtype, target.device)
    if mask.numel() != layers * target.hidden_size:
        raise CheckpointError(
            f"mask_hidden in {checkpoint} has {mask.numel()} values where {layers} states of {target.hidden_size} are "
            f"needed: is it a head for {target.name}?"
        )
    return mask.reshape(1, layers, target.hidden_size)

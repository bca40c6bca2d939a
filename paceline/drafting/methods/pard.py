"""PARD (An et al. 2025): a small model of the target's family that was trained to read mask tokens.

    rows:           ... t_n-1  t_n   m    m    m        plain causal attention
    distributions:             n+1  n+2  n+3  n+4

Keys and values of mask tokens are not kept: the tokens committed there are run as ordinary rows.
"""

from __future__ import annotations

from paceline.drafting.best_first import ModelNetwork
from paceline.drafting.block import Blocks, MaskTokens
from paceline.drafting.heads.head_config import mask_token
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.network_speculator import NetworkSpeculator
from paceline.drafting.speculator import Speculator
from paceline.model.checkpoint import Checkpoint, CheckpointError

MASK_KEYS = ("pard_token", "ptd_token_id")


def build(inputs: MethodInputs) -> Speculator:
    mask, limits = mask_token_of(inputs.checkpoint), inputs.limits
    network = ModelNetwork(inputs.load_model(), "pard")
    return NetworkSpeculator(Blocks(MaskTokens(network, mask, limits.tokens_per_pass), limits))


def matches(checkpoint: Checkpoint) -> bool:
    return any(key in checkpoint.config for key in MASK_KEYS)


def mask_token_of(checkpoint: Checkpoint) -> int:
    """Raises `CheckpointError` if the checkpoint is not a PARD model, or is one of the second generation."""
    if "pard2_target_layers" in checkpoint.config:
        raise CheckpointError(f"{checkpoint} is a PARD-2 model, which is not served yet: take the PARD model")
    rows, _ = checkpoint.shape(checkpoint.find_required("embed_tokens.weight"))
    return mask_token(checkpoint, checkpoint.config, MASK_KEYS, rows)

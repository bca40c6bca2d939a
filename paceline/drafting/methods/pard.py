"""PARD (An et al. 2025): a small model of the target's family that was trained to read mask tokens.

    rows:           ... t_n-1  t_n   m    m    m        plain causal attention
    distributions:             n+1  n+2  n+3  n+4

Keys and values of mask tokens are not kept: the tokens committed there are run as ordinary rows.
"""

from __future__ import annotations

from torch import Tensor

from paceline.core.logits_rules import History
from paceline.core.tree import TokenTree
from paceline.drafting.draw_prediction import NetworkFacts
from paceline.drafting.heads.head_config import mask_token
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.parallel_drafts import ContextSpans, MaskTokenSpeculator, ParallelRequest, RequestedPasses
from paceline.drafting.speculator import Opening, Speculator
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.model import Model

MASK_KEYS = ("pard_token", "ptd_token_id")


class PardSpeculator(MaskTokenSpeculator[ParallelRequest]):
    """Method `pard`."""

    method = "pard"

    def __init__(
        self, model: Model, mask_token: int, tokens_per_pass: int, tree_width: int, least_path_probability: float = 0.0
    ) -> None:
        """See `MaskTokenSpeculator`."""
        super().__init__(NetworkFacts.of_model(model), mask_token, tokens_per_pass, tree_width, least_path_probability)
        self._model = model

    def begin(self, opening: Opening, tree: TokenTree, history: History, least_path_log_prob: float) -> ParallelRequest:
        return ParallelRequest(opening, tree, history, least_path_log_prob, list(opening.tokens), self.position_limit)

    def run_pass(
        self, context: ContextSpans[ParallelRequest], requested: RequestedPasses[ParallelRequest]
    ) -> tuple[Tensor, Tensor | None]:
        return self._model.run(*self.rows(context, requested)).logits, None


def build(inputs: MethodInputs) -> Speculator:
    config, mask = inputs.config, mask_token_of(inputs.checkpoint)
    depth, width, least = config.num_speculative_tokens, config.tree_width, config.least_path_probability
    return PardSpeculator(inputs.load_model(), mask, depth, width, least)


def matches(checkpoint: Checkpoint) -> bool:
    return any(key in checkpoint.config for key in MASK_KEYS)


def mask_token_of(checkpoint: Checkpoint) -> int:
    """Raises `CheckpointError` if the checkpoint is not a PARD model, or is one of the second generation."""
    if "pard2_target_layers" in checkpoint.config:
        raise CheckpointError(f"{checkpoint} is a PARD-2 model, which is not served yet: take the PARD model")
    rows, _ = checkpoint.shape(checkpoint.find_required("embed_tokens.weight"))
    return mask_token(checkpoint, checkpoint.config, MASK_KEYS, rows)

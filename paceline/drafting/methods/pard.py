"""PARD (An et al. 2025): a small model of the target's family that was taught to read mask tokens.

    rows:  ... t_n-1  t_n   m    m    m        plain causal attention
    laws:             n+1  n+2  n+3  n+4

Keys and values of the masks are never kept: the tokens there are run as what they turn out to be.
"""

from __future__ import annotations

from torch import Tensor

from paceline.core.sampling import History
from paceline.core.tree import TokenTree
from paceline.drafting.parallel_drafts import ContextSpans, MaskTokenSpeculator, ParallelDraft, RequestedPasses
from paceline.drafting.speculator import Opening
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.model import Model

MASK_KEYS = ("pard_token", "ptd_token_id")


class PardSpeculator(MaskTokenSpeculator[ParallelDraft]):
    """Method `pard`."""

    method = "pard"

    def __init__(
        self, model: Model, mask_token: int, ahead: int, tree_width: int, least_path_probability: float = 0.02
    ) -> None:
        """See `MaskTokenSpeculator`."""
        width = min(tree_width, model.vocabulary_size)
        super().__init__(model.slots, mask_token, ahead, width, least_path_probability)
        self.model = model.name
        self.vocabulary_fingerprint = model.fingerprint
        self.vocabulary_size = model.vocabulary_size
        self.position_limit = model.max_model_len
        self._model = model

    def begin(self, opening: Opening, tree: TokenTree, history: History, floor: float) -> ParallelDraft:
        return ParallelDraft(opening, list(opening.tokens), tree, history, self.position_limit, floor)

    def run_pass(
        self, context: ContextSpans[ParallelDraft], asked: RequestedPasses[ParallelDraft]
    ) -> tuple[Tensor, Tensor | None]:
        return self._model.run(*self.rows(context, asked)).logits, None


def is_pard(checkpoint: Checkpoint) -> bool:
    """An ordinary model with a mask token; P-EAGLE heads may name theirs so, too."""
    named = any(key in checkpoint.config for key in MASK_KEYS)
    return named and checkpoint.find("embed_tokens.weight") is not None and checkpoint.find("mask_hidden") is None


def mask_token_of(checkpoint: Checkpoint) -> int:
    """Raises `CheckpointError` if this is no PARD model, or one of the second generation."""
    if "pard2_target_layers" in checkpoint.config:
        raise CheckpointError(f"{checkpoint} is a PARD-2 model, which is not served yet: take the PARD model")
    named = [checkpoint.config[key] for key in MASK_KEYS if key in checkpoint.config]
    rows, _ = checkpoint.shape(checkpoint.find_required("embed_tokens.weight"))
    if not named:
        raise CheckpointError(f"config.json in {checkpoint} names no pard_token: it was not trained as a PARD model")
    if not isinstance(named[0], int) or not 0 <= named[0] < rows:
        raise CheckpointError(f"pard_token {named[0]!r} in {checkpoint} is no id in its embedding of {rows} tokens")
    return named[0]

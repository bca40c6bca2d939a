"""The words of a head: its embedding, its output matrix, and which of the target's tokens it guesses.

A head may have all of these of its own, or none and use the target's. Copies of the target's are not kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.drafting.heads.head_weights import HeadWeights
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.target_weights import TargetWeights

OutputProjection = Tensor | Callable[[Tensor], Tensor]
"""A matrix [columns, h] of a head's own, or the target's product: [n, h] → [n, columns]."""
MAX_PADDING_ROWS = 512
"""So many more rows than tokens a matrix may have, for the sake of kernels."""


def draft_to_target_ids(weights: HeadWeights, checkpoint: Checkpoint, lent: TargetWeights) -> Tensor | None:
    """int64 [columns]: the target's token of each of the head's, from the offsets in `d2t`; None: all, in their order.

    Raises `CheckpointError`.
    """
    columns = weights.shape("lm_head.weight")[0] if "lm_head.weight" in weights else lent.vocabulary_size
    if "d2t" not in weights:
        if not lent.vocabulary_size <= columns < lent.vocabulary_size + MAX_PADDING_ROWS:
            raise CheckpointError(
                f"{checkpoint} guesses {columns} tokens and has no d2t to say which, {lent.name} knows "
                f"{lent.vocabulary_size}: it is a head for another vocabulary, or incomplete"
            )
        return None
    count = weights.shape("d2t")[0]
    ids = torch.arange(count, device=lent.device) + weights.take("d2t", count)
    if count == 0 or int(ids.max()) >= lent.vocabulary_size or int(ids.min()) < 0 or not bool((ids.diff() > 0).all()):
        raise CheckpointError(
            f"d2t in {checkpoint} does not name {count} different tokens of {lent.name}, in rising order: "
            "it is a head for another vocabulary, or it holds ids where offsets are expected"
        )
    if "t2d" in weights and not torch.equal(weights.take("t2d", *weights.shape("t2d")).bool().nonzero()[:, 0], ids):
        raise CheckpointError(f"d2t and t2d in {checkpoint} name different tokens: d2t has to hold offsets, not ids")
    if "lm_head.weight" in weights and not count <= columns < count + MAX_PADDING_ROWS:
        raise CheckpointError(f"{checkpoint} guesses {columns} tokens, and d2t names {count}: download it again")
    return None if count == lent.vocabulary_size else ids


def head_embedding(weights: HeadWeights, lent: TargetWeights, h: int) -> Tensor:
    """The head's own embedding [tokens, h] if it has one that is not the target's. Raises `CheckpointError`."""
    name = "embed_tokens.weight"
    rows = weights.shape(name)[0] if name in weights else 0
    if not rows and h == lent.hidden_size:
        return lent.embedding()
    if not lent.vocabulary_size <= rows < lent.vocabulary_size + MAX_PADDING_ROWS:
        weights.take(name, lent.vocabulary_size, h)  # raises: it is missing, or of another vocabulary
    own = weights.own_embedding(name, rows, h)
    return lent.embedding() if own is None else own


def head_output(weights: HeadWeights, lent: TargetWeights, h: int, ids: Tensor | None) -> OutputProjection:
    """Logits with a column for each of `ids`: by the head's own matrix, if it has one that is not the target's."""
    own = weights.own_output("lm_head.weight", lent.vocabulary_size if ids is None else len(ids), h)
    if own is not None:
        return own
    if ids is None:
        return lent.output
    return lambda final: lent.output(final).index_select(-1, ids)

"""The tensors of a head's checkpoint, taken one by one, each with the shape that it has to have."""

from __future__ import annotations

from collections.abc import Callable, Container

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.target_weights import TargetWeights

ROTARY_BUFFERS = "rotary_emb.inv_freq"
"""Old uploads hold what the configuration says anyway."""


class HeadWeights:
    """Tensors by their normalised names, in the target's dtype and on its device."""

    def __init__(
        self, checkpoint: Checkpoint, lent: TargetWeights, rename: Callable[[str], str] = lambda name: name
    ) -> None:
        """`rename`: from the name in the file to the one that it is known by here."""
        self._checkpoint, self._lent = checkpoint, lent
        self._stored = {rename(name): name for name in checkpoint.names}
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises `CheckpointError` if there is no such tensor."""
        return self._checkpoint.shape(self._stored_as(name))

    def take(self, name: str, *shape: int) -> Tensor:
        """Raises `CheckpointError` if there is no such tensor, or it has another shape."""
        found = self.shape(name)
        if found != shape:
            raise CheckpointError(
                f"{name} in {self._checkpoint} has shape {list(found)} where {list(shape)} is needed: "
                f"is it a head for {self._lent.name} (hidden size {self._lent.hidden_size}, "
                f"vocabulary {self._lent.vocabulary_size})?"
            )
        self._taken.add(name)
        return self._checkpoint.tensor(self._stored_as(name), self._lent.dtype, self._lent.device)

    def take_optional(self, name: str, *shape: int) -> Tensor | None:
        """The tensor if there is one."""
        return self.take(name, *shape) if name in self else None

    def own_embedding(self, name: str, rows: int, width: int) -> Tensor | None:
        """The head's own embedding; None if there is none, or only a copy of the target's, which serves for both."""
        embedding = self.take_optional(name, rows, width)
        if embedding is None or (width == self._lent.hidden_size and _same_embedding(embedding, self._lent)):
            return None
        return embedding

    def own_output(self, name: str, columns: int, width: int) -> Tensor | None:
        """The first so many rows of the head's own output matrix; None if there is none, or they are the target's.

        Raises `CheckpointError` if it has fewer, or if the target's cannot stand in for it.
        """
        if name not in self and width == self._lent.hidden_size:
            return None
        output = self.take(name, max(columns, self.shape(name)[0]), width)[:columns]
        same = columns == self._lent.vocabulary_size and width == self._lent.hidden_size
        return None if same and _same_output(output, self._lent) else output

    def refuse_unused(self, kind: str, but: Container[str] = ()) -> None:
        """Raises `CheckpointError` if there are tensors that nobody took, `but` for these: `kind` has no use for them.

        A head that lacks a part guesses badly, and nobody would know why.
        """
        others = [name for name in self._stored if name not in self._taken and name not in but]
        if others := [name for name in others if not name.endswith(ROTARY_BUFFERS)]:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            raise CheckpointError(
                f"{self._checkpoint} has {others[0]}{more}, which is no part of the {kind} that can be run"
            )

    def _stored_as(self, name: str) -> str:
        if name not in self._stored:
            raise CheckpointError(
                f"{self._checkpoint} has no tensor {name}: it is incomplete, or not of the method that was asked for"
            )
        return self._stored[name]


def _same_embedding(embedding: Tensor, lent: TargetWeights) -> bool:
    """Whether this is what the target looks up, too. An embedding that the target scales is not."""
    return torch.equal(embedding[: lent.vocabulary_size], lent.embedding()[: lent.vocabulary_size])


def _same_output(output: Tensor, lent: TargetWeights, probed: int = 64) -> bool:
    """Whether the target's output has the same weights for so many of its inputs, one at a time: that is exact."""
    inputs = torch.arange(lent.hidden_size, device=lent.device)[:: max(1, lent.hidden_size // probed)]
    ones = F.one_hot(inputs, lent.hidden_size).to(lent.dtype)
    return torch.equal(lent.output(ones), output[:, inputs].T)

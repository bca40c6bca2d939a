"""The tensors of a head's checkpoint, each taken by its normalised name and with the shape that it must have.

A head may have an embedding, an output matrix and a vocabulary of its own, or use the target's. A copy of a target's
matrix is not kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.target_weights import TargetWeights

RenameRules = Sequence[tuple[str, str]]
"""Regular expressions and their replacements, applied in order to a tensor's name in the file."""
OutputProjection = Tensor | Callable[[Tensor], Tensor]
"""A head's own matrix [columns, h], or the target's product: [n, h] → [n, columns]."""
ROTARY_BUFFERS = "rotary_emb.inv_freq"
"""Old uploads hold them; the configuration defines the same values."""
MAX_PADDING_ROWS = 512
"""A matrix may have up to this many rows more than tokens, as padding for kernels."""
PROBED_INPUTS = 64
"""Columns of an output matrix that are compared with the target's."""


def normalised_name(name: str, rules: RenameRules) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


class HeadWeights:
    """Tensors in the target's dtype and on its device. A token of the head is a column of its logits.

    Every method but `in` raises `CheckpointError` if a tensor is missing or has another shape.
    """

    def __init__(self, checkpoint: Checkpoint, target: TargetWeights, rules: RenameRules) -> None:
        self._checkpoint, self._target = checkpoint, target
        self._stored = {normalised_name(name, rules): name for name in checkpoint.names}
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    @property
    def names(self) -> Sequence[str]:
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(self._stored_name(name))

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor, which must have this shape."""
        found = self.shape(name)
        if found != shape:
            raise CheckpointError(
                f"{name} in {self._checkpoint} has shape {list(found)} where {list(shape)} is needed: "
                f"is it a head for {self._target.name} (hidden size {self._target.hidden_size}, "
                f"vocabulary {self._target.vocabulary_size})?"
            )
        self._taken.add(name)
        return self._checkpoint.tensor(self._stored_name(name), self._target.dtype, self._target.device)

    def take_padded(self, name: str, rows: int, width: int) -> Tensor:
        """[rows, width] of a matrix that may have up to `MAX_PADDING_ROWS` more."""
        found = self.shape(name)[0]
        return self.take(name, found if rows <= found < rows + MAX_PADDING_ROWS else rows, width)[:rows]

    def take_optional(self, name: str, *shape: int) -> Tensor | None:
        """None if there is no such tensor."""
        return self.take(name, *shape) if name in self else None

    def embedding(self, width: int) -> Tensor:
        """[tokens, width]: the head's own embedding; the target's if the head has none or a copy of it."""
        name, size, of_target = "embed_tokens.weight", self._target.vocabulary_size, self._target.embedding()
        same_width = width == self._target.hidden_size
        if name not in self and same_width:
            return of_target
        rows = self.shape(name)[0]
        padded = size <= rows < size + MAX_PADDING_ROWS
        own = self.take(name, rows if padded else size, width)
        return of_target if same_width and torch.equal(own[:size], of_target[:size]) else own

    def output(self, width: int, ids: Tensor | None) -> OutputProjection:
        """Logits with one column for each of `ids`: by the head's own matrix; by the target's if the head has none or a
        copy of it."""
        name, target = "lm_head.weight", self._target
        columns = target.vocabulary_size if ids is None else len(ids)
        if name in self or width != target.hidden_size:
            own = self.take_padded(name, columns, width)
            if ids is not None or width != target.hidden_size or not _is_output_of(target, own):
                return own
        return target.output if ids is None else _output_rows(target, ids)

    def target_ids(self) -> Tensor | None:
        """int64 [columns]: the target's token of each of the head's, from the offsets in `d2t`. None: all of the
        target's tokens, in their order."""
        checkpoint, target = self._checkpoint, self._target
        size = target.vocabulary_size
        columns = self.shape("lm_head.weight")[0] if "lm_head.weight" in self else size
        if "d2t" not in self:
            if not size <= columns < size + MAX_PADDING_ROWS:
                raise CheckpointError(
                    f"{checkpoint} guesses {columns} tokens and has no d2t to say which, {target.name} knows {size}: "
                    "it is a head for another vocabulary, or incomplete"
                )
            return None
        count = self.shape("d2t")[0]
        ids = torch.arange(count, device=target.device) + self.take("d2t", count)
        if count == 0 or int(ids.max()) >= size or int(ids.min()) < 0 or not bool((ids.diff() > 0).all()):
            raise CheckpointError(
                f"d2t in {checkpoint} does not name {count} different tokens of {target.name}, in rising order: "
                "it is a head for another vocabulary, or it holds ids where offsets are expected"
            )
        if "t2d" in self and not torch.equal(self.take("t2d", *self.shape("t2d")).bool().nonzero()[:, 0], ids):
            raise CheckpointError(f"d2t and t2d in {checkpoint} name different tokens: d2t must hold offsets, not ids")
        if "lm_head.weight" in self and not count <= columns < count + MAX_PADDING_ROWS:
            raise CheckpointError(f"{checkpoint} guesses {columns} tokens, and d2t names {count}: download it again")
        return None if count == size else ids

    def refuse_unused(self, kind: str, but: Container[str] = ()) -> None:
        """Raises `CheckpointError` if a tensor was not taken and is not in `but`.

        Without the part that such a tensor belongs to, the head would guess badly and nothing would show why.
        """
        others = [name for name in self._stored if name not in self._taken and name not in but]
        if others := [name for name in others if not name.endswith(ROTARY_BUFFERS)]:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            raise CheckpointError(
                f"{self._checkpoint} has {others[0]}{more}, which is no part of the {kind} that can be run"
            )

    def _stored_name(self, name: str) -> str:
        if name not in self._stored:
            raise CheckpointError(
                f"{self._checkpoint} has no tensor {name}: it is incomplete, or not of the configured method"
            )
        return self._stored[name]


@torch.inference_mode()
def _output_rows(target: TargetWeights, ids: Tensor) -> Tensor:
    """Rows of the target's output matrix, [ids, hidden size]: its products of unit vectors, however it is stored."""
    inputs = torch.arange(target.hidden_size, device=target.device)
    units = F.one_hot(inputs, target.hidden_size).to(target.dtype)
    columns = [target.output(part).index_select(-1, ids) for part in units.split(PROBED_INPUTS)]
    return torch.cat(columns).T.to(target.dtype).contiguous()


def _is_output_of(target: TargetWeights, matrix: Tensor) -> bool:
    """Whether `PROBED_INPUTS` columns of the target's output are the same. Products of unit vectors are exact."""
    inputs = torch.arange(target.hidden_size, device=target.device)[:: max(1, target.hidden_size // PROBED_INPUTS)]
    units = F.one_hot(inputs, target.hidden_size).to(target.dtype)
    return torch.equal(target.output(units), matrix[:, inputs].T)

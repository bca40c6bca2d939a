"""What a target lends to the heads that draft for it: its embedding and output matrix.

A head inside the target's process uses the target's own (`TransformersModel.lend`). One in a draft worker has no target
beside it; there the two matrices, and nothing else, are read from the target's checkpoint (`load_target_weights`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from paceline.model.checkpoint import Checkpoint
from paceline.model.layers import Linear
from paceline.model_names import resolve_model
from paceline.text import vocabulary_fingerprint


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """`embedding`: what the first layer is given of each token, [vocabulary, hidden size]. `output`: what the final
    norm gives, [n, hidden size] → [n, vocabulary]."""

    embedding: Callable[[], Tensor]
    output: Callable[[Tensor], Tensor]
    folder: Path
    config: Any
    """transformers' configuration of the text model."""
    dtype: torch.dtype
    device: torch.device
    vocabulary_size: int
    max_model_len: int
    fingerprint: str

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def final_layer(self) -> int:
        """Among `hidden_state_layers`, the output of the final norm."""
        return self.layers + 1

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)


def load_target_weights(
    model: str, dtype: torch.dtype | None, device: str, max_model_len: int | None = None
) -> TargetWeights:
    """What the target called `model` lends, from its checkpoint. `dtype` None: that of its embedding.

    Raises `ModelNotFoundError`, or ValueError if it lacks either matrix.
    """
    folder = Path(resolve_model(model))
    said = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)  # it lends no code
    config: Any = said.get_text_config(decoder=True)
    checkpoint = Checkpoint(folder)
    embedding = checkpoint.tensor(checkpoint.find_required("embed_tokens.weight"), dtype, device)
    name = checkpoint.find("lm_head.weight")
    if name is None and not config.tie_word_embeddings:
        raise ValueError(f"the model in {folder} has no lm_head.weight, and does not tie it to the embedding")
    output = Linear(embedding if name is None else checkpoint.tensor(name, embedding.dtype, device))
    return TargetWeights(
        embedding=lambda: embedding,
        output=output,
        folder=folder,
        config=config,
        dtype=embedding.dtype,
        device=embedding.device,
        vocabulary_size=embedding.shape[0],
        max_model_len=max_model_len or int(config.max_position_embeddings),
        fingerprint=vocabulary_fingerprint(str(folder)),
    )

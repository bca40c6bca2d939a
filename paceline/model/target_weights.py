"""The target's embedding and output matrix, for the heads that draft for it.

A head in the target's process shares the target's matrices (`TransformersModel.target_weights`). A draft worker reads
the two matrices, and nothing else, from the target's checkpoint (`load_target_weights`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.model.checkpoint import Checkpoint
from paceline.model.device_memory import use_device
from paceline.model.layers import Linear
from paceline.model.rope import positions_in
from paceline.model_names import resolve_model
from paceline.text import vocabulary_fingerprint


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """`embedding`: the first layer's input for each token, [vocabulary, hidden size]. `output`: the final norm's output
    [n, hidden size] → logits [n, vocabulary]."""

    embedding: Callable[[], Tensor]
    output: Callable[[Tensor], Tensor]
    folder: Path
    config: Any
    """transformers' configuration of the text model, or a GGUF file's."""
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
        """The index of the final norm's output in `hidden_state_layers`."""
        return self.layers + 1

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)


def load_target_weights(
    model: str, dtype: torch.dtype | None, device: str, max_model_len: int | None = None
) -> TargetWeights:
    """Read both matrices from the checkpoint of `model`. `dtype` None: the embedding's.

    Raises `ModelNotFoundError`, or ValueError if the device cannot be used or the checkpoint lacks either matrix.
    """
    from paceline.model.transformers_setup import model_config

    folder, on = Path(resolve_model(model)), use_device(device)
    whole = model_config(folder, device)  # no code is needed
    config: Any = whole.get_text_config(decoder=True)
    checkpoint = Checkpoint(folder)
    embedding = checkpoint.tensor(checkpoint.find_required("embed_tokens.weight"), dtype, on)
    name = checkpoint.find("lm_head.weight")
    if name is None and not config.tie_word_embeddings:
        raise ValueError(f"the model in {folder} has no lm_head.weight, and does not tie it to the embedding")
    output = Linear(embedding if name is None else checkpoint.tensor(name, embedding.dtype, on))
    return TargetWeights(
        embedding=lambda: embedding,
        output=output,
        folder=folder,
        config=config,
        dtype=embedding.dtype,
        device=embedding.device,
        vocabulary_size=embedding.shape[0],
        max_model_len=max_model_len or positions_in(config),
        fingerprint=vocabulary_fingerprint(str(folder)),
    )

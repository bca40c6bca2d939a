"""Training Medusa heads (Cai et al. 2024): each predicts one of the next tokens from the target's last state alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline_lab.training.heads.target_reader import TargetOutputs


class MedusaModule(nn.Module):
    """Heads of one residual layer and a vocabulary projection each: `{head}.0.linear` and `{head}.1` in a file."""

    def __init__(self, heads: int, output_VH: Tensor) -> None:
        """`output_VH`: initial projections; a head begins as the target's own."""
        super().__init__()
        vocabulary, width = output_VH.shape
        self.heads = nn.ModuleList(
            nn.ModuleList([_Residual(width), nn.Linear(width, vocabulary, bias=False)]) for _ in range(heads)
        )
        with torch.no_grad():
            for head in self.heads:
                head[1].weight.copy_(output_VH)  # type: ignore[index]

    def forward(self, reading: TargetOutputs, steps: int) -> list[Tensor]:
        """Logits [B, L - 1 - s, V] of each head s."""
        final = reading.states_BLSH[:, :, 0]
        logits = []
        for step, head in enumerate(list(self.heads)[:steps]):
            z = final[:, : final.shape[1] - 1 - step]
            for layer in head:  # type: ignore[attr-defined]
                z = layer(z)
            logits.append(z)
        return logits


class _Residual(nn.Module):
    """`x + silu(W x + b)`, W and b zero at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))

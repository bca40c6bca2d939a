"""Training an MLP speculator (Wertheimer et al. 2024): a state updated with one draft token after another."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline_lab.training.heads.target_reader import TargetOutputs


class MlpSpeculatorModule(nn.Module):
    """Tied weights: one embedding, norm and output matrix for all steps, named as in published files."""

    def __init__(self, steps: int, inner: int, output_VH: Tensor) -> None:
        super().__init__()
        vocabulary, width = output_VH.shape
        self.emb = nn.ModuleList([nn.Embedding(vocabulary, inner)])
        self.proj = nn.ModuleList([nn.Linear(width, inner, bias=False), nn.Linear(inner, inner, bias=False)])
        self.ln = nn.ModuleList([_Norm(inner)])
        self.head = nn.ModuleList([nn.Linear(inner, vocabulary, bias=False)])
        self._state_share = 0.5 ** (0.5 / steps)
        token_share = ((1 - self._state_share**2) * inner / 2) ** 0.5
        self._ratio = token_share / self._state_share
        with torch.no_grad():
            if inner == width:
                self.head[0].weight.copy_(output_VH)  # type: ignore[operator]
            nn.init.normal_(self.emb[0].weight, std=inner**-0.5)  # type: ignore[arg-type]

    def forward(self, reading: TargetOutputs, steps: int) -> list[Tensor]:
        """Logits [B, L - 1 - s, V] of each step s."""
        state = reading.states_BLSH[:, :-1, 0]
        logits = []
        for step in range(steps):
            ids = reading.ids_BL[:, 1 + step :]
            moved = self.proj[min(step, 1)](state[:, : ids.shape[1]])
            state = F.gelu(self.ln[0](moved + self._ratio * self.emb[0](ids)))
            logits.append(self.head[0](state))
        return logits


class _Norm(nn.Module):
    """RMS norm with a weight and a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight + self.bias

"""Training inputs of heads: the states and distributions of a frozen target.

Shapes: B rows, L positions, S requested layers, H the target's width, V its vocabulary, K tokens kept of a
distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

KEPT = 32
"""Tokens kept of each distribution; the remaining mass counts as one token."""
DECAY = 0.8
"""Weight of each draft step in the loss, relative to the previous step."""


@dataclass(frozen=True, slots=True)
class TargetOutputs:
    """`states_BLSH` are of the requested layers, numbered as in `hidden_state_layers`."""

    ids_BL: Tensor
    embedded_BLH: Tensor
    states_BLSH: Tensor
    likely_BLK: Tensor
    """The most probable next tokens, likeliest first, as columns of the head's logits; -1: it has no such column."""
    log_shares_BLK: Tensor
    """Their log-probabilities in nats, float32."""
    output_VH: Tensor
    """The target's output matrix."""

    def projected(self, final: Tensor) -> Tensor:
        """Logits by the target's output matrix, for heads that have none."""
        return F.linear(final, self.output_VH)


class TargetReader:
    """A frozen target."""

    def __init__(self, target: PreTrainedModel, layers: Sequence[int], vocabulary: Tensor | None = None) -> None:
        """`vocabulary`: int64 [columns], the token of each column of the head's logits. None: column n is token n."""
        self.target = target.eval().requires_grad_(False)
        base: Any = target.base_model
        self._taps: list[nn.Module] = [base.get_input_embeddings(), *base.layers, base]
        self._layers = layers
        self._columns_V = None if vocabulary is None else columns_of(vocabulary.to(target.device), len(self.output))

    @property
    def output(self) -> Tensor:
        """The target's output matrix [V, H]."""
        weight: Tensor = self.target.get_output_embeddings().weight
        return weight

    @torch.no_grad()
    def read(self, ids_BL: Tensor) -> TargetOutputs:
        kept: dict[int, Tensor] = {}
        hooks = [self._taps[n].register_forward_hook(_keep(kept, n)) for n in {0, *self._layers}]
        ids_BL = ids_BL.to(self.target.device)
        try:
            output: Any = self.target(input_ids=ids_BL, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        states_BLSH = torch.stack([kept[n] for n in self._layers], 2)
        log_probs_BLV: Tensor = output.logits.float().log_softmax(-1)
        log_shares_BLK, likely_BLK = log_probs_BLV.topk(min(KEPT, log_probs_BLV.shape[-1]))
        if self._columns_V is not None:
            likely_BLK = self._columns_V[likely_BLK]
        return TargetOutputs(ids_BL, kept[0], states_BLSH, likely_BLK, log_shares_BLK, self.output)

    @torch.no_grad()
    def from_stored(
        self, ids_BL: Tensor, states_BLSH: Tensor, likely_BLK: Tensor, log_shares_BLK: Tensor
    ) -> TargetOutputs:
        """The outputs of `read`, restored from what was kept of them."""
        device = self.target.device
        ids_BL = ids_BL.to(device)
        embedded: Tensor = self._taps[0](ids_BL)
        states, likely, log_shares = states_BLSH.to(device), likely_BLK.to(device), log_shares_BLK.to(device)
        return TargetOutputs(ids_BL, embedded, states, likely, log_shares, self.output)


def columns_of(vocabulary: Tensor, size: int) -> Tensor:
    """The column of each of `size` tokens in a `vocabulary` of tokens, int64 [size]; -1: of a token outside of it."""
    columns = torch.full((size,), -1, device=vocabulary.device)
    columns[vocabulary] = torch.arange(len(vocabulary), device=vocabulary.device)
    return columns


def _keep(kept: dict[int, Tensor], n: int) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        kept[n] = output if isinstance(output, Tensor) else output[0]

    return hook


def draft_loss(logits: Sequence[Tensor], reading: TargetOutputs) -> Tensor:
    """Cross-entropy from the target's distributions to each step's, nats per token, weighted by DECAY: a scalar.

    `logits[s]` [B, L - 1 - s, columns] are a head's logits, at each position, for the token 2 + s after it. What the
    target gives to tokens without a column counts as given to none of its likely tokens.
    """
    known = reading.likely_BLK >= 0
    likely, shares = reading.likely_BLK.clamp_min(0), reading.log_shares_BLK.exp() * known
    rest = (1 - shares.sum(-1)).clamp_min(0)
    total, weights = torch.zeros((), device=shares.device), 0.0
    for step, step_logits in enumerate(logits):
        after = slice(1 + step, None)
        draft_log_probs = step_logits.gather(-1, likely[:, after]).float() - step_logits.float().logsumexp(
            -1, keepdim=True
        )
        left = (1 - (draft_log_probs.exp() * known[:, after]).sum(-1)).clamp_min(1e-6).log()
        total = total - DECAY**step * ((shares[:, after] * draft_log_probs).sum(-1) + rest[:, after] * left).mean()
        weights += DECAY**step
    return total / weights


@torch.no_grad()
def accepted_by_depth(logits: Sequence[Tensor], reading: TargetOutputs, first: int) -> Tensor:
    """Share of positions from `first` on where a head's most probable tokens of all steps up to each one are the
    target's: float [steps]."""
    chosen = reading.likely_BLK[..., 0]
    alive: Tensor | None = None
    shares = []
    for step, step_logits in enumerate(logits):
        hit = step_logits.argmax(-1) == chosen[:, 1 + step :]
        alive = hit if alive is None else alive[:, : hit.shape[1]] & hit
        shares.append(alive[:, first:].float().mean())
    return torch.stack(shares)

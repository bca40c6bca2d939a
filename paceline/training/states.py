"""What heads learn from: the states and the law of a frozen target that reads a batch once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Reading:
    """B rows of L positions. `states` are of the layers that were asked for, as `hidden_state_layers` counts them."""

    ids_BL: Tensor
    embedded_BLH: Tensor
    states_BLSH: Tensor
    logits_BLV: Tensor


class Reader:
    """A target that is only read."""

    def __init__(self, target: PreTrainedModel, layers: Sequence[int]) -> None:
        self.target = target.eval().requires_grad_(False)
        base: Any = target.base_model
        self._taps: list[nn.Module] = [base.get_input_embeddings(), *base.layers, base]
        self._layers = layers

    @torch.no_grad()
    def read(self, ids_BL: Tensor) -> Reading:
        kept: dict[int, Tensor] = {}
        watched = {0, *self._layers}
        hooks = [self._taps[n].register_forward_hook(_keep(kept, n)) for n in watched]
        try:
            output: Any = self.target(input_ids=ids_BL.to(self.target.device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return Reading(
            ids_BL.to(self.target.device), kept[0], torch.stack([kept[n] for n in self._layers], 2), output.logits
        )


def _keep(kept: dict[int, Tensor], n: int) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        kept[n] = output if isinstance(output, Tensor) else output[0]

    return hook

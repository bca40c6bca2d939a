"""The target's side of one drafted request with real hidden states, from a transformers network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.drafting.speculator import Context, Speculator
from tests.unit.drafting.drafted import DraftedRequest, Guess

__all__ = ["Feeding", "Guess"]


class Feeding(DraftedRequest):
    """A request whose speculator gets the hidden states that the network has at its tokens."""

    def __init__(
        self,
        speculator: Speculator,
        network: nn.Module,
        tokens: Sequence[int],
        *,
        depth: int = 20,
        owner: int = 0,
        **more: Any,
    ) -> None:
        super().__init__(speculator, tokens, depth=depth, link=owner, **more)
        self.known_states = 0
        self._network = network

    def tell(self, stop: int | None = None) -> None:
        """Send the states of positions that were not sent, up to `stop` or the root."""
        stop = len(self.tokens) - 1 if stop is None else stop
        if self._speculator.description.hidden_state_layers and stop > self.known_states:
            self._speculator.context(Context(self.key, self.known_states, self.states()[self.known_states : stop]))
            self.known_states = stop

    def commit(self, tokens: Sequence[int], states: Tensor | None = None) -> None:
        """Commit tokens, with the states that they were drawn from if the states before were sent."""
        base = self.tree.position
        if self._speculator.description.hidden_state_layers and self.known_states == base:
            self.known_states = base + len(tokens)
            states = self.states([*self.tokens, *tokens])[base : self.known_states]
        super().commit(tokens, states)

    @torch.no_grad()
    def states(self, tokens: Sequence[int] = ()) -> Tensor:
        """[positions, layers, H] of all tokens; see `paceline.drafting.speculator.Speculator.hidden_state_layers`."""
        layers: list[Tensor] = []
        base = self._network.base_model
        hooks = [
            module.register_forward_hook(lambda _module, _inputs, output: layers.append(_first(output)))
            for module in (base.embed_tokens, *base.layers, base.norm)  # type: ignore[union-attr, misc]
        ]
        self._network(torch.tensor([tokens or self.tokens]))
        for hook in hooks:
            hook.remove()
        return torch.stack([layers[n] for n in self._speculator.description.hidden_state_layers], 1)


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    tensor = output if isinstance(output, Tensor) else output[0]
    return tensor[0]

"""The target's side of one drafted request with real hidden states, from a transformers network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.config import SamplingParams
from paceline.core.tree import TokenTree
from paceline.drafting.speculator import Commit, Context, Limit, Opening, Speculator

GREEDY = SamplingParams(temperature=0.0)
Guess = tuple[tuple[int, ...], float]
"""The tokens of a path below the root, and the log-probability of the last one."""


class Feeding:
    """Opens a request and keeps the target's replica of its tree. The test chooses the tokens."""

    def __init__(
        self,
        speculator: Speculator,
        network: nn.Module,
        tokens: Sequence[int],
        *,
        key: int = 1,
        sampling: SamplingParams = GREEDY,
        depth: int = 20,
        nodes: int = 1000,
        owner: int = 0,
    ) -> None:
        self.tokens = list(tokens)
        self.tree = TokenTree(len(tokens) - 1, tokens[-1])
        self.known_states = 0
        self._key, self._network, self._speculator = key, network, speculator
        speculator.open(Opening(key, tokens, 0, sampling, depth, nodes, link=owner))

    def tell(self, stop: int | None = None) -> None:
        """Send the states of positions that were not sent, up to `stop` or the root."""
        stop = len(self.tokens) - 1 if stop is None else stop
        if self._speculator.hidden_state_layers and stop > self.known_states:
            self._speculator.context(Context(self._key, self.known_states, self.states()[self.known_states : stop]))
            self.known_states = stop

    def commit(self, tokens: Sequence[int]) -> None:
        """Commit tokens, with the states that they were drawn from if the states before were sent."""
        base = len(self.tokens) - 1
        self.tokens += tokens
        states = None
        if self._speculator.hidden_state_layers and self.known_states == base:
            self.known_states = base + len(tokens)
            states = self.states()[base : self.known_states]
        self.tree.commit(tokens)
        self._speculator.commit(Commit(self._key, base, tokens, 0, states))

    def limit(self, depth: int, nodes: int) -> None:
        self._speculator.limit(Limit(self._key, depth, nodes))

    def grow(self) -> list[Guess]:
        """The new nodes of all rounds until there is nothing to draft."""
        guesses: list[Guess] = []
        while (grown := self._speculator.grow()) or self._speculator.behind:
            if growth := grown.get(self._key):
                known = self.tree.size
                assert self.tree.graft(growth, 10_000) == len(growth), "every node is new and has its parent"
                new = self.tree.nodes()[known:]
                guesses += [(tuple(self.tree.path_tokens(node)), self.tree.log_prob(node)) for node in new]
        return guesses

    @torch.no_grad()
    def states(self) -> Tensor:
        """[positions, layers, H] of all tokens; see `paceline.drafting.speculator.Speculator.hidden_state_layers`."""
        layers: list[Tensor] = []
        base = self._network.base_model
        hooks = [
            module.register_forward_hook(lambda _module, _inputs, output: layers.append(_first(output)))
            for module in (base.embed_tokens, *base.layers, base.norm)  # type: ignore[union-attr, misc]
        ]
        self._network(torch.tensor([self.tokens]))
        for hook in hooks:
            hook.remove()
        return torch.stack([layers[n] for n in self._speculator.hidden_state_layers], 1)


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    tensor = output if isinstance(output, Tensor) else output[0]
    return tensor[0]

"""P-EAGLE: an EAGLE-3 head that was trained to predict several tokens in one pass.

    rows:           ... (h_n-2, t_n-1)  (h_n-1, t_n)  (m, mask)  (m, mask)  (m, mask)      causal attention
    distributions:                           n+1         n+2        n+3        n+4

m is a learned vector; it replaces the target's hidden states, which a mask token does not have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.logits_rules import History
from paceline.core.tree import TokenTree
from paceline.drafting.heads.head_config import mask_token
from paceline.drafting.heads.head_network import HeadNetwork, head_facts
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.methods.eagle3 import load_eagle3, target_layers
from paceline.drafting.parallel_drafts import ContextSpans, HiddenStateRequest, MaskTokenSpeculator, RequestedPasses
from paceline.drafting.speculator import Opening, Speculator
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.target_weights import TargetWeights

__all__ = ["PEagleSpeculator", "build", "matches", "target_layers"]

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")


class PEagleSpeculator(MaskTokenSpeculator[HiddenStateRequest]):
    """Method `peagle`."""

    method = "peagle"

    def __init__(
        self,
        network: HeadNetwork,
        checkpoint: Checkpoint,
        target: TargetWeights,
        tokens_per_pass: int,
        tree_width: int,
        least_path_probability: float = 0.0,
    ) -> None:
        """`network`: the EAGLE-3 head in `checkpoint`. The other parameters: see `MaskTokenSpeculator`.

        Raises `CheckpointError` if the checkpoint has no mask token or no `mask_hidden`, or if they do not fit.
        """
        embedding = checkpoint.find("embed_tokens.weight")
        rows = target.vocabulary_size if embedding is None else checkpoint.shape(embedding)[0]
        mask = mask_token(checkpoint, checkpoint.config, MASK_KEYS, rows)
        facts = head_facts(network, target.fingerprint, target.vocabulary_size)
        super().__init__(facts, mask, tokens_per_pass, tree_width, least_path_probability)
        self._network = network
        with torch.inference_mode():
            self._mask = network.encode(_mask_hidden(checkpoint, target, len(self.hidden_state_layers)))

    def begin(
        self, opening: Opening, tree: TokenTree, history: History, least_path_log_prob: float
    ) -> HiddenStateRequest:
        return HiddenStateRequest(
            opening, tree, history, least_path_log_prob, list(opening.tokens[1:]), self.position_limit
        )

    def run_pass(
        self, context: ContextSpans[HiddenStateRequest], requested: RequestedPasses[HiddenStateRequest]
    ) -> tuple[Tensor, Tensor | None]:
        features = self._features(context, requested)
        rows, wanted = self.rows(context, requested)
        return self._network.run(rows, features, wanted).logits, self._network.ids

    def _features(
        self, context: ContextSpans[HiddenStateRequest], requested: RequestedPasses[HiddenStateRequest]
    ) -> Tensor:
        """[rows, h], in the order of `rows`."""
        states = [state for request, span in context for state in request.states.take(len(span))]
        roots = [state for request, _ in requested for state in request.states.take(1)]
        features = self._network.encode(torch.stack(states + roots))
        parts = [features[: len(states)]]
        for root, (_, count) in zip(features[len(states) :], requested, strict=True):
            parts += [root.unsqueeze(0), self._mask.expand(count - 1, -1)]
        return torch.cat(parts)


def build(inputs: MethodInputs) -> Speculator:
    network, config = load_eagle3(inputs), inputs.config
    depth, width, least = config.num_speculative_tokens, config.tree_width, config.least_path_probability
    return PEagleSpeculator(network, inputs.checkpoint, inputs.target, depth, width, least)


def matches(checkpoint: Checkpoint) -> bool:
    """Whether there is a state for mask tokens; an EAGLE-3 head has none."""
    return "mask_hidden" in checkpoint.names


def _mask_hidden(checkpoint: Checkpoint, target: TargetWeights, layers: int) -> Tensor:
    """[1, layers, H]. Raises `CheckpointError` if it is missing or has another size."""
    name = checkpoint.find("mask_hidden")
    if name is None:
        raise CheckpointError(f"{checkpoint} has no tensor mask_hidden: it is an EAGLE-3 head, not a P-EAGLE one")
    mask = checkpoint.tensor(name, target.dtype, target.device)
    if mask.numel() != layers * target.hidden_size:
        raise CheckpointError(
            f"mask_hidden in {checkpoint} has {mask.numel()} values where {layers} states of {target.hidden_size} are "
            f"needed: is it a head for {target.name}?"
        )
    return mask.reshape(1, layers, target.hidden_size)

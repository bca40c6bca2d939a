"""P-EAGLE: an EAGLE-3 head that was taught to look several tokens ahead in one pass.

    rows:   ... (h_n-2, t_n-1)  (h_n-1, t_n)  (m, mask)  (m, mask)  (m, mask)      causal attention
    laws:                            n+1         n+2        n+3        n+4

m is a learned vector in place of the target's states, which a mask has none of.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.sampling import History
from paceline.core.tree import TokenTree
from paceline.drafting.heads.head_network import HeadNetwork
from paceline.drafting.parallel_drafts import ContextSpans, HiddenStateDraft, MaskTokenSpeculator, RequestedPasses
from paceline.drafting.speculator import Opening
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.target_weights import TargetWeights

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")


class PEagleSpeculator(MaskTokenSpeculator[HiddenStateDraft]):
    """Method `peagle`."""

    method = "peagle"

    def __init__(
        self,
        network: HeadNetwork,
        checkpoint: Checkpoint,
        lent: TargetWeights,
        ahead: int,
        tree_width: int,
        least_path_probability: float = 0.02,
    ) -> None:
        """`network`: the EAGLE-3 head in `checkpoint`. The rest as in `MaskTokenSpeculator`. Raises
        `CheckpointError`."""
        columns = lent.vocabulary_size if network.ids is None else len(network.ids)
        mask_token, width = mask_token_of(checkpoint, lent), min(tree_width, columns)
        super().__init__(network.slots, mask_token, ahead, width, least_path_probability)
        self.model = network.model
        self.vocabulary_fingerprint = lent.fingerprint
        self.vocabulary_size = lent.vocabulary_size
        self.hidden_state_layers = tuple(network.hidden_state_layers)
        self.position_limit = network.position_limit
        self._network = network
        with torch.inference_mode():
            self._mask = network.encode(_mask_hidden(checkpoint, lent, len(self.hidden_state_layers)))

    def begin(self, opening: Opening, tree: TokenTree, history: History, floor: float) -> HiddenStateDraft:
        return HiddenStateDraft(opening, list(opening.tokens[1:]), tree, history, self.position_limit, floor)

    def run_pass(
        self, context: ContextSpans[HiddenStateDraft], asked: RequestedPasses[HiddenStateDraft]
    ) -> tuple[Tensor, Tensor | None]:
        features = self._features(context, asked)
        rows, wanted = self.rows(context, asked)
        return self._network.run(rows, features, wanted).logits, self._network.ids

    def _features(self, context: ContextSpans[HiddenStateDraft], asked: RequestedPasses[HiddenStateDraft]) -> Tensor:
        """[rows, h], in the order of `rows`."""
        told = [state for draft, span in context for state in draft.states.take(len(span))]
        roots = [state for draft, _ in asked for state in draft.states.take(1)]
        known = self._network.encode(torch.stack(told + roots).to(self._mask))
        parts = [known[: len(told)]]
        for root, (_, count) in zip(known[len(told) :], asked, strict=True):
            parts += [root.unsqueeze(0), self._mask.expand(count - 1, -1)]
        return torch.cat(parts)


def is_peagle(checkpoint: Checkpoint) -> bool:
    said = checkpoint.config
    named = any(str(name).lower().startswith("peagle") for name in said.get("architectures") or ())
    return named or said.get("speculators_model_type") == "peagle" or checkpoint.find("mask_hidden") is not None


def mask_token_of(checkpoint: Checkpoint, lent: TargetWeights) -> int:
    """Raises `CheckpointError` if there is none, or it has no embedding."""
    named = next((checkpoint.config[key] for key in MASK_KEYS if checkpoint.config.get(key) is not None), None)
    if not isinstance(named, int):
        raise CheckpointError(f"config.json in {checkpoint} names no mask_token_id: it is no P-EAGLE head")
    own = checkpoint.find("embed_tokens.weight")
    rows = lent.vocabulary_size if own is None else checkpoint.shape(own)[0]
    if not 0 <= named < rows:
        raise CheckpointError(f"mask_token_id {named} in {checkpoint} is no id in an embedding of {rows} tokens")
    return named


def _mask_hidden(checkpoint: Checkpoint, lent: TargetWeights, layers: int) -> Tensor:
    """[1, layers, H]. Raises `CheckpointError` if there is none, or it has another size."""
    name = checkpoint.find("mask_hidden")
    if name is None:
        raise CheckpointError(f"{checkpoint} has no tensor mask_hidden: it is an EAGLE-3 head, not a P-EAGLE one")
    mask = checkpoint.tensor(name, lent.dtype, lent.device)
    if mask.numel() != layers * lent.hidden_size:
        raise CheckpointError(
            f"mask_hidden in {checkpoint} has {mask.numel()} values where {layers} states of {lent.hidden_size} are "
            f"needed: is it a head for {lent.name}?"
        )
    return mask.reshape(1, layers, lent.hidden_size)

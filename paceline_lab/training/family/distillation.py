"""Distillation: the draft learns the target's distributions over corpus text and text that the target wrote.

The target reads each row once. Its most probable tokens are kept, and the draft trains on them many times.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from paceline_lab.training.family.family_models import logits
from paceline_lab.training.family.token_corpus import Stream

KEPT = 32
"""Tokens kept of each distribution; the remaining mass is one bucket."""


@dataclass(frozen=True)
class DistillationData:
    """The target's outputs: R rows of L positions, K tokens kept at each."""

    ids_RL: Tensor  # int64, the text
    kept_RLK: Tensor  # int16, the most probable next tokens
    log_probs_RLK: Tensor  # float16, their log-probabilities in nats

    def save(self, path: Path) -> None:
        """Write the data to a file."""
        torch.save([self.ids_RL, self.kept_RLK, self.log_probs_RLK], path)

    @classmethod
    def load(cls, path: Path) -> "DistillationData":
        """Read a file that `save` wrote."""
        return cls(*torch.load(path, weights_only=True))

    def stream(self, seed: int) -> Stream:
        """Batches of row numbers: int64 [rows, 1]."""

        def cut(_: int, epoch_seed: int) -> Tensor:
            shuffled = torch.randperm(len(self.ids_RL), generator=torch.Generator().manual_seed(epoch_seed))
            return shuffled[:, None]

        return Stream(cut, seed)

    def divergence(self, draft: nn.Module, rows: Tensor) -> Tensor:
        """KL from the target's distributions to the draft's, kept tokens and the rest: nats per token, a scalar."""
        rows = rows[:, 0].cpu()
        device = next(draft.parameters()).device
        target_RLK = self.log_probs_RLK[rows].to(device).float()
        kept_RLK = self.kept_RLK[rows].to(device).long()
        draft_RLV = logits(draft, self.ids_RL[rows].to(device)).float().log_softmax(-1)
        draft_RLK = draft_RLV.gather(-1, kept_RLK)
        kept = (target_RLK.exp() * (target_RLK - draft_RLK)).sum(-1)
        target_rest, draft_rest = _log_rest(target_RLK), _log_rest(draft_RLK)
        rest = target_rest.exp() * (target_rest - draft_rest)
        return (kept + rest).mean()


def target_top_probs(target: nn.Module, rows_RL: Tensor, batch: int = 4) -> DistillationData:
    """The target's outputs for rows int64 [R, L]."""
    kept = [_most_probable(target, rows) for rows in rows_RL.split(batch)]
    tokens, log_probs = zip(*kept, strict=True)
    return DistillationData(rows_RL, torch.cat(tokens), torch.cat(log_probs))


@torch.no_grad()
def _most_probable(target: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    log_probs_RLV = logits(target, rows.to(next(target.parameters()).device)).float().log_softmax(-1)
    log_probs, tokens = log_probs_RLV.topk(KEPT)
    return tokens.to(torch.int16).cpu(), log_probs.half().cpu()


def _log_rest(log_probs_RLK: Tensor) -> Tensor:
    """The log of the mass that is not kept, at least 1e-6: [R, L]."""
    return (1 - log_probs_RLK.exp().sum(-1)).clamp_min(1e-6).log()


def begin_draft(draft: LlamaForCausalLM, target: LlamaForCausalLM) -> None:
    """Give the draft the target's embeddings and final norm."""
    with torch.no_grad():
        draft.model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        draft.model.norm.weight.copy_(target.model.norm.weight)

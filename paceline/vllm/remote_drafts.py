"""`RemoteDrafts`: a vLLM proposer whose draft tokens come from Paceline's draft workers.

vLLM calls `propose` after every step. What the step drew goes to the drafts, whose trees have grown meanwhile, and the
likeliest paths of these trees are the next draft tokens: as many as are worth their rows. It uses the same parts as
Paceline's own engine: `DraftManager`, calibration, gate, wait policy.

A draft that is lost, slow, lying or absent costs only speed. So does any fault of this code: it is logged, and vLLM
decodes without drafts for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.config import SpeculativeConfig
from paceline.engine.draft_manager import GatherHiddenStates
from paceline.vllm.draft_links import PoolLinks
from paceline.vllm.pooled_drafts import DescribeRow, PooledDrafts
from paceline.vllm.remote_drafts_settings import LinkOptions, RemoteDraftsSettings
from paceline.vllm.target_facts import TargetFacts, read_target_facts

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class RemoteDrafts:
    """`--speculative-config '{"method": "custom_class", "model": "paceline.vllm.RemoteDrafts", ...}'`."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Raises ValueError if no draft workers are named, `ModelNotFoundError` if the tokenizer cannot be read."""
        assert vllm_config.speculative_config is not None
        facts = read_target_facts(vllm_config)
        settings = RemoteDraftsSettings.read(vllm_config.additional_config)
        depth = vllm_config.speculative_config.num_speculative_tokens
        self.hidden_state_layers = settings.hidden_state_layers
        """Layers whose hidden states the drafts read: `CoupledWorker` has them computed."""
        self._has_hidden_states = False
        self._drafts = pooled_drafts(settings, facts, depth) if facts.is_first_rank else None

    def predict_draws(self, describe: DescribeRow) -> None:
        """The target draws with Paceline's noise (`CoupledWorker`): let drafts predict that. Before `load_model`."""
        if self._drafts is not None:
            self._drafts.predict_draws(describe)

    def read_hidden_states(self, gather: GatherHiddenStates) -> None:
        """Where the hidden states of `hidden_state_layers` are found. Before `load_model`."""
        self._has_hidden_states = True
        if self._drafts is not None:
            self._drafts.read_hidden_states(gather)

    def load_model(self, model: object) -> None:
        """Open the links: the drafts have models of their own.

        Raises ValueError if the drafts read hidden states, and nothing gathers them.
        """
        if self.hidden_state_layers and not self._has_hidden_states:
            raise ValueError("hidden_state_layers needs --worker-cls paceline.vllm.coupled_worker.CoupledWorker")
        if self._drafts is not None:
            self._drafts.start()

    @property
    def propose_ms(self) -> float:
        """Median time of `propose` in the last steps, waits for drafts left out. 0 on other ranks than the first."""
        return self._drafts.propose_ms if self._drafts is not None else 0.0

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """The draft tokens of each row, at most `num_speculative_tokens`.

        `sampled_token_ids`: what the step drew for each row; nothing if it computed a part of a prompt.
        `num_tokens_no_spec`: tokens of each row, these included. `token_ids_cpu`: [rows or more, positions].
        Of several tensor-parallel ranks vLLM asks all and listens to the first.
        """
        if self._drafts is None:
            return [[] for _ in sampled_token_ids]
        return self._drafts.propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)


def pooled_drafts(settings: RemoteDraftsSettings, facts: TargetFacts, depth: int) -> PooledDrafts:
    """`depth`: most draft tokens of a step."""
    options = LinkOptions(
        settings.drafts,
        settings.redis_url,
        facts.fingerprint,
        settings.tls_files,
        settings.hidden_state_layers,
    )
    fixed = {"method": "pool", "beside": settings.lookups, "num_speculative_tokens": depth, "max_tree_nodes": depth}
    config = SpeculativeConfig.model_validate({**settings.lookup_settings, **fixed, "row_budget": settings.row_budget})
    return PooledDrafts(PoolLinks(options), config, facts.vocabulary_size, facts.max_model_len)

"""`CoupledWorker`: vLLM's worker with draws that do not depend on drafts (`--worker-cls`)."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from paceline.vllm.batch import RowDescription
from paceline.vllm.coupled_draws import CoupledDraws, VllmRequest
from paceline.vllm.kv_hidden_states import KvHiddenStates
from paceline.vllm.remote_drafts import RemoteDrafts

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class CoupledWorker(Worker):  # type: ignore[misc]
    """Its model runner has other samplers: vLLM's own objects, of subclasses."""

    def init_device(self) -> None:
        super().init_device()
        if self.vllm_config.scheduler_config.async_scheduling:
            raise ValueError("the coupled worker needs to know each token: start vLLM with --no-async-scheduling")
        if not self.vllm_config.model_config.logprobs_mode.startswith("raw"):
            raise ValueError("the coupled worker reports raw log-probabilities only: leave out --logprobs-mode")
        if self.vllm_config.model_config.logits_processors:
            raise ValueError("the coupled worker has its own rules: leave out --logits-processors")
        if getattr(self, "use_v2_model_runner", False):
            raise ValueError("the coupled worker has the samplers of vLLM's V1: set VLLM_USE_V2_MODEL_RUNNER=0")
        runner = self.model_runner
        batch = _Batch(runner)
        runner.sampler = CoupledSampler(batch, runner.sampler)
        drafter = getattr(runner, "drafter", None)
        if drafter is not None:
            runner.rejection_sampler = CoupledRejectionSampler(batch, runner.sampler, runner.speculative_config)
        self._hidden_states: KvHiddenStates | None = None
        if isinstance(drafter, RemoteDrafts):
            drafter.predict_draws(batch.describe)
            if drafter.hidden_state_layers:
                self._hidden_states = KvHiddenStates(runner)
                drafter.read_hidden_states(self._hidden_states.gather)
                runner.use_aux_hidden_state_outputs = True  # as for vLLM's own EAGLE-3

    def load_model(self, *arguments: Any, **others: Any) -> None:
        super().load_model(*arguments, **others)
        if self._hidden_states is not None:
            layers = self.model_runner.drafter.hidden_state_layers
            self.model_runner.get_model().set_aux_hidden_state_layers(layers)

    def execute_model(self, scheduler_output: Any) -> Any:
        output = super().execute_model(scheduler_output)
        step = self.model_runner.execute_model_state
        if self._hidden_states is not None and step is not None:  # tokens are drawn after this
            self._hidden_states.store(step.aux_hidden_states, scheduler_output.total_num_scheduled_tokens)
        return output


class _Batch:
    """The requests of a model runner's batch, in the order of their rows."""

    def __init__(self, runner: Any) -> None:
        self.draws = CoupledDraws(runner.model_config.get_vocab_size())
        self._runner = runner

    @property
    def requests(self) -> list[VllmRequest]:
        known = self._runner.requests
        if len(self.draws) > len(known):
            self.draws.keep(known)
        return [known[name] for name in self._runner.input_batch.req_ids]

    def describe(self, row: int) -> RowDescription:
        return self.draws.describe(self._runner.requests[self._runner.input_batch.req_ids[row]])


class CoupledSampler(Sampler):  # type: ignore[misc]
    """For steps without draft tokens. Log-probabilities are vLLM's."""

    def __init__(self, batch: _Batch, replaced: Sampler) -> None:
        super().__init__(replaced.logprobs_mode)
        self._batch = batch
        self._drawn: torch.Tensor | None = None

    def forward(self, logits: torch.Tensor, *arguments: Any, **others: Any) -> Any:
        requests = self._batch.requests  # none while vLLM measures its memory
        # Drawn first: vLLM's rules change logits in place.
        self._drawn = self._batch.draws.draw(logits, requests) if requests else None
        return super().forward(logits, *arguments, **others)

    def sample(self, logits: torch.Tensor, *arguments: Any, **others: Any) -> tuple[torch.Tensor, Any]:
        """vLLM's samplers draw here. The tokens are drawn already."""
        if self._drawn is None:
            sampled: tuple[torch.Tensor, Any] = super().sample(logits, *arguments, **others)
            return sampled
        return self._drawn, None


class CoupledRejectionSampler(RejectionSampler):  # type: ignore[misc]
    """For steps with draft tokens: draw at every position, and accept the drafts that are drawn."""

    def __init__(self, batch: _Batch, sampler: Sampler, config: Any) -> None:
        super().__init__(sampler, config)
        self._batch = batch

    def forward(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        from vllm.v1.outputs import SamplerOutput

        requests = self._batch.requests
        if not requests:  # vLLM measures its memory
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        flat = iter(metadata.draft_token_ids.tolist())
        drafts = [[next(flat) for _ in range(number)] for number in metadata.num_draft_tokens]
        tokens = self._batch.draws.verify(logits, requests, drafts)
        most = sampling_metadata.max_num_logprobs
        if most is None:
            return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)
        targets, bonus = logits[metadata.target_logits_indices], logits[metadata.bonus_logits_indices]
        return SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=self._get_logprobs_tensors(most, metadata, logits, targets, bonus, tokens),
        )

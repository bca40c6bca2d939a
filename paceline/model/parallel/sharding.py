"""A transformers model split over ranks by transformers' tensor-parallel plan, without changes to the model's code.

transformers reads each rank's part of every weight; its plan says how to complete a module's output. This module
completes it, since a row's sum must not depend on the other rows (`TensorParallelGroup.all_reduce`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from paceline.model.attention import Heads
from paceline.model.parallel.tensor_parallel_group import TensorParallelGroup

TpPlan = Mapping[str, str]
"""transformers' style of each module or parameter; `*` matches any layer's number."""

LOCAL_STYLES = frozenset(
    {
        *("colwise", "local_params", "mla_kv_a_proj", "packed_colwise", "packed_rowwise"),
        *("replicate", "replicated_with_grad_allreduce"),
    }
)
"""Styles whose output needs no communication: a rank's part is enough, or it has all of it."""
ALL_REDUCE_STYLES = frozenset({"all_reduce", "moe_tp_experts", "rowwise", "rowwise_split_input"})
"""Styles whose output is the sum over ranks."""
ALL_GATHER_STYLES = frozenset({"colwise_gather_output", "colwise_rep"})
"""Styles whose output is the concatenation over ranks."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How ranks share one model."""

    plan: TpPlan
    ranks: TensorParallelGroup

    def heads(self, heads: Heads) -> Heads:
        """The attention heads of this rank."""
        return heads_per_rank(heads, self.plan, self.ranks.size)

    def distributed_config(self) -> DistributedConfig:
        """For `from_pretrained`, which then reads only this rank's part of the weights."""
        return DistributedConfig(tp_size=self.ranks.size, tp_plan=dict(self.plan))

    def unwrap_dtensors(self, network: nn.Module) -> None:
        """Turn transformers' sharded model into a plain one over this rank's weights, whose outputs are incomplete."""
        for module in network.modules():
            module.__dict__.pop("forward", None)  # completes the output in transformers' way
            for name, parameter in module._parameters.items():
                if isinstance(parameter, DTensor):
                    module._parameters[name] = nn.Parameter(parameter.to_local().contiguous(), requires_grad=False)

    def install_collectives(self, network: nn.Module) -> None:
        """Make every module of an unwrapped network complete its output."""
        for name, module in network.named_modules():
            style = self.plan.get(replace_layer_number_by_wildcard(name), "replicate")
            if style in ALL_REDUCE_STYLES:
                module.forward = _summed(module, style, self.ranks)
            elif style in ALL_GATHER_STYLES:
                module.forward = _gathered(module, self.ranks)


def tp_plan_for(config: Any, size: int) -> TpPlan:
    """How `size` ranks share a model with this configuration. Raises ValueError if they cannot."""
    with torch.device("meta"):
        network: Any = AutoModelForCausalLM.from_config(config)
    plan = dict(network.tp_plan or {})
    kind, text = config.model_type, config.get_text_config(decoder=True)
    if not plan:
        raise ValueError(f"transformers has no tensor-parallel plan for {kind}: set tensor_parallel_size to 1")
    head = network.get_output_embeddings()
    for name, module in network.named_modules():
        # Not split: draft heads read the embedding, and a tied output matrix is the same tensor.
        if isinstance(module, nn.Embedding) or (module is head and text.tie_word_embeddings):
            plan[replace_layer_number_by_wildcard(name)] = "replicate"
    if unknown := sorted(set(plan.values()) - LOCAL_STYLES - ALL_REDUCE_STYLES - ALL_GATHER_STYLES):
        raise ValueError(f"{kind} is shared in an unsupported way ({unknown[0]}): set tensor_parallel_size to 1")
    heads_per_rank(Heads.of(text), plan, size)
    return plan


def heads_per_rank(heads: Heads, plan: TpPlan, size: int) -> Heads:
    """The attention heads of one of `size` ranks. Raises ValueError if they do not divide."""
    if not any(style == "colwise" and "attn" in name for name, style in plan.items()):
        return heads  # attention is not split
    if heads.kv_heads % size:
        raise ValueError(
            f"{heads.kv_heads} key-value heads cannot be shared by {size} ranks: "
            f"choose a tensor_parallel_size that divides {heads.kv_heads}"
        )
    return Heads(heads.kv_heads // size, heads.queries_per_kv, heads.head_size)


def _summed(module: Any, style: str, ranks: TensorParallelGroup) -> Callable[..., Tensor]:
    forward, bias = module.forward, getattr(module, "bias", None)
    if bias is not None:
        module.bias = None  # added once, to the sum

    def summed(x: Tensor, *others: Any, **options: Any) -> Tensor:
        part = ranks.local_columns(x) if style == "rowwise_split_input" else x
        total = ranks.all_reduce(forward(part, *others, **options))
        return total if bias is None else total + bias

    return summed


def _gathered(module: Any, ranks: TensorParallelGroup) -> Callable[[Tensor], Tensor]:
    forward = module.forward
    return lambda x: ranks.all_gather(forward(x), module.out_features)

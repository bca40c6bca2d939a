"""A transformers model split over ranks by transformers' own plan, from outside: the model knows nothing of it.

transformers reads each rank's part of every weight, and names in its plan what a module's output then lacks. What is
done about that stands here and not there, since sums have to be the same for every row whatever its company
(`TensorParallelGroup.sum`).
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
"""transformers' name of a style, by module or parameter; `*` stands for any layer's number."""

LOCAL_STYLES = frozenset(
    {
        "colwise",
        "local_params",
        "mla_kv_a_proj",
        "packed_colwise",
        "packed_rowwise",
        "replicate",
        "replicated_with_grad_allreduce",
    }
)
"""Styles whose output is as it should be on each rank: its own part of it, or all of it."""
ALL_REDUCE_STYLES = frozenset({"all_reduce", "moe_tp_experts", "rowwise", "rowwise_split_input"})
"""Styles whose output is the sum over ranks."""
ALL_GATHER_STYLES = frozenset({"colwise_gather_output", "colwise_rep"})
"""Styles whose output is that of all ranks, side by side."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How these ranks share one model."""

    plan: TpPlan
    ranks: TensorParallelGroup

    def heads(self, heads: Heads) -> Heads:
        """The attention heads of this rank."""
        return heads_per_rank(heads, self.plan, self.ranks.size)

    def distributed_config(self) -> DistributedConfig:
        """For `from_pretrained`, which then reads this rank's part of the weights, and no more."""
        return DistributedConfig(tp_size=self.ranks.size, tp_plan=dict(self.plan))

    def unwrap_dtensors(self, network: nn.Module) -> None:
        """Turn what transformers read into a plain model over this rank's weights, whose outputs lack parts."""
        for module in network.modules():
            module.__dict__.pop("forward", None)  # transformers' way to make the output whole
            for name, parameter in module._parameters.items():
                if isinstance(parameter, DTensor):
                    module._parameters[name] = nn.Parameter(parameter.to_local().contiguous(), requires_grad=False)

    def install_collectives(self, network: nn.Module) -> None:
        """Let every module of a localised model make its output whole."""
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
        # Whole everywhere: heads that draft read the embedding, and an output matrix tied to it is the same tensor.
        if isinstance(module, nn.Embedding) or (module is head and text.tie_word_embeddings):
            plan[replace_layer_number_by_wildcard(name)] = "replicate"
    if unknown := sorted(set(plan.values()) - LOCAL_STYLES - ALL_REDUCE_STYLES - ALL_GATHER_STYLES):
        raise ValueError(f"{kind} is shared in a way not known here ({unknown[0]}): set tensor_parallel_size to 1")
    heads_per_rank(Heads.of(text), plan, size)
    return plan


def heads_per_rank(heads: Heads, plan: TpPlan, size: int) -> Heads:
    """The attention heads of one of `size` ranks. Raises ValueError if they do not divide."""
    if not any(style == "colwise" and "attn" in name for name, style in plan.items()):
        return heads  # every rank attends with all of them
    if heads.kv_heads % size:
        raise ValueError(
            f"{heads.kv_heads} key-value heads cannot be shared by {size} ranks: "
            f"choose a tensor_parallel_size that divides {heads.kv_heads}"
        )
    return Heads(heads.kv_heads // size, heads.queries_per_kv, heads.head_size)


def _summed(module: Any, style: str, ranks: TensorParallelGroup) -> Callable[..., Tensor]:
    forward, bias = module.forward, getattr(module, "bias", None)
    if bias is not None:
        module.bias = None  # it is added once, not by every rank

    def summed(x: Tensor, *others: Any, **options: Any) -> Tensor:
        part = ranks.local_columns(x) if style == "rowwise_split_input" else x
        total = ranks.all_reduce(forward(part, *others, **options))
        return total if bias is None else total + bias

    return summed


def _gathered(module: Any, ranks: TensorParallelGroup) -> Callable[[Tensor], Tensor]:
    forward = module.forward
    return lambda x: ranks.all_gather(forward(x), module.out_features)

"""A tiny target whose next token depends on the last one alone, and draft heads that know its distribution.

Attention and MLPs add nothing: the final state is the norm of the last token's embedding.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from paceline.config import EngineConfig
from paceline.model.loading import build
from paceline.model.model import TransformersModel
from paceline_lab.training.heads.target_reader import TargetOutputs
from paceline_lab.training.heads.train_head import RECIPES
from paceline_lab.training.heads.train_head import save_head as save_trained
from tests.helpers.checkpoints import save_tokenizer
from tests.helpers.head_checkpoints import HIDDEN, save_head
from tests.helpers.llamas import VOCABULARY, peaked_llama


def markov_llama() -> LlamaForCausalLM:
    network = peaked_llama()
    with torch.no_grad():
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        network.lm_head.weight *= 3  # peaked, so that two steps ahead can be guessed, too
    return network


def markov_model(dtype: torch.dtype = torch.float32, slots: int = 2048) -> TransformersModel:
    return build(markov_llama().to(dtype), "markov", EngineConfig(slots=slots), "", [])


def save_markov(folder: Path) -> Path:
    network = markov_llama()
    network.generation_config.eos_token_id = network.config.eos_token_id = None
    network.save_pretrained(folder)
    save_tokenizer(folder, range(VOCABULARY))
    return folder


def final_states() -> Tensor:
    """The final state after each token: [V, H] in float64."""
    network = markov_llama()
    states: Tensor = network.model.norm(network.model.embed_tokens.weight).detach().double()
    return states


def logits_after() -> Tensor:
    """The target's logits after each token: [V, V] in float64."""
    return final_states() @ markov_llama().lm_head.weight.detach().double().T


def distributions_ahead(steps: int, temperature: float) -> Tensor:
    """Logits [V, V] of the distribution `steps` steps after each token; 1 is the next token."""
    logits = logits_after()
    if temperature == 0:
        successor = logits.argmax(-1)
        ahead = torch.arange(VOCABULARY)
        for _ in range(steps):
            ahead = successor[ahead]
        return 10 * F.one_hot(ahead, VOCABULARY).double()
    probs = (logits / temperature).softmax(-1)
    return temperature * torch.linalg.matrix_power(probs, steps).clamp(min=1e-9).log()


def projecting(states: Tensor, logits: Tensor) -> Tensor:
    """The matrix [V, n] that maps states [V, n] to logits [V, V]."""
    return torch.linalg.lstsq(states, logits).solution.T.float().contiguous()


def seeing_medusa(heads: int, temperature: float) -> dict[str, Tensor]:
    """Heads that guess as well as the state allows: the state is the one before the root."""
    tensors = {}
    for head in range(heads):
        tensors[f"{head}.0.linear.weight"] = torch.zeros(HIDDEN, HIDDEN)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(HIDDEN)
        tensors[f"{head}.1.weight"] = projecting(final_states(), distributions_ahead(head + 2, temperature))
    return tensors


def seeing_mlp(steps: int, inner: int = 96) -> dict[str, Tensor]:
    """A speculator that uses the token alone, and knows the target's distribution after it."""
    embedding = torch.randn(VOCABULARY, inner, generator=torch.Generator().manual_seed(1))
    tensors = {}
    for i in range(steps):
        tensors[f"emb.{i}.weight"] = embedding.clone()
        tensors[f"proj.{i}.weight"] = torch.zeros(inner, inner if i else HIDDEN)
        tensors[f"ln.{i}.weight"], tensors[f"ln.{i}.bias"] = torch.ones(inner), torch.zeros(inner)
        normed = embedding.double() / embedding.double().pow(2).mean(-1, keepdim=True).sqrt()
        tensors[f"head.{i}.weight"] = projecting(F.gelu(normed), logits_after())
    return tensors


def mlp_config(steps: int, **more: object) -> dict[str, object]:
    return {"architectures": ["MLPSpeculatorPreTrainedModel"], "n_predict": steps, "tie_weights": False} | more


def save_seeing(method: str, folder: Path, temperature: float, steps: int = 3) -> Path:
    """Save a head of this method that knows the target's distribution."""
    if method == "medusa":
        return save_head(folder, seeing_medusa(steps, temperature), {"medusa_num_heads": 2})
    return save_head(folder, seeing_mlp(steps), mlp_config(steps))


def trained(method: str, folder: Path) -> tuple[nn.Module, TargetOutputs]:
    """A random head as `paceline train` saves it, and target outputs to run it on."""
    network = peaked_llama()
    output = network.lm_head.weight.detach()
    states = torch.randn(2, 9, 1, HIDDEN, generator=torch.Generator().manual_seed(3))
    ids = torch.arange(18).view(2, 9)
    probs = torch.zeros(2, 9, 1)
    reading = TargetOutputs(ids, torch.zeros(2, 9, HIDDEN), states, probs.long(), probs, output)
    recipe = RECIPES[method]
    head = recipe.begin(network.config, network)
    torch.manual_seed(5)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=HIDDEN**-0.5)
        parameter.data = parameter.data.bfloat16().float()  # the dtype in which it is saved
    save_trained(head, recipe, network.config, folder)
    return head, reading

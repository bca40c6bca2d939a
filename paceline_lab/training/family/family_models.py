"""The two models of the family, their files, and the attention used in training."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from paceline_lab.training.family.family_tokenizer import END_OF_TEXT, SPECIAL, TURN_END, VOCABULARY

POSITIONS = 2048
ATTENTION = "short_causal"
SHORT = 256
"""Up to this many tokens two batched products beat the fused kernel on a CPU."""


def target_config(**changes: int) -> LlamaConfig:
    """The target: 26 layers of width 256, about 16.4 million parameters."""
    return _config(**{"num_hidden_layers": 26, "intermediate_size": 512} | changes)


def shallow_config(**changes: int) -> LlamaConfig:
    """The target at first: 16 of its layers, which learn faster than all layers would."""
    return target_config(**{"num_hidden_layers": 16} | changes)


def draft_config(**changes: int) -> LlamaConfig:
    """The draft: two layers of the same width, about 3 million parameters, a third of them the embeddings.

    One layer cannot copy from the context: the second finds the earlier continuation because the first has marked each
    token with the one before it (induction heads, Olsson et al. 2022).
    """
    return _config(**{"num_hidden_layers": 2, "intermediate_size": 1024} | changes)


def new_model(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """A freshly initialised model in float32, with the attention for training."""
    torch.manual_seed(seed)
    return LlamaForCausalLM._from_config(config, attn_implementation=ATTENTION, dtype=torch.float32)


def deepened(shallow: LlamaForCausalLM, config: LlamaConfig) -> LlamaForCausalLM:
    """A deeper model in float32 with exactly the outputs of the shallow one.

    Copies of layers are inserted between the old ones, evenly spread. Their two output projections are zero, so they
    add nothing until they are trained (block expansion, Wu et al. 2024, "LLaMA Pro").
    """
    deep = new_model(config, seed=0)
    old, count = shallow.model.layers, config.num_hidden_layers
    with torch.no_grad():
        deep.model.embed_tokens.weight.copy_(shallow.model.embed_tokens.weight)
        deep.model.norm.weight.copy_(shallow.model.norm.weight)
        for index, layer in enumerate(deep.model.layers):
            source = index * len(old) // count
            layer.load_state_dict(old[source].state_dict())
            if source == (index - 1) * len(old) // count:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
    return deep


def load_model(folder: Path, device: str) -> LlamaForCausalLM:
    """A shipped model in bfloat16, with transformers' own attention."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.to(device).eval()


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a model in bfloat16 and its tokenizer, in the layout that transformers reads.

    Each file replaces the old one atomically, so a process that has mapped the old weights keeps them.
    """
    end_of_text, turn_end = tokenizer.convert_tokens_to_ids([END_OF_TEXT, TURN_END])
    model.generation_config = GenerationConfig(
        bos_token_id=end_of_text, pad_token_id=end_of_text, eos_token_id=[turn_end, end_of_text]
    )
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as partial:
        model.to(torch.bfloat16).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for path in Path(partial).iterdir():
            path.chmod(0o644)
            path.replace(folder / path.name)


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Next-token logits [rows, length, vocabulary] of ids [rows, length]; no cache, no padding."""
    predicted: Tensor = model(input_ids=ids, use_cache=False).logits
    return predicted


def next_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross-entropy of every token given those before it, nats per token; batch int64 [rows, length + 1]."""
    predicted = logits(model, batch[:, :-1]).flatten(0, 1).float()
    return F.cross_entropy(predicted, batch[:, 1:].flatten())


def _config(**sizes: int) -> LlamaConfig:
    defaults = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": POSITIONS,
    }
    return LlamaConfig(
        **defaults | sizes,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=SPECIAL.index(END_OF_TEXT),
        eos_token_id=SPECIAL.index(TURN_END),
        pad_token_id=SPECIAL.index(END_OF_TEXT),
    )


def _short_causal(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: object
) -> tuple[Tensor, None]:
    """Causal attention without padding: query [B, H, T, D], key and value [B, G, T, D] -> [B, T, H, D]."""
    if query.shape[2] > SHORT:
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    else:
        mixed = _two_products(query, key, value)
    return mixed.transpose(1, 2).contiguous(), None


def _two_products(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention in two batched products; the heads of a group form one tall query."""
    batch, heads, length, width = query.shape
    groups = key.shape[1]
    tall = heads // groups
    query = query.reshape(batch * groups, tall * length, width)
    key = key.reshape(batch * groups, length, width)
    value = value.reshape(batch * groups, length, width)
    future = torch.full((length, length), -torch.inf, dtype=query.dtype, device=query.device).triu(1)
    scores = torch.baddbmm(future.repeat(tall, 1), query, key.transpose(1, 2), alpha=width**-0.5)
    return torch.bmm(scores.softmax(-1), value).view(batch, heads, length, width)


AttentionInterface.register(ATTENTION, _short_causal)

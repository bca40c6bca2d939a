"""DFlash (Chen et al. 2025): a block of mask tokens after the root, predicted in one pass over the target's states.

    c      = norm(fc([states of several layers]))        one for each position before the root
    x      = embedding of [root, m, m, ...]              the block, at the positions from the root's on
    x      = x + attention(norm(x))                      over keys and values of all c and of the whole block
    x      = x + mlp(norm(x))
    logits = the target's output matrix of norm(x)       a mask token's logits are for its own position

Keys and values of c depend only on the target's states and are kept; those of a block are not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config import MAX_DEPTH, SpeculativeConfig
from paceline.drafting.block import Blocks, ContextSpans, RequestedPasses
from paceline.drafting.heads.dflash_config import DFlashConfig, configured_layers, tokens_per_pass
from paceline.drafting.heads.head_config import head_config, head_rotary
from paceline.drafting.heads.head_network import head_description
from paceline.drafting.heads.head_weights import HeadWeights
from paceline.drafting.heads.llama_head import llama_layers
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.network_speculator import NetworkSpeculator
from paceline.drafting.speculator import Speculator
from paceline.model.attention import Heads, KVCache
from paceline.model.checkpoint import Checkpoint
from paceline.model.layer_weights import DecoderLayerWeights
from paceline.model.layers import CosSin, Linear, RMSNorm, RotaryEmbedding, SwiGLU, apply_rotary
from paceline.model.target_weights import TargetWeights

RENAMES = ((r"^model\.", ""), (r"encoder\.fc\.", "fc."), (r"encoder\.output_norm_enc\.", "hidden_norm."))
"""To the original format's names."""


class DFlashNetwork:
    """One draft's weights, with keys and values of the context in slots 1 to `slots`."""

    first_row = scratch_slots = 0
    mapping = layer_states = None
    sees_paths = False

    def __init__(
        self, checkpoint: Checkpoint, target: TargetWeights, slots: int, rope_theta: float | None = None
    ) -> None:
        """Raises `CheckpointError` if the checkpoint is not a DFlash draft for this target."""
        decoder = head_config(checkpoint, rope_theta)
        weights = HeadWeights(checkpoint, target, RENAMES)
        h, eps = int(decoder.hidden_size), float(decoder.rms_norm_eps)
        mask = None
        if "mask_embedding" in weights:
            mask = weights.take("mask_embedding", *weights.shape("mask_embedding"))
        rows = weights.shape("embed_tokens.weight")[0] if "embed_tokens.weight" in weights else target.vocabulary_size
        self.config = DFlashConfig.of(checkpoint, target, decoder, rows if mask is None else None)
        name, layers = checkpoint.folder.name, self.config.layers
        self.description = head_description("dflash", name, target, layers, target.max_model_len)
        self.slots, self.state_size, self.tokens_per_pass = slots, target.hidden_size, self.config.tokens_per_pass
        self.ids = weights.target_ids()
        heads = Heads.of(decoder)
        self._cache = KVCache(int(decoder.num_hidden_layers), slots, heads, target.dtype, target.device)
        positions = target.max_model_len + self.config.block
        tables = head_rotary(decoder, positions, target.device)
        self._rotary = RotaryEmbedding(tables, torch.empty(1, dtype=target.dtype, device=target.device))
        self._fc = Linear(weights.take("fc.weight", h, len(self.config.layers) * target.hidden_size))
        self._context_norm, self._norm = (RMSNorm(weights.take(f"{n}.weight", h), eps) for n in ("hidden_norm", "norm"))
        kinds = zip(llama_layers(weights, decoder, h), self.config.windows, self.config.causal, strict=True)
        self._layers = [
            _DFlashLayer(layer, heads, eps, window=window, causal=causal) for layer, window, causal in kinds
        ]
        self._embedding = weights.embedding(h)
        output = weights.output(h, self.ids)
        self._output = Linear(output) if isinstance(output, Tensor) else output
        self._mask = self._embedding[self.config.mask_token] if mask is None else mask.reshape(h)

    def run(self, context: ContextSpans, requested: RequestedPasses, free: Sequence[int]) -> Tensor:
        if context:
            states = [state for request, span in context for state in request.take_states(len(span))]
            positions = [i for _, span in context for i in span]
            slots = [request.slot_table.slots[i] for request, span in context for i in span]
            self.add_context(torch.stack(states), positions, slots)
        if not requested:
            return torch.empty(0)
        blocks = self.predict_blocks([(each.tokens[-1], each.slot_table.slots[:-1]) for each, _ in requested])
        return torch.cat([block[:count] for block, (_, count) in zip(blocks, requested, strict=True)])

    def add_context(self, states: Tensor, positions: Sequence[int], slots: Sequence[int]) -> None:
        """Compute keys and values of these positions from the target's states [n, layers, H], of any dtype."""
        context = self._context_norm(self._fc(states.flatten(1).to(self._cache.data)))
        cos_sin = self._rotary(self._integers(positions))
        slots_n = self._integers(slots)
        for layer, cache in zip(self._layers, self._cache.data, strict=True):
            cache.index_copy_(0, slots_n, layer.keys_and_values(context, cos_sin))

    def predict_blocks(self, blocks: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Logits [blocks, tokens per pass, columns]. A block: its root and the slots of all positions before it."""
        size = self.config.block
        starts = self._integers([len(slots) for _, slots in blocks])
        cos_sin = self._rotary((starts.unsqueeze(1) + torch.arange(size, device=starts.device)).flatten())
        paths = [self._integers(slots) for _, slots in blocks]
        roots = self._embedding[self._integers([root for root, _ in blocks])].unsqueeze(1)
        x = torch.cat((roots, self._mask.expand(len(blocks), size - 1, -1)), 1).flatten(0, 1)  # [blocks * size, h]
        for layer, cache in zip(self._layers, self._cache.data, strict=True):
            x = layer(x, cos_sin, cache, paths)
        final = self._norm(x).unflatten(0, (-1, size))[:, self.config.first_offset :]
        return self._output(final.flatten(0, 1)).view(len(blocks), self.config.tokens_per_pass, -1)

    def _integers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._cache.device)


class _DFlashLayer:
    """One decoder layer over blocks. Its attention also sees the context."""

    def __init__(self, weights: DecoderLayerWeights, heads: Heads, eps: float, *, window: int, causal: bool) -> None:
        assert weights.input_norm is not None
        assert weights.inner_norm is not None
        self._heads, self._window, self._causal = heads, window, causal
        self._input_norm, self._inner_norm = RMSNorm(weights.input_norm, eps), RMSNorm(weights.inner_norm, eps)
        self._query = Linear.of_parts((weights.query, weights.query_bias))
        self._key_value = Linear.of_parts((weights.key, weights.key_bias), (weights.value, weights.value_bias))
        self._out = Linear.of_parts((weights.output, weights.output_bias))
        self._query_norm = None if weights.query_norm is None else RMSNorm(weights.query_norm, eps)
        self._key_norm = None if weights.key_norm is None else RMSNorm(weights.key_norm, eps)
        self._mlp = SwiGLU(Linear(weights.gate, weights.up), Linear(weights.down))

    def keys_and_values(self, x: Tensor, cos_sin: CosSin) -> Tensor:
        """Keys and values [n, 2 * K, D], in the cache's layout."""
        key, value = self._key_value(x).unflatten(-1, (-1, self._heads.head_size)).chunk(2, 1)
        return torch.cat((apply_rotary(key if self._key_norm is None else self._key_norm(key), cos_sin), value), 1)

    def __call__(self, x: Tensor, cos_sin: CosSin, cache: Tensor, paths: Sequence[Tensor]) -> Tensor:
        y = self._input_norm(x)
        query = self._query(y).unflatten(-1, (-1, self._heads.head_size))
        query = apply_rotary(query if self._query_norm is None else self._query_norm(query), cos_sin)
        own = self.keys_and_values(y, cos_sin)
        blocks = zip(query.chunk(len(paths)), own.chunk(len(paths)), paths, strict=True)
        # Without a window this is the whole path: [-0:].
        attended = [self._attend(q, torch.cat((cache[path[-self._window :]], kv))) for q, kv, path in blocks]
        x = x + self._out(torch.cat(attended))
        return x + self._mlp(self._inner_norm(x))

    def _attend(self, query: Tensor, kv: Tensor) -> Tensor:
        """One block [B, heads, D] over its context and itself [n + B, 2 * K, D] → [B, heads * D]."""
        key, value = kv.chunk(2, 1)
        count, total = len(query), len(kv)
        mask = query.new_ones(count, total, dtype=torch.bool).tril(total - count) if self._causal else None
        q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
        out: Tensor = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


def build(inputs: MethodInputs) -> Speculator:
    network = DFlashNetwork(inputs.checkpoint, inputs.target, inputs.engine.slot_count, inputs.config.rope_theta)
    return NetworkSpeculator(Blocks(network, inputs.limits))


def target_layers(inputs: MethodInputs) -> Sequence[int]:
    return configured_layers(inputs.checkpoint, inputs.target)


def matches(checkpoint: Checkpoint) -> bool:
    return "dflash_config" in checkpoint.config


def complete(config: SpeculativeConfig, checkpoint: Checkpoint) -> SpeculativeConfig:
    """The configuration with as many draft tokens as a block has, unless the user sets their number."""
    if "num_speculative_tokens" in config.model_fields_set:
        return config
    return config.model_copy(update={"num_speculative_tokens": min(tokens_per_pass(checkpoint), MAX_DEPTH)})

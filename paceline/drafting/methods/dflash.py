"""DFlash (Chen et al. 2025): a block of mask tokens after the root, predicted in one pass over the target's states.

    c      = norm(fc([states of several layers]))        one for each position before the root
    x      = embedding of [root, m, m, ...]              the block, at the positions from the root's on
    x      = x + attention(norm(x))                      over keys and values of all c and of the whole block
    x      = x + mlp(norm(x))
    logits = the target's output matrix of norm(x)       a mask token's logits are for its own position

Keys and values of c depend only on the target's states and are kept; those of a block are not. Relatives (`dflash2`,
`dspark`, `xpress`) correct the logits of a position by the guesses before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config import MAX_DEPTH, SpeculativeConfig
from paceline.drafting.block import Blocks, ContextSpans, DraftBlock, PathScorer, RequestedPasses
from paceline.drafting.heads.block_convolution import BlockConvolution
from paceline.drafting.heads.dflash_config import DFlashConfig, configured_layers, relative_of, tokens_per_pass
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


ScorerBuilder: TypeAlias = Callable[[Checkpoint, HeadWeights, "DFlashNetwork"], PathScorer | None]
"""Takes the weights that correct logits. The network has all but its output."""
UNUSED = ("t2d", "confidence_head.proj.weight", "confidence_head.proj.bias")
"""DSpark's confidence head estimates which guesses are accepted. Here the guesses' own probabilities do."""


class DFlashNetwork:
    """One draft's weights, with keys and values of the context in slots 1 to `slots`."""

    first_row = scratch_slots = 0
    mapping = layer_states = None

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: TargetWeights,
        slots: int,
        rope_theta: float | None = None,
        method: str = "dflash",
        build_scorer: ScorerBuilder | None = None,
    ) -> None:
        """Raises `CheckpointError` if the checkpoint is not a draft of this method for this target."""
        decoder = head_config(checkpoint, rope_theta)
        weights = HeadWeights(checkpoint, target, RENAMES)
        h, eps = int(decoder.hidden_size), float(decoder.rms_norm_eps)
        mask = None
        if "mask_embedding" in weights:
            mask = weights.take("mask_embedding", *weights.shape("mask_embedding"))
        rows = weights.shape("embed_tokens.weight")[0] if "embed_tokens.weight" in weights else target.vocabulary_size
        self.config = DFlashConfig.of(checkpoint, target, decoder, rows if mask is None else None, method)
        name, layers = checkpoint.folder.name, self.config.layers
        self.description = head_description(method, name, target, layers, target.max_model_len)
        self.width = h
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
            _DFlashLayer(layer, heads, eps, self._convolutions(weights, n), window=window, causal=causal)
            for n, (layer, window, causal) in enumerate(kinds)
        ]
        self._embedding = weights.embedding(h)
        output = weights.output(h, self.ids)
        self._output = Linear(output) if isinstance(output, Tensor) else output
        self._mask = self._embedding[self.config.mask_token] if mask is None else mask.reshape(h)
        self.columns = target.vocabulary_size if self.ids is None else len(self.ids)
        self.scorer = None if build_scorer is None else build_scorer(checkpoint, weights, self)
        self.sees_paths = self.scorer is not None
        weights.refuse_unused(f"{method} drafts", but=UNUSED)

    def run(self, context: ContextSpans, requested: RequestedPasses, free: Sequence[int]) -> Sequence[DraftBlock]:
        if context:
            states = [state for request, span in context for state in request.take_states(len(span))]
            positions = [i for _, span in context for i in span]
            slots = [request.slot_table.slots[i] for request, span in context for i in span]
            self.add_context(torch.stack(states), positions, slots)
        if not requested:
            return []
        finals = self.block_states([(each.tokens[-1], each.slot_table.slots[:-1]) for each, _ in requested])
        return [
            DraftBlock(logits[:count], final, (request.tokens[-2:][0], request.tokens[-1]))
            for (request, count), logits, final in zip(requested, self.logits(finals), finals, strict=True)
        ]

    def add_context(self, states: Tensor, positions: Sequence[int], slots: Sequence[int]) -> None:
        """Compute keys and values of these positions from the target's states [n, layers, H], of any dtype."""
        context = self._context_norm(self._fc(states.flatten(1).to(self._cache.data)))
        cos_sin = self._rotary(self._integers(positions))
        slots_n = self._integers(slots)
        for layer, cache in zip(self._layers, self._cache.data, strict=True):
            cache.index_copy_(0, slots_n, layer.keys_and_values(context, cos_sin))

    def predict_blocks(self, blocks: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Logits [blocks, tokens per pass, columns]. `blocks`: see `block_states`."""
        return self.logits(self.block_states(blocks))

    def block_states(self, blocks: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Normed outputs of the last layer [blocks, positions, h]. A block: its root and the slots of all positions
        before it."""
        size = self.config.block
        starts = self._integers([len(slots) for _, slots in blocks])
        cos_sin = self._rotary((starts.unsqueeze(1) + torch.arange(size, device=starts.device)).flatten())
        paths = [self._integers(slots) for _, slots in blocks]
        roots = self._embedding[self._integers([root for root, _ in blocks])].unsqueeze(1)
        x = torch.cat((roots, self._mask.expand(len(blocks), size - 1, -1)), 1).flatten(0, 1)  # [blocks * size, h]
        for layer, cache in zip(self._layers, self._cache.data, strict=True):
            x = layer(x, cos_sin, cache, paths)
        return self._norm(x).view(len(blocks), size, -1)

    def logits(self, states: Tensor) -> Tensor:
        """States of whole blocks [blocks, positions, h] → [blocks, tokens per pass, columns]."""
        predicting = states[:, self.config.first_offset :]
        return self._output(predicting.flatten(0, 1)).view(*predicting.shape[:2], -1)

    def _convolutions(self, weights: HeadWeights, layer: int) -> Sequence[BlockConvolution | None]:
        """Around the attention and around the MLP of a layer, if there are any."""
        names = [f"layers.{layer}.{part}_conv" for part in ("attention", "mlp")]
        if f"{names[0]}.base_kernel" not in weights:
            return None, None
        return [BlockConvolution(weights, name, self.width, self.config.block) for name in names]

    def _integers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._cache.device)


class _DFlashLayer:
    """One decoder layer over blocks. Its attention also sees the context."""

    def __init__(
        self,
        weights: DecoderLayerWeights,
        heads: Heads,
        eps: float,
        convolutions: Sequence[BlockConvolution | None],
        *,
        window: int,
        causal: bool,
    ) -> None:
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
        self._around_attention, self._around_mlp = convolutions

    def keys_and_values(self, x: Tensor, cos_sin: CosSin) -> Tensor:
        """Keys and values [n, 2 * K, D], in the cache's layout."""
        key, value = self._key_value(x).unflatten(-1, (-1, self._heads.head_size)).chunk(2, 1)
        return torch.cat((apply_rotary(key if self._key_norm is None else self._key_norm(key), cos_sin), value), 1)

    def __call__(self, x: Tensor, cos_sin: CosSin, cache: Tensor, paths: Sequence[Tensor]) -> Tensor:
        def attention(y: Tensor) -> Tensor:
            return self._attention(y, cos_sin, cache, paths)

        around = self._around_attention
        y = self._input_norm(x)
        x = x + (attention(y) if around is None else around.around(attention, y))
        y = self._inner_norm(x)
        return x + (self._mlp(y) if self._around_mlp is None else self._around_mlp.around(self._mlp, y))

    def _attention(self, y: Tensor, cos_sin: CosSin, cache: Tensor, paths: Sequence[Tensor]) -> Tensor:
        query = self._query(y).unflatten(-1, (-1, self._heads.head_size))
        query = apply_rotary(query if self._query_norm is None else self._query_norm(query), cos_sin)
        own = self.keys_and_values(y, cos_sin)
        blocks = zip(query.chunk(len(paths)), own.chunk(len(paths)), paths, strict=True)
        # Without a window this is the whole path: [-0:].
        attended = [self._attend(q, torch.cat((cache[path[-self._window :]], kv))) for q, kv, path in blocks]
        return self._out(torch.cat(attended))

    def _attend(self, query: Tensor, kv: Tensor) -> Tensor:
        """One block [B, heads, D] over its context and itself [n + B, 2 * K, D] → [B, heads * D]."""
        key, value = kv.chunk(2, 1)
        count, total = len(query), len(kv)
        mask = query.new_ones(count, total, dtype=torch.bool).tril(total - count) if self._causal else None
        q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
        out: Tensor = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


def build(inputs: MethodInputs) -> Speculator:
    return build_block_draft(inputs)


def build_block_draft(inputs: MethodInputs, build_scorer: ScorerBuilder | None = None) -> Speculator:
    """Of the configured method, which is DFlash or a relative."""
    config, slots = inputs.config, inputs.engine.slot_count
    network = DFlashNetwork(inputs.checkpoint, inputs.target, slots, config.rope_theta, config.method, build_scorer)
    return NetworkSpeculator(Blocks(network, inputs.limits))


def target_layers(inputs: MethodInputs) -> Sequence[int]:
    return configured_layers(inputs.checkpoint, inputs.target, inputs.config.method)


def matches(checkpoint: Checkpoint) -> bool:
    return "dflash_config" in checkpoint.config and relative_of(checkpoint) == "dflash"


def complete(config: SpeculativeConfig, checkpoint: Checkpoint) -> SpeculativeConfig:
    """The configuration with as many draft tokens as a block has, unless the user sets their number; and with `dflash2`
    for a checkpoint of that method, which vLLM and SGLang call `dflash`, too."""
    update: dict[str, Any] = {}
    if config.method == "dflash" and relative_of(checkpoint) == "dflash2":
        update["method"] = "dflash2"
    if "num_speculative_tokens" not in config.model_fields_set:
        update["num_speculative_tokens"] = min(tokens_per_pass(checkpoint), MAX_DEPTH)
    return config.model_copy(update=update)

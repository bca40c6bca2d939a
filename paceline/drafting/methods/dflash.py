"""DFlash (Chen et al. 2025): a block of masks behind the root, filled in at once over the target's hidden states.

    c      = norm(fc([states of several layers]))        one for each position before the root
    x      = embedding of [root, m, m, ...]              the block, at the positions from the root's on
    x      = x + attention(norm(x))                      over keys and values of all c and of the whole block
    x      = x + mlp(norm(x))
    logits = the target's output matrix of norm(x)       a mask's are those of the token in its own place

Keys and values of c depend on nothing but the target's states and are kept; those of a block never are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.core.sampling import History
from paceline.core.tree import TokenTree
from paceline.drafting.heads.dflash_config import DFlashConfig
from paceline.drafting.heads.head_config import head_config
from paceline.drafting.heads.head_vocabulary import draft_to_target_ids, head_embedding, head_output
from paceline.drafting.heads.head_weights import HeadWeights
from paceline.drafting.parallel_drafts import ContextSpans, HiddenStateDraft, ParallelSpeculator, RequestedPasses
from paceline.drafting.speculator import Opening
from paceline.model.attention import Heads, KVCache
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.layer_weights import RotaryTables
from paceline.model.layers import CosSin, Linear, RMSNorm, RotaryEmbedding, SwiGLU, apply_rotary
from paceline.model.target_weights import TargetWeights


class DFlashSpeculator(ParallelSpeculator[HiddenStateDraft]):
    """Method `dflash`."""

    method = "dflash"

    def __init__(
        self, network: DFlashNetwork, lent: TargetWeights, tree_width: int, least_path_probability: float = 0.02
    ) -> None:
        """See `ParallelSpeculator`."""
        columns = lent.vocabulary_size if network.ids is None else len(network.ids)
        super().__init__(network.slots, network.kind.ahead, min(tree_width, columns), least_path_probability)
        self.model = network.model
        self.vocabulary_fingerprint = lent.fingerprint
        self.vocabulary_size = lent.vocabulary_size
        self.hidden_state_layers = tuple(network.kind.layers)
        self.position_limit = lent.max_model_len
        self._network = network

    def begin(self, opening: Opening, tree: TokenTree, history: History, floor: float) -> HiddenStateDraft:
        return HiddenStateDraft(opening, list(opening.tokens), tree, history, self.position_limit, floor)

    def run_pass(
        self, context: ContextSpans[HiddenStateDraft], asked: RequestedPasses[HiddenStateDraft]
    ) -> tuple[Tensor, Tensor | None]:
        if context:
            states = [state for draft, span in context for state in draft.states.take(len(span))]
            positions = [i for _, span in context for i in span]
            slots = [draft.slot_table.slots[i] for draft, span in context for i in span]
            self._network.add_context(torch.stack(states), positions, slots)
        if not asked:
            return torch.empty(0), None
        blocks = self._network.predict_blocks([(draft.tokens[-1], draft.slot_table.slots[:-1]) for draft, _ in asked])
        return torch.cat([block[:count] for block, (_, count) in zip(blocks, asked, strict=True)]), self._network.ids


class DFlashNetwork:
    """One draft's weights, over keys and values of the context in slots 1 to `slots`."""

    def __init__(
        self, checkpoint: Checkpoint, lent: TargetWeights, slots: int, rope_theta: float | None = None
    ) -> None:
        """Raises `CheckpointError` if this is no DFlash draft for this target."""
        config = head_config(checkpoint, rope_theta)
        weights = HeadWeights(checkpoint, lent, _normalised_name)
        h, eps = int(config.hidden_size), float(config.rms_norm_eps)
        self.model = checkpoint.folder.name
        self.kind = DFlashConfig.of(checkpoint, lent, config)
        self.slots = slots
        self.ids = draft_to_target_ids(weights, checkpoint, lent)
        heads = Heads.of(config)
        self._cache = KVCache(int(config.num_hidden_layers), slots + 1, heads, lent.dtype, lent.device)
        tables = RotaryTables.of(LlamaRotaryEmbedding(config).to(lent.device), lent.max_model_len + self.kind.block)
        self._rotary = RotaryEmbedding(tables, torch.empty(1, dtype=lent.dtype, device=lent.device))
        self._fc = Linear(weights.take("fc.weight", h, len(self.kind.layers) * lent.hidden_size))
        self._context_norm, self._norm = (RMSNorm(weights.take(f"{n}.weight", h), eps) for n in ("hidden_norm", "norm"))
        self._layers = [
            _DFlashLayer(weights, n, config, heads, window=window, causal=causal)
            for n, (window, causal) in enumerate(zip(self.kind.windows, self.kind.causal, strict=True))
        ]
        self._embedding = head_embedding(weights, lent, h)
        output = head_output(weights, lent, h, self.ids)
        self._output = Linear(output) if isinstance(output, Tensor) else output
        self._masks = _masks(weights, checkpoint, lent, self.kind, h)

    def add_context(self, states: Tensor, positions: Sequence[int], slots: Sequence[int]) -> None:
        """Take in the target's states [n, layers, H] of these positions, wherever they come from."""
        context = self._context_norm(self._fc(states.flatten(1).to(self._cache.data)))
        turn = self._rotary(self._integers(positions))
        where = self._integers(slots)
        for layer, cache in zip(self._layers, self._cache.data, strict=True):
            cache.index_copy_(0, where, layer.keys_and_values(context, turn))

    def predict_blocks(self, blocks: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Logits [blocks, laws, columns]. Of each block: the root, and the slots of all positions before it."""
        size = self.kind.block
        starts = self._integers([len(slots) for _, slots in blocks])
        turn = self._rotary((starts.unsqueeze(1) + torch.arange(size, device=starts.device)).flatten())
        paths = [self._integers(slots) for _, slots in blocks]
        x = self._begin([root for root, _ in blocks])
        for layer, cache in zip(self._layers, self._cache.data, strict=True):
            x = layer(x, turn, cache, paths)
        final = self._norm(x).unflatten(0, (-1, size))[:, self.kind.first_offset :]
        logits = self._output(final.flatten(0, 1))
        return logits.view(len(blocks), self.kind.ahead, -1)

    def _begin(self, roots: Sequence[int]) -> Tensor:
        """Embeddings of the blocks, one after the other, [blocks * size, h]."""
        root = self._embedding[self._integers(roots)].unsqueeze(1)
        masks = self._embedding[self.kind.mask_token] if self._masks is None else self._masks
        return torch.cat((root, masks.expand(len(roots), self.kind.block - 1, -1)), 1).flatten(0, 1)

    def _integers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._cache.device)


class _DFlashLayer:
    """One decoder layer over blocks. Its attention reaches the context as well."""

    def __init__(
        self, weights: HeadWeights, index: int, config: Any, heads: Heads, *, window: int, causal: bool
    ) -> None:
        name, h, eps = f"layers.{index}", int(config.hidden_size), float(config.rms_norm_eps)
        queries, keys = heads.kv_heads * heads.queries_per_kv * heads.head_size, heads.kv_heads * heads.head_size
        self._heads, self._window, self._causal = heads, window, causal
        self._before = RMSNorm(weights.take(f"{name}.input_layernorm.weight", h), eps)
        self._query = _projection(weights, f"{name}.self_attn", {"q_proj": queries}, h)
        self._key_value = _projection(weights, f"{name}.self_attn", {"k_proj": keys, "v_proj": keys}, h)
        self._out = _projection(weights, f"{name}.self_attn", {"o_proj": h}, queries)
        self._query_norm, self._key_norm = (
            None if norm is None else RMSNorm(norm, eps)
            for norm in (
                weights.take_optional(f"{name}.self_attn.{n}_norm.weight", heads.head_size) for n in ("q", "k")
            )
        )
        inner = int(config.intermediate_size)
        gate, up = (weights.take(f"{name}.mlp.{each}_proj.weight", inner, h) for each in ("gate", "up"))
        down = weights.take(f"{name}.mlp.down_proj.weight", h, inner)
        self._into_mlp = RMSNorm(weights.take(f"{name}.post_attention_layernorm.weight", h), eps)
        self._mlp = SwiGLU(Linear(gate, up), Linear(down))

    def keys_and_values(self, x: Tensor, turn: CosSin) -> Tensor:
        """Keys and values [n, 2 * K, D], as the cache has them."""
        key, value = self._key_value(x).unflatten(-1, (-1, self._heads.head_size)).chunk(2, 1)
        return torch.cat((apply_rotary(key if self._key_norm is None else self._key_norm(key), turn), value), 1)

    def __call__(self, x: Tensor, turn: CosSin, cache: Tensor, paths: Sequence[Tensor]) -> Tensor:
        y = self._before(x)
        query = self._query(y).unflatten(-1, (-1, self._heads.head_size))
        query = apply_rotary(query if self._query_norm is None else self._query_norm(query), turn)
        own = self.keys_and_values(y, turn)
        each = zip(query.chunk(len(paths)), own.chunk(len(paths)), paths, strict=True)
        # Without a window this is the whole path: [-0:].
        attended = [self._attend(q, torch.cat((cache[path[-self._window :]], kv))) for q, kv, path in each]
        x = x + self._out(torch.cat(attended))
        return x + self._mlp(self._into_mlp(x))

    def _attend(self, query: Tensor, kv: Tensor) -> Tensor:
        """One block [B, heads, D] to its context and itself [n + B, 2 * K, D] → [B, heads * D]."""
        key, value = kv.chunk(2, 1)
        count, total = len(query), len(kv)
        mask = query.new_ones(count, total, dtype=torch.bool).tril(total - count) if self._causal else None
        q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
        out: Tensor = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


def _projection(weights: HeadWeights, name: str, sizes: dict[str, int], width: int) -> Linear:
    """These, one below the other, with biases if there are any."""
    biased = [each for each in sizes if f"{name}.{each}.bias" in weights]
    return Linear(
        *(weights.take(f"{name}.{each}.weight", size, width) for each, size in sizes.items()),
        biases=[weights.take(f"{name}.{each}.bias", sizes[each]) for each in biased],
    )


def _masks(
    weights: HeadWeights, checkpoint: Checkpoint, lent: TargetWeights, kind: DFlashConfig, h: int
) -> Tensor | None:
    """[h], what a mask looks like if it has no row in the embedding."""
    if "mask_embedding" in weights:
        return weights.take("mask_embedding", *weights.shape("mask_embedding")).reshape(h)
    rows = weights.shape("embed_tokens.weight")[0] if "embed_tokens.weight" in weights else lent.vocabulary_size
    if kind.mask_token >= rows:
        raise CheckpointError(f"mask_token_id {kind.mask_token} in {checkpoint} is no token of {lent.name}")
    return None


def _normalised_name(name: str) -> str:
    """The name of a tensor as the original format has it."""
    name = name.removeprefix("model.")
    return name.replace("encoder.fc.", "fc.").replace("encoder.output_norm_enc.", "hidden_norm.")

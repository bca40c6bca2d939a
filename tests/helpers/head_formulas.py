"""What draft heads compute, as their papers and reference programs have it: whole sequences without a cache.

Tensors go by the names of the original uploads. A row of an EAGLE head has the token at position i + 1 and the target's
state of position i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
ZERO = torch.zeros(())


@dataclass(frozen=True)
class Shape:
    """Of one decoder layer, with what its configuration has in addition to the sizes."""

    heads: int = 4
    kv_heads: int = 2
    eps: float = 1e-6
    theta: float = 10000.0
    linear: float = 1.0
    """Positions are divided by this."""
    frequencies: Tensor | None = None
    """[head size / 2]: instead of those of `theta`."""
    window: int = 0
    """Positions that a row sees, its own included; 0: all."""


LLAMA = Shape()


def rms_norm(x: Tensor, weight: Tensor, eps: float = LLAMA.eps) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: Tensor, positions: Tensor, shape: Shape = LLAMA) -> Tensor:
    """[n, heads, D]: number j of a head turns with number j + D / 2, by its position times their frequency."""
    half = x.shape[-1] // 2
    regular = shape.theta ** -(torch.arange(half, dtype=x.dtype) / half)
    angle = positions[:, None, None] / shape.linear * (regular if shape.frequencies is None else shape.frequencies)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)


def attended(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Softmax attention of [m, heads, D] over [n, heads of keys, D]: [m, heads * D]. `seen`: a mask [m, n]."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def causal(rows: int, window: int = 0) -> Tensor:
    seen = torch.ones(rows, rows, dtype=torch.bool).tril()
    return seen.triu(1 - window) if window else seen


def projected(x: Tensor, tensors: Tensors, name: str, heads: int, eps: float = LLAMA.eps) -> Tensor:
    """[n, heads, D]: with the bias and the norm of heads that there are tensors for."""
    y = (x @ tensors[f"{name}_proj.weight"].T + tensors.get(f"{name}_proj.bias", ZERO)).view(len(x), heads, -1)
    norm = tensors.get(f"{name}_norm.weight")
    return y if norm is None else rms_norm(y, norm, eps)


def self_attention(x: Tensor, tensors: Tensors, name: str, shape: Shape) -> Tensor:
    """Every row over itself and those before, as far as the window goes."""
    positions = torch.arange(len(x))
    query = rotated(projected(x, tensors, f"{name}.q", shape.heads, shape.eps), positions, shape)
    key = rotated(projected(x, tensors, f"{name}.k", shape.kv_heads, shape.eps), positions, shape)
    out = attended(query, key, projected(x, tensors, f"{name}.v", shape.kv_heads), causal(len(x), shape.window))
    return out @ tensors[f"{name}.o_proj.weight"].T + tensors.get(f"{name}.o_proj.bias", ZERO)


def mlp(x: Tensor, tensors: Tensors, name: str) -> Tensor:
    gate, up = (x @ tensors[f"{name}.{which}_proj.weight"].T for which in ("gate", "up"))
    return (gate * gate.sigmoid() * up) @ tensors[f"{name}.down_proj.weight"].T


def second_half(x: Tensor, tensors: Tensors, name: str, eps: float = LLAMA.eps) -> Tensor:
    return x + mlp(rms_norm(x, tensors[f"{name}.post_attention_layernorm.weight"], eps), tensors, f"{name}.mlp")


def plain_layer(x: Tensor, tensors: Tensors, name: str, shape: Shape) -> Tensor:
    """A Llama's; without a norm before the attention if there is no tensor for it."""
    norm = tensors.get(f"{name}.input_layernorm.weight")
    into = x if norm is None else rms_norm(x, norm, shape.eps)
    return second_half(x + self_attention(into, tensors, f"{name}.self_attn", shape), tensors, name, shape.eps)


class Formula(Protocol):
    """A head that guesses token by token."""

    @property
    def embedding(self) -> Tensor:
        """The target's, [V, H]."""
        ...

    def encode(self, states: Tensor) -> Tensor:
        """The target's states [n, layers, H] as features [n, h]."""
        ...

    def __call__(self, tokens: Sequence[int], features: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [n, columns] of what follows each token, and the features of the next rows, [n, h]."""
        ...


@dataclass(frozen=True)
class Eagle1:
    """EAGLE-1 and -2, over a target's matrices [V, h]."""

    tensors: Tensors
    embedding: Tensor
    output: Tensor
    shape: Shape = LLAMA

    def encode(self, states: Tensor) -> Tensor:
        return states[:, 0]

    def __call__(self, tokens: Sequence[int], features: Tensor) -> tuple[Tensor, Tensor]:
        t, eps = self.tensors, self.shape.eps
        e = t.get("embed_tokens.weight", self.embedding)[list(tokens)]
        if "embed_layernorm.weight" in t:
            e = rms_norm(e, t["embed_layernorm.weight"], eps)
        x = torch.cat((e, features), -1) @ t["fc.weight"].T + t.get("fc.bias", ZERO)
        x = plain_layer(x, t, "layers.0", self.shape)
        final = rms_norm(x, t["lm_head_layernorm.weight"], eps) if "lm_head_layernorm.weight" in t else x
        return final @ self.output.T, x


@dataclass(frozen=True)
class Eagle3:
    """EAGLE-3, over a target's matrices [V, H], which are used where the head has none of its own."""

    tensors: Tensors
    embedding: Tensor
    output: Tensor
    shape: Shape = LLAMA
    ids: Sequence[int] | None = None
    """The target's token of each column, where the head has no output matrix of its own."""
    norm_before_residual: bool = False
    norm_output: bool = False
    logit_scale: float = 1.0
    others: Sequence[str] = field(default_factory=list)
    """Names of the layers after the first."""

    def encode(self, states: Tensor) -> Tensor:
        t, eps = self.tensors, self.shape.eps
        parts = list(states.unbind(1))
        if "fc_norm.0.weight" in t:
            parts = [rms_norm(part, t[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)]
        a = torch.cat(parts, -1)
        if "input_norm.weight" in t:
            a = rms_norm(a, t["input_norm.weight"], eps)
        return a @ t["fc.weight"].T if "fc.weight" in t else a

    def __call__(self, tokens: Sequence[int], features: Tensor) -> tuple[Tensor, Tensor]:
        t, eps = self.tensors, self.shape.eps
        embedding = t.get("embed_tokens.weight", self.embedding)
        e = rms_norm(embedding[list(tokens)], t["midlayer.input_layernorm.weight"], eps)
        u = rms_norm(features, t["midlayer.hidden_norm.weight"], eps)
        x = u if self.norm_before_residual else features
        x = x + self_attention(torch.cat((e, u), -1), t, "midlayer.self_attn", self.shape)
        x = second_half(x, t, "midlayer", eps)
        for name in self.others:
            x = plain_layer(x, t, name, self.shape)
        final = rms_norm(x, t["norm.weight"], eps)
        matrix = t.get("lm_head.weight", self.output if self.ids is None else self.output[list(self.ids)])
        return final @ matrix.T * self.logit_scale, final if self.norm_output else x


def after(formula: Formula, tokens: Sequence[int], states: Tensor, path: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Of the last row of `tokens` and then of a path of guesses: logits and feature, one row after the other.

    `tokens` are all of a request; `states` [layers, H] of all but the last of them.
    """
    features = formula.encode(states)
    inputs = list(tokens[1:])
    logits, fed_back = formula(inputs, features)
    for guess in path:
        features = torch.cat((features, fed_back[-1:]))
        inputs.append(guess)
        logits, fed_back = formula(inputs, features)
    return logits[-1], fed_back[-1]


def peagle_logits(head: Eagle3, tokens: Sequence[int], states: Tensor, mask: int, ahead: int) -> Tensor:
    """[ahead, columns]: after the root and after each mask token, whose state is `mask_hidden`."""
    masks = head.tensors["mask_hidden"].view(1, *states.shape[1:]).expand(ahead - 1, -1, -1)
    inputs = [*tokens[1:], *[mask] * (ahead - 1)]
    return head(inputs, head.encode(torch.cat((states, masks))))[0][len(states) - 1 :]


@dataclass(frozen=True)
class DFlash:
    """A block of mask tokens behind the root, whose layers attend to the target's states and to each other."""

    tensors: Tensors
    embedding: Tensor
    output: Tensor
    mask: int
    block: int
    seen: Mapping[int, tuple[int, bool]] = field(default_factory=dict)
    """By layer (window, causal), where that is not (0, False)."""
    first: int = 1
    """The block's row that guesses first."""

    def logits(self, tokens: Sequence[int], states: Tensor) -> Tensor:
        """[block - first, columns]"""
        return self.finals(tokens, states)[self.first :] @ self.tensors.get("lm_head.weight", self.output).T

    def finals(self, tokens: Sequence[int], states: Tensor) -> Tensor:
        """[block, h]"""
        t, before = self.tensors, len(states)
        context = rms_norm(states.flatten(1) @ t["fc.weight"].T, t["hidden_norm.weight"])
        x = t.get("embed_tokens.weight", self.embedding)[[tokens[-1], *[self.mask] * (self.block - 1)]]
        if "mask_embedding" in t:
            x = torch.cat((x[:1], t["mask_embedding"].view(1, -1).expand(self.block - 1, -1)))
        positions = torch.arange(before + self.block)
        for n in range(2):
            name = f"layers.{n}.self_attn"
            y = rms_norm(x, t[f"layers.{n}.input_layernorm.weight"])
            y, kernel = convolved(y, t, f"layers.{n}.attention_conv")
            both = torch.cat((context, y))
            query = rotated(projected(y, t, f"{name}.q", LLAMA.heads), positions[before:])
            key = rotated(projected(both, t, f"{name}.k", LLAMA.kv_heads), positions)
            value = projected(both, t, f"{name}.v", LLAMA.kv_heads)
            out = attended(query, key, value, self._mask(n, positions, before))
            out = out @ t[f"{name}.o_proj.weight"].T + t.get(f"{name}.o_proj.bias", ZERO)
            x = x + convolved(out, t, f"layers.{n}.attention_conv", kernel)[0]
            y = rms_norm(x, t[f"layers.{n}.post_attention_layernorm.weight"])
            y, kernel = convolved(y, t, f"layers.{n}.mlp_conv")
            x = x + convolved(mlp(y, t, f"layers.{n}.mlp"), t, f"layers.{n}.mlp_conv", kernel)[0]
        return rms_norm(x, t["norm.weight"])

    def _mask(self, layer: int, positions: Tensor, before: int) -> Tensor:
        window, only_before = self.seen.get(layer, (0, False))
        mask = torch.ones(self.block, before + self.block, dtype=torch.bool)
        if window:
            mask[:, : max(0, before - window)] = False
        return mask & (positions <= positions[before:, None]) if only_before else mask


def convolved(x: Tensor, tensors: Tensors, name: str, kernel: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """DFlash2's convolution of a block [B, h] before a part of a layer, and the kernel [B, taps, groups] for the one
    after it, which takes it as `kernel`. Without tensors of this name nothing changes."""
    if f"{name}.base_kernel" not in tensors:
        return x, ZERO
    side, base = int(kernel is not None), tensors[f"{name}.base_kernel"]
    taps, h = base.shape[1:]
    both = (x @ tensors[f"{name}.kernel_projection.weight"].T).view(len(x), 2, taps, -1) if kernel is None else None
    own = kernel if both is None else both[:, 0]
    assert own is not None
    rows = []
    for p in range(len(x)):
        row = torch.zeros(h)
        for tap in range(min(taps, p + 1)):
            row = row + x[p - tap] * (base[side, tap] + own[p, tap].repeat_interleave(h // own.shape[-1]))
        rows.append(row)
    return torch.stack(rows), ZERO if both is None else both[:, 1]


def dflash2_logits(
    draft: DFlash, tokens: Sequence[int], states: Tensor, path: Sequence[int], candidates: int
) -> Tensor:
    """[columns] after a path of guesses: only of the position's likeliest `candidates`."""
    t, position = draft.tensors, draft.first + len(path)
    final = draft.finals(tokens, states)[position]
    logits = draft.logits(tokens, states)[len(path)]
    context = t["candidate_selector.predecessor_codebook"][[tokens[-1], *path][-1]]
    context = context * (t["candidate_selector.hidden_projection.weight"] @ final)
    scores = logits + t["candidate_selector.successor_codebook"] @ context
    return scores.masked_fill(logits < logits.sort(descending=True).values[candidates - 1], -torch.inf)


def dspark_logits(draft: DFlash, tokens: Sequence[int], states: Tensor, path: Sequence[int], kind: str) -> Tensor:
    """[columns] after a path of guesses. `kind`: of the Markov head."""
    t = {name.removeprefix("markov_head."): tensor for name, tensor in draft.tensors.items()}
    finals = draft.finals(tokens, states)
    embedded = t["markov_w1.weight"][[*[tokens[-1]] * (1 + draft.first), *path]]
    u, e, h = embedded[-1], embedded[-1], finals[draft.first + len(path)]
    if kind == "gated":
        u = torch.sigmoid(t["gate_proj.weight"] @ torch.cat((h, e)) + t["gate_proj.bias"]) * e
    if kind == "rnn":
        s = torch.zeros_like(e)
        for e, h in zip(embedded, finals, strict=False):
            z = t["joint_proj.weight"] @ torch.cat((s, e, h)) + t["joint_proj.bias"]
            gate, candidate, out = z.chunk(3)
            s = torch.sigmoid(gate) * s + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
            u = torch.tanh(out)
    return draft.logits(tokens, states)[len(path)] + t["markov_w2.weight"] @ u


def xpress_logits(draft: DFlash, tokens: Sequence[int], states: Tensor, path: Sequence[int]) -> Tensor:
    """[columns] after a path of guesses."""
    t = {name.removeprefix("refiner_head."): tensor for name, tensor in draft.tensors.items()}
    finals, position = draft.finals(tokens, states), draft.first + len(path)
    before = [*tokens[-2:][:1], tokens[-1], *path][1 - draft.first :]
    mean = t["down_g.weight"] @ finals.mean(0)
    a = [
        t["in_proj.weight"] @ torch.cat((t["down_h.weight"] @ final, mean, t["token_embed.weight"][token]))
        for final, token in zip(finals[: position + 1], before, strict=True)
    ]
    x = a[-1] + sum(t["mix_l"][:, position, q] * each for q, each in enumerate(a))
    gate = t["mlp_gate.weight"] @ x
    x = x + t["mlp_down.weight"] @ (gate * gate.sigmoid() * (t["mlp_up.weight"] @ x))
    return draft.logits(tokens, states)[len(path)] + t["readout.weight"] @ x


def medusa_logits(tensors: Tensors, state: Tensor, output: Tensor | None = None, count: int = 1) -> Tensor:
    """[heads, columns], by the original's names. `output`: of all heads, if it is one. `count`: layers per head."""
    logits = []
    for head in range(1 + max(int(name.split(".")[0]) for name in tensors)):
        z = state
        for layer in range(count):
            a = tensors[f"{head}.{layer}.linear.weight"] @ z + tensors[f"{head}.{layer}.linear.bias"]
            z = z + a / (1 + torch.exp(-a))
        logits.append((tensors[f"{head}.{count}.weight"] if output is None else output) @ z)
    return torch.stack(logits)


def mlp_logits(tensors: Tensors, state: Tensor, tokens: Sequence[int], trained: int, *, scale: bool = False) -> Tensor:
    """Logits after the root and each further token, [tokens, columns], by IBM's names. `trained`: n_predict."""
    ratio = embedding_ratio(trained, len(tensors["ln.0.weight"]))
    s = state / torch.sqrt((state * state).mean() + 1e-6) / math.sqrt(2) if scale else state
    logits = []
    for i, token in enumerate(tokens):
        s = tensors[f"proj.{i}.weight"] @ s + ratio * tensors[f"emb.{i}.weight"][token]
        s = gelu_of_norm(s, tensors, f"ln.{i}")
        logits.append(tensors[f"head.{i}.weight"] @ s)
    return torch.stack(logits)


def lstm_logits(tensors: Tensors, state: Tensor, tokens: Sequence[int], trained: int) -> Tensor:
    """The same for Arctic's `sum_lstm`."""
    inner = len(tensors["state_ln.0.weight"])
    ratio = embedding_ratio(trained, inner)
    s, c = state, torch.zeros(inner)
    logits = []
    for i, token in enumerate(tokens):
        a = tensors[f"projs.{min(i, 1)}.weight"] @ s + ratio * tensors["forget_emb.0.weight"][token].repeat(4)
        forget, into, out, candidate = a.split(inner)
        c = c * torch.sigmoid(forget) + gelu_of_norm(candidate, tensors, "cell_ln.0") * torch.sigmoid(into)
        s = gelu_of_norm(c, tensors, "state_ln.0") * torch.sigmoid(out)
        logits.append(tensors["head.0.weight"] @ s)
    return torch.stack(logits)


def embedding_ratio(trained: int, inner: int) -> float:
    state_weight = 0.5 ** (0.5 / trained)
    return math.sqrt((1 - state_weight**2) * (inner / 2)) / state_weight


def gelu_of_norm(x: Tensor, tensors: Tensors, name: str) -> Tensor:
    y = x / torch.sqrt((x * x).mean() + 1e-6) * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]
    return y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))

"""Multi-token-prediction layers as their families publish them: plain torch in float64, dense attention, no cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.helpers.head_formulas import ZERO, Tensors, attended, causal, mlp, rms_norm, rotated
from tests.helpers.mtp_checkpoints import EXPERTS, HEAD, HEADS, KV_RANK, LAYERS, NOPE, ROPE, VALUE

CHOSEN, SCALING = 3, 2.5
PREFIX = {
    "deepseek_v3": f"model.layers.{LAYERS}.",
    "glm4_moe": f"model.layers.{LAYERS}.",
    "mimo": "model.mtp_layers.0.",
    "qwen3": "mtp_layers.0.",
    "qwen3_next": "mtp.",
    "qwen3_5_text": "mtp.",
    "qwen3_5_moe_text": "mtp.",
}
OWN = {
    "deepseek_v3": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "glm4_moe": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "qwen3": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
}
QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")


class MtpFormula:
    """One layer. `tensors` by their published names; `embedding` and `output` are the target's matrices."""

    def __init__(self, family: str, tensors: Tensors, embedding: Tensor, output: Tensor, eps: float = 1e-5) -> None:
        prefix = PREFIX[family]
        self._all = {n.removeprefix(prefix): t.double() for n, t in tensors.items() if n.startswith(prefix)}
        self._layer = {name.removeprefix("layers.0."): tensor for name, tensor in self._all.items()}
        self._own = OWN.get(family, QWEN)
        self._family, self._eps = family, eps
        self.embedding, self._output = embedding.double(), output.double()
        self._shift = 1.0 if self._own is QWEN else 0.0  # zero-centred norms: 1 + weight

    def encode(self, states: Tensor) -> Tensor:
        return states[:, 0].double()

    def __call__(self, tokens: Sequence[int], features: Tensor) -> tuple[Tensor, Tensor]:
        token_norm, hidden_norm, projection, final_norm = (self._all[f"{name}.weight"] for name in self._own)
        embedded = self._norm(self.embedding[list(tokens)], token_norm)
        hidden = self._norm(features.double(), hidden_norm)
        parts = (hidden, embedded) if self._family == "mimo" else (embedded, hidden)
        x = torch.cat(parts, -1) @ projection.T
        x = x + self._attention(self._norm(x, self._layer["input_layernorm.weight"]))
        x = x + self._feed_forward(self._norm(x, self._layer["post_attention_layernorm.weight"]))
        y = self._norm(x, final_norm)
        return y @ self._output.T, y

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight + self._shift, self._eps)

    def _attention(self, x: Tensor) -> Tensor:
        return self._latent(x) if self._family == "deepseek_v3" else self._grouped(x)

    def _latent(self, x: Tensor) -> Tensor:
        """DeepSeek's: keys and values from a small latent, one rotated key for all heads, interleaved rotation."""
        rows = len(x)
        latent_q = x @ self._layer["self_attn.q_a_proj.weight"].T
        q = self._norm_latent("q", latent_q) @ self._layer["self_attn.q_b_proj.weight"].T
        q = q.view(rows, HEADS, NOPE + ROPE)
        latent, k_rotated = (x @ self._layer["self_attn.kv_a_proj_with_mqa.weight"].T).split([KV_RANK, ROPE], -1)
        kv = (self._norm_latent("kv", latent) @ self._layer["self_attn.kv_b_proj.weight"].T).view(rows, HEADS, -1)
        k, v = kv.split([NOPE, VALUE], -1)
        q_rotated = rotated_pairs(q[..., NOPE:])
        k_rotated = rotated_pairs(k_rotated.unsqueeze(1)).expand(-1, HEADS, -1)
        q, k = torch.cat((q[..., :NOPE], q_rotated), -1), torch.cat((k, k_rotated), -1)
        return attended(q, k, v, causal(rows)) @ self._layer["self_attn.o_proj.weight"].T

    def _norm_latent(self, which: str, x: Tensor) -> Tensor:
        return rms_norm(x, self._layer[f"self_attn.{which}_a_layernorm.weight"])  # its own eps, not the config's

    def _grouped(self, x: Tensor) -> Tensor:
        rows = len(x)
        q, k, v = (
            (x @ self._layer[f"{n}_proj.weight"].T + self._layer.get(f"{n}_proj.bias", ZERO)).view(rows, -1, HEAD)
            for n in ("self_attn.q", "self_attn.k", "self_attn.v")
        )
        gate = None
        if self._own is QWEN:  # the projection holds, head by head, a query and then its gate
            q, gate = q.view(rows, HEADS, 2, HEAD).unbind(2)
        if "self_attn.q_norm.weight" in self._layer:
            q = self._norm(q, self._layer["self_attn.q_norm.weight"])
            k = self._norm(k, self._layer["self_attn.k_norm.weight"])
        share = {"glm4_moe": 0.5, "mimo": 1.0, "qwen3": 1.0}.get(self._family, 0.25)
        q, k = rotated_part(q, int(HEAD * share)), rotated_part(k, int(HEAD * share))
        out = attended(q, k, v, causal(rows))
        if gate is not None:
            out = out * torch.sigmoid(gate.reshape(rows, -1))
        return out @ self._layer["self_attn.o_proj.weight"].T

    def _feed_forward(self, x: Tensor) -> Tensor:
        if "mlp.gate.weight" not in self._layer:
            return mlp(x, self._layer, "mlp")
        route = self._sigmoid_route if "mlp.gate.e_score_correction_bias" in self._layer else self._softmax_route
        out = torch.zeros_like(x)
        for row in range(len(x)):
            for expert, weight in route(x[row]):
                out[row] += weight * self._expert(expert, x[row])
        if "mlp.shared_expert_gate.weight" in self._layer:
            gate = torch.sigmoid(x @ self._layer["mlp.shared_expert_gate.weight"].T)
            return out + gate * mlp(x, self._layer, "mlp.shared_expert")
        return out + mlp(x, self._layer, "mlp.shared_experts")

    def _sigmoid_route(self, x: Tensor) -> list[tuple[int, float]]:
        """DeepSeek's: of two groups the one whose best two biased scores are larger, of it the best three."""
        scores = torch.sigmoid(self._layer["mlp.gate.weight"] @ x)
        biased = scores + self._layer["mlp.gate.e_score_correction_bias"]
        half = EXPERTS // 2
        totals = [biased[group * half : (group + 1) * half].sort(descending=True).values[:2].sum() for group in (0, 1)]
        group = 0 if totals[0] > totals[1] else 1
        members = sorted(range(group * half, (group + 1) * half), key=lambda e: -float(biased[e]))[:CHOSEN]
        total = sum(float(scores[e]) for e in members)
        return [(e, float(scores[e]) / total * SCALING) for e in members]

    def _softmax_route(self, x: Tensor) -> list[tuple[int, float]]:
        shares = torch.softmax(self._layer["mlp.gate.weight"] @ x, -1)
        members = sorted(range(EXPERTS), key=lambda e: -float(shares[e]))[:CHOSEN]
        total = sum(float(shares[e]) for e in members)
        return [(e, float(shares[e]) / total) for e in members]

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        if "mlp.experts.gate_up_proj" not in self._layer:
            return mlp(x, self._layer, f"mlp.experts.{expert}")
        gate, up = (self._layer["mlp.experts.gate_up_proj"][expert] @ x).chunk(2)
        return self._layer["mlp.experts.down_proj"][expert] @ (gate * torch.sigmoid(gate) * up)


def rotated_part(x: Tensor, size: int) -> Tensor:
    """Of each head the first `size` numbers are rotated."""
    return torch.cat((rotated(x[..., :size], torch.arange(len(x))), x[..., size:]), -1)


def rotated_pairs(x: Tensor) -> Tensor:
    """2i is rotated with 2i + 1."""
    halves = rotated(torch.cat((x[..., 0::2], x[..., 1::2]), -1), torch.arange(len(x)))
    return torch.stack(halves.chunk(2, -1), -1).flatten(-2)

"""The functions of transformers' layers that read a state, computed token by token from each row's own path.

Every such layer of transformers 5.24 calls one function of its module for a convolution, and one for a state: in this
module they have the same arguments. Sums have one order for each token, whatever else is in the pass.

Shapes: R rows, C channels, K taps, H heads, G groups of heads, N numbers of a state per channel. A layer's own batch
has one sequence: the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_EPS = 1e-6
"""Of keys' and queries' lengths, in transformers' functions."""


@dataclass(frozen=True, slots=True)
class Scan:
    """States [H, N, C] that each token changes, float32, and then reads: a state decays, and the outer product of a key
    and of a change is added to it. All tensors are float32.

    decays: [R, H, 1] or [R, H, N], factors; with `rates` [N, C], [R, 1, C]: a number's factor is exp(rate * decay).
    keys, queries: [R, G, N]. values: [R, H, C], the changes; with `betas` [R, H, 1], a change is that share of the
    difference between the value and what the key reads.
    """

    decays: Tensor
    keys: Tensor
    values: Tensor
    queries: Tensor
    betas: Tensor | None = None
    rates: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.values.shape[1], self.keys.shape[2], self.values.shape[2]

    def inputs(self) -> Tensor:
        """What changes a state, [R, n]."""
        return torch.cat([each.flatten(1) for each in self._parts()], 1)

    def update(self, state: Tensor, inputs: Tensor) -> Tensor:
        """The states [n, H, N, C] after n tokens from those before, and these tokens' inputs."""
        parts = self._parts()
        split = inputs.split([each[0].numel() for each in parts], 1)
        decays, keys, values, *betas = (some.view(-1, *each.shape[1:]) for some, each in zip(split, parts, strict=True))
        factors = decays.unsqueeze(-1) if self.rates is None else (self.rates * decays.unsqueeze(-2)).exp()
        keys, changes = self._of_heads(keys).unsqueeze(-1), values.unsqueeze(-2)
        state = state * factors
        if betas:
            changes = (changes - (state * keys).sum(-2, keepdim=True)) * betas[0].unsqueeze(-1)
        return state.add_(keys * changes)

    def read(self, state: Tensor, queries: Tensor) -> Tensor:
        """What n tokens read, [n, H, C]."""
        return (state * self._of_heads(queries).unsqueeze(-1)).sum(-2)

    def _parts(self) -> list[Tensor]:
        return [self.decays, self.keys, self.values, *([] if self.betas is None else [self.betas])]

    def _of_heads(self, groups: Tensor) -> Tensor:
        """[n, G, N] → [n, H, N]: heads of a group are adjacent."""
        repeats = self.values.shape[1] // groups.shape[1]
        return groups if repeats == 1 else groups.repeat_interleave(repeats, 1)


class Convolution(NamedTuple):
    """Of each channel alone: weight [C, K], bias [C]."""

    weight: Tensor
    bias: Tensor | None = None
    activation: str | None = None

    @property
    def taps(self) -> int:
        return self.weight.shape[-1]

    def apply(self, inputs: Tensor, before: Tensor) -> Tensor:
        """Of inputs [R, C] and those of the tokens before each row, [R, K - 1, C]: [R, C]."""
        before, weights = before.float(), self.weight.float()
        out = inputs.float() * weights[:, -1]
        for tap in range(self.taps - 1):
            out = out + before[:, tap] * weights[:, tap]
        if self.bias is not None:
            out = out + self.bias.float()
        return self.activated(out.to(inputs.dtype))

    def activated(self, out: Tensor) -> Tensor:
        from transformers.activations import ACT2FN

        activated: Tensor = out if self.activation is None else ACT2FN[self.activation](out)
        return activated


class StateReader(Protocol):
    """A pass through the states."""

    def convolve(self, inputs: Tensor, convolution: Convolution) -> Tensor:
        """Of inputs [R, C] and those of the tokens before each row, zeros before the first: [R, C]."""

    def scan(self, scan: Scan) -> Tensor:
        """What every row reads, [R, H, C]."""


def convolution(
    reader: StateReader,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """`causal_conv1d_fn`: hidden_states [1, C, R], weight [C, K] → [1, C, R]."""
    out = reader.convolve(hidden_states[0].T.contiguous(), Convolution(weight, bias, activation))
    return out.T.unsqueeze(0)


def delta_rule(
    reader: StateReader,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Gated delta rule (Yang et al. 2025), and Kimi's, whose decay differs by channel: query, key [1, R, G, N], value
    [1, R, H, C], beta [1, R, H], g, the logarithm of the decay, [1, R, H] or [1, R, H, N] → [1, R, H, C]."""
    q, k = query[0].float(), key[0].float()
    if use_qk_l2norm_in_kernel:
        q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + NORM_EPS) for each in (q, k))
    q = q * q.shape[-1] ** -0.5
    decays = g[0].float().exp()
    decays = decays.unsqueeze(-1) if decays.dim() == 2 else decays
    scan = Scan(decays, k, value[0].float(), q, betas=beta[0].float().unsqueeze(-1))
    return reader.scan(scan).to(query.dtype).unsqueeze(0), None


def mamba2(
    reader: StateReader,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 0,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    """`mamba2_chunk_scan` (Dao and Gu 2024): hidden_states [1, R, H, C], dt [1, R, H], A, D, dt_bias [H], B, C
    [1, R, G, N] → float32 [1, R, H, C]."""
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)[0].float()
    x = hidden_states[0].float()
    decays = (A.float() * dt).exp().unsqueeze(-1)
    out = reader.scan(Scan(decays, B[0].float(), x * dt.unsqueeze(-1), C[0].float()))
    if D is not None:
        out = out + x * D.float().unsqueeze(-1)
    return out.unsqueeze(0)


def mamba(
    reader: StateReader,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    delta_softplus: bool = False,
    **_: Any,
) -> Tensor:
    """`mamba_selective_scan` (Gu and Dao 2023): hidden_states, dt, z [1, C, R], A [C, N], B, C [1, N, R], D, delta_bias
    [C] → [1, C, R]."""
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype).unsqueeze(-1)
    dt = F.softplus(dt) if delta_softplus else dt
    x, dt, b, c = (each[0].T.unsqueeze(1).float() for each in (hidden_states, dt, B, C))  # of one head
    out = reader.scan(Scan(dt, b, dt * x, c, rates=A.float().T))
    if D is not None:
        out = out + x * D.float()
    out = out[:, 0].to(hidden_states.dtype).T.unsqueeze(0)
    return out if z is None else out * F.silu(z)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": mamba2,
    "mamba_selective_scan": mamba,
}
"""By the names in transformers' modules."""

"""The functions of transformers' layers that read a state, computed token by token from each row's own path.

Every such layer of transformers 5.24 calls one function of its module for a convolution, and one for a state: in this
module they have the same arguments. Sums have one order for each token, whatever else is in the pass.

Shapes: R rows, C channels, K taps, H heads, G groups of heads, N numbers of a state per channel. A layer's own batch
has one sequence: the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_EPS = 1e-6
"""Of keys' and queries' lengths, in transformers' functions."""


class Scan(NamedTuple):
    """A state that each token changes by its update, and then reads.

    updates: of each row, [R, ...] each; `update(state [n, ...], *updates)` gives the states after n tokens from those
    before, and may overwrite these. `read(state, *queries)`: what n tokens read. shape: of a state, float32.
    """

    shape: tuple[int, ...]
    updates: tuple[Tensor, ...]
    queries: tuple[Tensor, ...]
    update: Callable[..., Tensor]
    read: Callable[..., Tensor]


class StateReader(Protocol):
    """A pass through the states."""

    def window(self, inputs: Tensor, taps: int) -> Tensor:
        """Of inputs [R, C] those of the `taps` - 1 tokens before each row, [R, taps - 1, C], zeros before the first."""

    def scan(self, scan: Scan) -> Tensor:
        """What every row reads, [R, ...]."""


def convolution(
    reader: StateReader,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """`causal_conv1d_fn`: hidden_states [1, C, R], weight [C, K] → [1, C, R]."""
    from transformers.activations import ACT2FN

    inputs = hidden_states[0].T.contiguous()
    taps = weight.shape[-1]
    before = reader.window(inputs, taps).float()
    weights = weight.float()
    out = inputs.float() * weights[:, -1]
    for tap in range(taps - 1):
        out = out + before[:, tap] * weights[:, tap]
    if bias is not None:
        out = out + bias.float()
    out = out.to(hidden_states.dtype)
    if activation is not None:
        out = ACT2FN[activation](out)
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
    v, decay = value[0].float(), g[0].float().exp()
    heads, channels = v.shape[1:]
    repeats = heads // k.shape[1]

    def update(state: Tensor, decay: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        k = _repeated(k, repeats).unsqueeze(-1)
        state = state * decay.view(*decay.shape[:2], -1, 1)
        change = (v - (state * k).sum(-2)) * beta.unsqueeze(-1)
        return state.add_(k * change.unsqueeze(-2))

    def read(state: Tensor, q: Tensor) -> Tensor:
        return (state * _repeated(q, repeats).unsqueeze(-1)).sum(-2)

    scan = Scan((heads, k.shape[-1], channels), (decay, k, v, beta[0].float()), (q,), update, read)
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
    x, b, c = hidden_states[0].float(), B[0].float(), C[0].float()
    heads, channels = x.shape[1:]
    repeats = heads // b.shape[1]

    def update(state: Tensor, decay: Tensor, x: Tensor, b: Tensor) -> Tensor:
        state = state * decay.view(*decay.shape, 1, 1)
        return state.add_(x.unsqueeze(-1) * _repeated(b, repeats).unsqueeze(-2))

    def read(state: Tensor, c: Tensor) -> Tensor:
        return (state * _repeated(c, repeats).unsqueeze(-2)).sum(-1)

    decay = (A.float() * dt).exp()
    scan = Scan((heads, channels, b.shape[-1]), (decay, x * dt.unsqueeze(-1), b), (c,), update, read)
    out = reader.scan(scan)
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
    x, dt, b, c = (each[0].T.contiguous().float() for each in (hidden_states, dt, B, C))
    a = A.float()

    def update(state: Tensor, dt: Tensor, x: Tensor, b: Tensor) -> Tensor:
        state = state * (a * dt.unsqueeze(-1)).exp()
        return state.add_((dt * x).unsqueeze(-1) * b.unsqueeze(1))

    def read(state: Tensor, c: Tensor) -> Tensor:
        return (state * c.unsqueeze(1)).sum(-1)

    out = reader.scan(Scan(tuple(a.shape), (dt, x, b), (c,), update, read))
    if D is not None:
        out = out + x * D.float()
    out = out.to(hidden_states.dtype).T.unsqueeze(0)
    return out if z is None else out * F.silu(z)


def _repeated(groups: Tensor, repeats: int) -> Tensor:
    """[n, G, N] → [n, H, N]: heads of a group are adjacent."""
    return groups if repeats == 1 else groups.repeat_interleave(repeats, 1)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": mamba2,
    "mamba_selective_scan": mamba,
}
"""By the names in transformers' modules."""

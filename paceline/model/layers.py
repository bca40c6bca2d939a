"""Llama layers by few torch operators, where there is no native code; and products for heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.model.attention import AttentionOptions, Heads, Pass
from paceline.model.layer_weights import AllReduce, DecoderLayerWeights, QuantizedWeight, RotaryTables, StateFusion
from paceline.model.native.build import NativeUnavailableError
from paceline.model.native.native_library import DTYPES, NativeProduct
from paceline.model.pass_graphs import PassGraphs
from paceline.model.rows import GROUP, Row, device_integers
from paceline.model.torch_attention import TorchAttention

CosSin = tuple[Tensor, Tensor]
"""Cosines and sines of each row's position, [R, 1, D]."""


class RMSNorm:
    """RMSNorm as one operator."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._weight.shape, self._weight, self._eps)


class Linear:
    """One product for several projections of the same input. A row's result does not depend on the number of rows.

    On a CPU it is native code, or else oneDNN's product by a weight that is laid out once: MKL, which `F.linear` calls
    for float32, sums in an order that depends on the number of rows.
    """

    def __init__(self, *weights: Tensor, biases: Sequence[Tensor] = ()) -> None:
        """Weights [out, in] are stacked. `biases` [out]: one for each weight, or none."""
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]  # a single weight is not copied
        bias = torch.cat(list(biases)) if biases else None
        self._product = _native_product(weight, bias) or _torch_product(weight, bias)

    @classmethod
    def of_parts(cls, *products: tuple[Tensor, Tensor | None]) -> Linear:
        """Weights with their biases: all have one, or none has."""
        weights, biases = zip(*products, strict=True)
        return cls(*weights, biases=[bias for bias in biases if bias is not None])

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] → [rows, out], in x's dtype."""
        return self._product(x)


def _native_product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
    if weight.device.type != "cpu" or weight.dtype not in DTYPES:
        return None
    try:
        product = NativeProduct(weight, bias)
    except NativeUnavailableError:
        return None
    return lambda x: product(x).to(x.dtype)


def _torch_product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    if weight.device.type != "cpu" or not _onednn_computes_in(weight.dtype):
        return lambda x: F.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, GROUP)

    def product(x: Tensor) -> Tensor:
        # oneDNN sums one float32 row alone in another order, from some width between 1,024 and 1,536 on (torch 2.13).
        rows = torch.cat([x, x]) if len(x) == 1 and x.dtype == torch.float32 else x
        y: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
        return y[: len(x)]

    return partial(chunked_product, product)


def _onednn_computes_in(dtype: torch.dtype) -> bool:
    """oneDNN refuses bf16 on a CPU that has no AVX-512 (torch 2.13)."""
    available = torch.backends.mkldnn.is_available()
    return available and (dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


class RotaryEmbedding:
    """Rotary position embedding (Su et al. 2021), half-split."""

    def __init__(self, tables: RotaryTables, like: Tensor) -> None:
        """`like`: a tensor of the wanted dtype and device."""
        # [positions, 1, D]: x * cos + swap_halves(x) * sin rotates, with the sign of the first half in the table.
        self._cos = torch.cat([tables.cosines] * 2, -1).unsqueeze(1).to(like)
        self._sin = torch.cat((-tables.sines, tables.sines), -1).unsqueeze(1).to(like)

    def __call__(self, positions: Tensor) -> CosSin:
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def apply_rotary(x: Tensor, cos_sin: CosSin) -> Tensor:
    """Rotate heads [R, heads, D] by each row's position."""
    cos, sin = cos_sin
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class SwiGLU:
    """`down(silu(gate x) * up x)`."""

    def __init__(self, gate_up: Callable[[Tensor], Tensor], down: Callable[[Tensor], Tensor]) -> None:
        self._gate_up, self._down = gate_up, down

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, -1)
        return self._down(F.silu(gate) * up)


class TorchNetwork:
    """Llama layers by torch's operators, with an embedding, a final norm and an output matrix if they are given."""

    def __init__(
        self,
        layers: Sequence[DecoderLayerWeights],
        heads: Heads,
        attention: TorchAttention,
        rotary: RotaryTables,
        *,
        hidden: int,
        eps: float,
        scale: float,
        embedding: Tensor | None = None,
        norm: Tensor | None = None,
        head: Tensor | None = None,
        sums: AllReduce | None = None,
        fusion: StateFusion | None = None,
    ) -> None:
        """As `paceline.model.native.native_network.NativeNetwork`."""
        self._start_pass = attention.start_pass
        self.device_passes = attention.device_passes() if sums is None else None
        self._rotary = RotaryEmbedding(rotary, attention.cache.data.new_empty(1))
        self._layers = [_TorchLayer(n, layer, heads, eps, scale, sums) for n, layer in enumerate(layers)]
        self._embedding = embedding
        self._norm = _norm(norm, eps)
        self._head = None if head is None else Linear(head)
        self._fuse = None if fusion is None else _StateFusionModule(fusion, eps)
        # A head has an input beside the rows, and ranks wait for one another within a pass.
        self._graphs: PassGraphs | None = None
        if fusion is None and sums is None:
            windows = sorted({layer.window for layer in layers})
            self._graphs = attention.capture(self.forward, len(rotary.cosines), windows)

    def run(
        self, rows: Sequence[Row], wanted: Sequence[int], layers: Sequence[int] = (), *, states: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        outputs = None if self._graphs is None else self._graphs.run(rows)
        if outputs is None:
            outputs = self.forward(self._start_pass(rows), states)
        tapped = torch.stack([outputs[n][: len(rows)] for n in layers], 1) if layers else None
        if self._head is None:
            return outputs[0].new_empty(len(wanted), 0), tapped
        return self.output(outputs[-1].index_select(0, device_integers(wanted, outputs[-1].device))), tapped

    def forward(self, this: Pass, states: Tensor | None = None) -> list[Tensor]:
        """The first layer's input, the output of each layer, and that of the final norm: [R, hidden]."""
        cos_sin = self._rotary(this.positions)
        assert self._embedding is not None
        x, joined = F.embedding(this.tokens, self._embedding), None
        if self._fuse is not None:
            assert states is not None
            x, joined = self._fuse(x, pad_rows(states))
        outputs = [x]
        for n, layer in enumerate(self._layers):
            outputs.append(layer(outputs[-1], cos_sin, this, joined if n == 0 else None))
        return [*outputs, self._norm(outputs[-1])]

    def output(self, final: Tensor) -> Tensor:
        assert self._head is not None
        return self._head(pad_rows(final))[: len(final)]


class _StateFusionModule:
    """See `StateFusion`."""

    def __init__(self, fusion: StateFusion, eps: float) -> None:
        self._token_norm, self._state_norm = _norm(fusion.token_norm, eps), _norm(fusion.state_norm, eps)
        biases = () if fusion.projection_bias is None else (fusion.projection_bias,)
        assert not isinstance(fusion.projection, QuantizedWeight)
        self._projection = None if fusion.projection is None else Linear(fusion.projection, biases=biases)
        self._norms_residual = fusion.norms_residual

    def __call__(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Both [R, hidden] → the first layer's input, and the input of its attention if that is not the normed layer
        input."""
        normed = self._state_norm(states)
        joined = torch.cat((self._token_norm(embedded), normed), -1)
        if self._projection is not None:
            return self._projection(joined), None
        return normed if self._norms_residual else states, joined


class _TorchLayer:
    def __init__(
        self, index: int, layer: DecoderLayerWeights, heads: Heads, eps: float, scale: float, sums: AllReduce | None
    ) -> None:
        self._index, self._heads = index, heads
        self._options, self._eps = AttentionOptions(scale, layer.window), eps
        self._into_attention, self._into_mlp = _norm(layer.input_norm, eps), _norm(layer.inner_norm, eps)
        queries_keys = (layer.query, layer.query_bias), (layer.key, layer.key_bias)
        self._qkv = Linear.of_parts(*queries_keys, (layer.value, layer.value_bias))
        self._out = _row_parallel_linear(layer.output, layer.output_bias, sums)
        gate_up = Linear.of_parts((layer.gate, layer.gate_bias), (layer.up, layer.up_bias))
        self._mlp = SwiGLU(gate_up, _row_parallel_linear(layer.down, layer.down_bias, sums))
        self._head_norm: Tensor | None = None
        if layer.query_norm is not None and layer.key_norm is not None:
            queries = heads.kv_heads * heads.queries_per_kv
            parts = [layer.query_norm.expand(queries, -1), layer.key_norm.expand(heads.kv_heads, -1)]
            self._head_norm = torch.cat(parts)

    def __call__(self, x: Tensor, cos_sin: CosSin, this: Pass, given: Tensor | None) -> Tensor:
        x = x + self._attend(self._into_attention(x) if given is None else given, cos_sin, this)
        return x + self._mlp(self._into_mlp(x))

    def _attend(self, x: Tensor, cos_sin: CosSin, this: Pass) -> Tensor:
        heads = self._heads
        queries = heads.kv_heads * heads.queries_per_kv
        rotated = queries + heads.kv_heads
        projected = self._qkv(x).view(x.shape[0], rotated + heads.kv_heads, heads.head_size)
        qk = projected[:, :rotated]
        if self._head_norm is not None:
            qk = F.rms_norm(qk, (heads.head_size,), None, self._eps) * self._head_norm
        qk = apply_rotary(qk, cos_sin)
        query, key, value = qk[:, :queries], qk[:, queries:], projected[:, rotated:]
        attended = this.attend(query, key, value, self._index, self._options)
        return self._out(attended)


def _norm(weight: Tensor | None, eps: float) -> Callable[[Tensor], Tensor]:
    return (lambda x: x) if weight is None else RMSNorm(weight, eps)


def _row_parallel_linear(weight: Tensor, bias: Tensor | None, sums: AllReduce | None) -> Callable[[Tensor], Tensor]:
    """A product that all ranks compute summands of, if there are ranks; the bias is added once."""
    if sums is None:
        return Linear(weight, biases=() if bias is None else (bias,))
    part = Linear(weight)
    return lambda x: sums(part(x)) if bias is None else sums(part(x)) + bias


def pad_rows(x: Tensor) -> Tensor:
    """[rows, n], padded with zero rows to a multiple of GROUP."""
    return x if len(x) % GROUP == 0 else F.pad(x, (0, 0, 0, -len(x) % GROUP))


MAX_ROWS_PER_PRODUCT = 32
"""On a CPU with AMX, oneDNN has another bf16 kernel for 33 rows and more (sometimes later), which sums in another
order: a row's bits change. Up to 32 rows all agree (torch 2.13; widths 64 to 8192, one and two threads). Without AMX
(`ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16`) products are as exact."""


def chunked_product(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The product of rows [R, in]. A row's bits do not depend on R."""
    if len(x) <= MAX_ROWS_PER_PRODUCT or x.dtype != torch.bfloat16 or not _depends_on_rows(x.device):
        return product(x)
    return torch.cat([product(chunk) for chunk in x.split(MAX_ROWS_PER_PRODUCT)])


def use_chunked_linear(network: nn.Module) -> None:
    """Make every linear layer of a network use chunks, in place, on a device that needs them."""
    for module in network.modules():
        if type(module) is nn.Linear and _depends_on_rows(module.weight.device):
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    rows = x.flatten(0, -2)
    product = chunked_product(lambda chunk: F.linear(chunk, module.weight, module.bias), rows)
    return product.view(*x.shape[:-1], product.shape[-1])


def _depends_on_rows(device: torch.device) -> bool:
    return device.type == "cpu" and bool(torch.cpu._is_amx_tile_supported())

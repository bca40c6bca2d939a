"""Llama layers by few operators, torch's or kernels for GPUs, where there is no native code; and products for heads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.model.attention import AttentionOptions, Heads, Pass
from paceline.model.gpu.paged_pass import Kernels, PagedPass
from paceline.model.gpu.pass_graphs import PassGraphs
from paceline.model.layer_weights import (
    AllReduce,
    LayerWeights,
    Matrix,
    QuantizedWeight,
    RotaryTables,
    StateFusion,
    stacked,
)
from paceline.model.native.build import NativeUnavailableError
from paceline.model.native.native_library import DTYPES, NativeProduct
from paceline.model.rows import GROUP, Row, device_integers
from paceline.model.torch_attention import TorchAttention

log = logging.getLogger(__name__)

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

    def __init__(self, *weights: Matrix, biases: Sequence[Tensor] = ()) -> None:
        """Weights [out, in] are stacked, tensors alone in place, see `stacked`. `biases` [out]: one for each weight, or
        none."""
        bias = stacked(*biases) if biases else None
        packed = [weight for weight in weights if not isinstance(weight, Tensor)]
        if packed:
            self._product = packed[0].product(weights, bias)
            return
        weight = stacked(*(weight for weight in weights if isinstance(weight, Tensor)))
        self._product = _native_product(weight, bias) or _torch_product(weight, bias)

    @classmethod
    def of_parts(cls, *products: tuple[Matrix, Tensor | None]) -> Linear:
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
        # [positions, D]: x * cos + swap_halves(x) * sin rotates, with the sign of the first half in the table.
        self.cosines = torch.cat([tables.cosines] * 2, -1).to(like)
        self.sines = torch.cat((-tables.sines, tables.sines), -1).to(like)

    def __call__(self, positions: Tensor) -> CosSin:
        cosines, sines = (each.index_select(0, positions) for each in (self.cosines, self.sines))
        return cosines.unsqueeze(1), sines.unsqueeze(1)


def apply_rotary(x: Tensor, cos_sin: CosSin) -> Tensor:
    """Rotate heads [R, heads, D] by each row's position."""
    cos, sin = cos_sin
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def look_up(tokens: Tensor, embedding: Matrix) -> Tensor:
    """int64 [R] → [R, hidden]."""
    return F.embedding(tokens, embedding) if isinstance(embedding, Tensor) else embedding.lookup(tokens)


class SwiGLU:
    """`down(silu(gate x) * up x)`."""

    def __init__(self, gate_up: Callable[[Tensor], Tensor], down: Callable[[Tensor], Tensor]) -> None:
        self._gate_up, self._down = gate_up, down

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, -1)
        return self._down(F.silu(gate) * up)


class TorchNetwork:
    """Llama layers by torch's operators or by kernels for GPUs, with an embedding, a final norm and an output matrix if
    they are given."""

    def __init__(
        self,
        layers: Sequence[LayerWeights[Any]],
        heads: Heads,
        attention: TorchAttention,
        rotary: RotaryTables,
        *,
        hidden: int,
        eps: float,
        scale: float,
        embedding: Matrix | None = None,
        norm: Tensor | None = None,
        head: Matrix | None = None,
        sums: AllReduce | None = None,
        fusion: StateFusion | None = None,
    ) -> None:
        """As `paceline.model.native.native_network.NativeNetwork`."""
        self._start_pass = attention
        self._between = attention.kernels or TORCH_OPERATORS
        self.device_passes = attention.device_passes() if sums is None else None
        self._rotary = RotaryEmbedding(rotary, attention.cache.data.new_empty(1))
        self._layers = [_Layer(n, layer, heads, scale, sums) for n, layer in enumerate(layers)]
        self._embedding = embedding
        self._norm, self._eps = norm, eps
        self._head = None if head is None else Linear(head)
        self._fuse = None if fusion is None else _StateFusionModule(fusion, eps)
        # A head has an input beside the rows.
        self._graphs: PassGraphs | None = None if fusion is not None else attention.capture(self.forward)

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
        assert self._embedding is not None
        joined = None
        if self._fuse is None:
            x = look_up(this.tokens, self._embedding)
        else:
            assert states is not None
            x, joined = self._fuse(
                this.tokens, self._embedding, pad_rows(states, len(this.tokens)).contiguous(), self._between
            )
        # A kernel reads rotary tables by itself.
        cos_sin = None if isinstance(this, PagedPass) else self._rotary(this.positions)
        outputs, added = [], None
        for layer in self._layers:
            x, normed = self._between.add_norm(x, added, None if joined is not None else layer.input_norm, self._eps)
            outputs.append(x)
            attended = self._attend(layer, normed if joined is None else joined, cos_sin, this)
            x, normed = self._between.add_norm(x, layer.out(attended), layer.inner_norm, self._eps)
            added, joined = layer.down(self._between.silu_times(layer.gate_up(normed))), None
        return [*outputs, *self._between.add_norm(x, added, self._norm, self._eps)]

    def _attend(self, layer: _Layer, x: Tensor, cos_sin: CosSin | None, this: Pass) -> Tensor:
        """The attention of rows whose input is x [R, in] → [R, H * D]."""
        projected = layer.qkv(x).view(len(x), -1, layer.heads.head_size)
        if isinstance(this, PagedPass):
            tables, data = (self._rotary.cosines, self._rotary.sines), this.cache.data[layer.index]
            query = this.kernels.rotate_and_store(
                projected, this.positions, this.slots, *tables, data, layer.head_norms, self._eps
            )
            return this.attend_to_stored(query, layer.index, layer.options)
        assert cos_sin is not None
        qk, value = projected.split([projected.shape[1] - layer.heads.kv_heads, layer.heads.kv_heads], 1)
        if layer.head_norms is not None:
            qk = F.rms_norm(qk, (layer.heads.head_size,), None, self._eps) * layer.head_norms
        qk = apply_rotary(qk, cos_sin)
        query, key = qk[:, : -layer.heads.kv_heads], qk[:, -layer.heads.kv_heads :]
        return this.attend(query, key, value, layer.index, layer.options)

    def output(self, final: Tensor) -> Tensor:
        assert self._head is not None
        return self._head(pad_rows(final))[: len(final)]


class _TorchOperators:
    """What `paceline.model.gpu.paged_pass.Kernels` has in one kernel each."""

    def add_norm(self, x: Tensor, added: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        total = x if added is None else x + added
        return total, total if weight is None else F.rms_norm(total, weight.shape, weight, eps)

    def join(
        self,
        tokens: Tensor,
        embedding: Tensor,
        states: Tensor,
        token_norm: Tensor | None,
        state_norm: Tensor | None,
        eps: float,
        *,
        norms_residual: bool,
    ) -> tuple[Tensor, Tensor]:
        normed = _norm(state_norm, eps)(states)
        joined = torch.cat((_norm(token_norm, eps)(F.embedding(tokens, embedding)), normed), -1)
        return normed if norms_residual else states, joined

    def silu_times(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


TORCH_OPERATORS = _TorchOperators()


class _StateFusionModule:
    """See `StateFusion`."""

    def __init__(self, fusion: StateFusion, eps: float) -> None:
        self._norms, self._eps = (fusion.token_norm, fusion.state_norm), eps
        biases = () if fusion.projection_bias is None else (fusion.projection_bias,)
        assert not isinstance(fusion.projection, QuantizedWeight)
        self._projection = None if fusion.projection is None else Linear(fusion.projection, biases=biases)
        self._norms_residual = fusion.norms_residual

    def __call__(
        self, tokens: Tensor, embedding: Matrix, states: Tensor, between: Kernels | _TorchOperators
    ) -> tuple[Tensor, Tensor | None]:
        """tokens [R], states [R, hidden] → the first layer's input, and the input of its attention if that is not the
        normed layer input."""
        if not isinstance(embedding, Tensor):
            tokens, embedding = torch.arange(len(tokens), device=tokens.device), embedding.lookup(tokens)
        given = tokens, embedding, states, *self._norms, self._eps
        residual, joined = between.join(*given, norms_residual=self._norms_residual)
        return (residual, joined) if self._projection is None else (self._projection(joined), None)


class _Layer:
    """A layer's products, and what its other steps need."""

    def __init__(
        self, index: int, layer: LayerWeights[Any], heads: Heads, scale: float, sums: AllReduce | None
    ) -> None:
        self.index, self.heads, self.options = index, heads, AttentionOptions(scale, layer.window)
        self.input_norm, self.inner_norm = layer.input_norm, layer.inner_norm
        queries_keys = (layer.query, layer.query_bias), (layer.key, layer.key_bias)
        self.qkv = Linear.of_parts(*queries_keys, (layer.value, layer.value_bias))
        self.out = _row_parallel_linear(layer.output, layer.output_bias, sums)
        self.gate_up = Linear.of_parts((layer.gate, layer.gate_bias), (layer.up, layer.up_bias))
        self.down = _row_parallel_linear(layer.down, layer.down_bias, sums)
        self.head_norms: Tensor | None = None
        """[H + K, D]"""
        if layer.query_norm is not None and layer.key_norm is not None:
            queries = heads.kv_heads * heads.queries_per_kv
            parts = [layer.query_norm.expand(queries, -1), layer.key_norm.expand(heads.kv_heads, -1)]
            self.head_norms = torch.cat(parts)


def _norm(weight: Tensor | None, eps: float) -> Callable[[Tensor], Tensor]:
    return (lambda x: x) if weight is None else RMSNorm(weight, eps)


def _row_parallel_linear(weight: Matrix, bias: Tensor | None, sums: AllReduce | None) -> Callable[[Tensor], Tensor]:
    """A product that all ranks compute summands of, if there are ranks; the bias is added once."""
    if sums is None:
        return Linear(weight, biases=() if bias is None else (bias,))
    part = Linear(weight)
    return lambda x: sums(part(x)) if bias is None else sums(part(x)) + bias


def pad_rows(x: Tensor, rows: int | None = None) -> Tensor:
    """[R, n], padded with zero rows to so many; None: to a multiple of GROUP."""
    missing = -len(x) % GROUP if rows is None else rows - len(x)
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def use_whole_sums(device: torch.device) -> None:
    """On a GPU, let no product in 16 bits be a sum of parts, for the whole process.

    cuBLAS may split a sum over the inputs (split-K) at some numbers of rows only, which changes a row's bits. Only its
    cuBLASLt can be told not to, and only for 16 bits: float32 products stay as they are. Products may be slower.
    """
    if device.type != "cuda":
        return
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "allow_bf16_reduced_precision_reduction_split_k"):
        log.warning(
            "torch %s cannot switch split-K off: rows may depend on the other rows of a pass", torch.__version__
        )
        return
    torch.backends.cuda.preferred_blas_library("cublaslt")
    # Of each pair: whether partial sums may have 16 bits, and whether there may be partial sums.
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = (False, False)


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

"""Weights of Llama layers, and rotary tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

AllReduce = Callable[[Tensor], Tensor]
"""The sum over ranks of their tensors [n]."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix [out, in] in blocks of codes with scales, as a GGUF file has them. Native code multiplies it; for a GPU
    see `paceline.model.gpu.packed_matrix`."""

    type: int
    """GGUF's number of the block type."""
    shape: tuple[int, int]
    data: npt.NDArray[np.uint8]
    """[out, bytes of a column], contiguous."""

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> QuantizedWeight:
        """Some rows."""
        data = self.data[rows]
        return QuantizedWeight(self.type, (len(data), self.shape[1]), data)


Weight = Tensor | QuantizedWeight
"""In main memory."""


class PackedWeight(Protocol):
    """A matrix [out, in] that stays packed in a GPU's memory."""

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype:
        """Of its products."""

    def __len__(self) -> int: ...
    def lookup(self, rows: Tensor) -> Tensor:
        """Rows of the matrix: int64 [R] → [R, in]."""

    def product(self, weights: Sequence[Matrix], bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """The product with stacked weights, of which this is one."""


Matrix = Tensor | PackedWeight
"""Where passes by torch's operators and kernels compute."""
W = TypeVar("W", bound=Weight | PackedWeight)


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """Cosines and sines, float32 [positions, rotated elements of a head / 2]."""

    cosines: Tensor
    sines: Tensor

    @classmethod
    def of(cls, module: Any, positions: int) -> RotaryTables:
        """The tables of a transformers rotary embedding for half-split heads."""
        like = torch.zeros(1, device=module.inv_freq.device)
        cosines, sines = module(like, torch.arange(positions, device=like.device).unsqueeze(0))
        half = cosines.shape[-1] // 2
        return cls(cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous())

    @classmethod
    def at(cls, frequencies: Tensor, positions: int, scale: float = 1.0) -> RotaryTables:
        """`frequencies`: radians per position, float32 [rotated elements of a head / 2]."""
        angles = torch.arange(positions, device=frequencies.device).float()[:, None] * frequencies
        return cls(angles.cos() * scale, angles.sin() * scale)


def rotary_frequencies(base: float, size: int) -> Tensor:
    """Radians per position of `size` elements, without scaling: float32 [size / 2] (Su et al. 2021)."""
    return 1.0 / base ** (torch.arange(0, size, 2).float() / size)


@dataclass(frozen=True)  # with slots, `LayerWeights[Tensor](...)` fails: typing sets an attribute (Python 3.11)
class LayerWeights(Generic[W]):
    """Weights of one layer: matrices [out, in], all tensors of one dtype; norms and biases [out], of any floating-point
    dtype; None for a missing one."""

    query: W
    key: W
    value: W
    output: W
    gate: W
    up: W
    down: W
    input_norm: Tensor | None = None
    inner_norm: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    attention_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None
    """Of what attention and MLP add to the residual stream; by native code only."""
    window: int = 0
    """Positions that a row sees, including its own; 0: all."""
    rotary: RotaryTables | None = None
    """None: the network's; by native code only."""
    output_gate: W | None = None
    """Its sigmoid multiplies what a row attends to, [out, in] as of `query`; by native code only."""


class DeltaShape(NamedTuple):
    """Of layers whose state is one matrix [size, channels] per head."""

    heads: int
    groups: int
    """The heads of a group, which are neighbours, share keys and queries."""
    size: int
    """Of a key. Native code wants a multiple of 16, here and of the next."""
    channels: int
    """Of a value."""
    taps: int
    """Of the convolution: a token's own input and those before it."""
    tiled: bool = False
    """The heads of a group are not neighbours: there are as many others between them as there are groups, as in GGUF
    files."""

    @property
    def mixed(self) -> int:
        """Queries, keys and values of a token."""
        return 2 * self.groups * self.size + self.heads * self.channels

    @property
    def scanned(self) -> int:
        """What changes a state: decays, keys, values and betas of a token."""
        return 2 * self.heads + self.groups * self.size + self.heads * self.channels

    def nbytes(self, states: int, guesses: int, dtype: torch.dtype) -> int:
        """Of so many states of a layer, and of what is kept of guesses. `dtype`: of a convolution's inputs."""
        inputs = self.mixed * dtype.itemsize
        of_state = 4 * self.heads * self.size * self.channels + (self.taps - 1) * inputs
        return states * of_state + guesses * (4 * self.scanned + inputs)


@dataclass(frozen=True)
class DeltaWeights(Generic[W]):
    """Of the gated delta rule (Gated DeltaNet, Yang et al. 2025): matrices [out, hidden], and tensors of any
    floating-point dtype.

    mixed: queries, keys and values before their convolution. gate: [heads * channels, hidden]. beta, decay: [heads,
    hidden]. convolution: [mixed, taps]. rates, offsets: [heads]; a factor of a state is exp(rate * softplus(decay +
    offset)). norm: [channels].
    """

    mixed: W
    gate: W
    beta: W
    decay: W
    convolution: Tensor
    rates: Tensor
    offsets: Tensor
    norm: Tensor


@dataclass(frozen=True)
class DeltaLayerWeights(Generic[W]):
    """Of a layer with the gated delta rule in place of attention, by native code only. Otherwise see `LayerWeights`."""

    delta: DeltaWeights[W]
    output: W
    gate: W
    up: W
    down: W
    input_norm: Tensor
    inner_norm: Tensor


AnyLayerWeights = LayerWeights[Any] | DeltaLayerWeights[Any]
DecoderLayerWeights = LayerWeights[Tensor]
"""Of a layer that is not quantised."""

MATRICES: Mapping[str, str] = {
    **{"query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj"},
    **{"output": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"},
}
"""Matrices of a layer, and transformers' names for them."""
HEAD_NORMS: Mapping[str, str] = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
NORMS: Mapping[str, str] = {**{"input_norm": "input_layernorm", "inner_norm": "post_attention_layernorm"}, **HEAD_NORMS}
"""Norms of a layer, where it has them, and transformers' names for them."""


@dataclass(frozen=True, slots=True)
class StateFusion:
    """How a network uses a target's hidden state for each token: it norms embedding and state, and concatenates them to
    [2 * hidden].

    With a `projection` [hidden, 2 * hidden] the product is the first layer's input. Without one the state is, and the
    first layer's attention takes the concatenation in place of the normed state.
    """

    token_norm: Tensor | None = None
    state_norm: Tensor | None = None
    projection: Weight | None = None
    """Quantised by native code only."""
    projection_bias: Tensor | None = None
    norms_residual: bool = False
    """Without a projection: the first layer's input is the normed state."""


@dataclass(frozen=True, slots=True)
class LayerVariant:
    """What some kinds do otherwise than Llama, by native code only."""

    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    """Of every embedding."""
    residual_scale: float = 1.0
    """Of what attention and MLP add."""
    softcap: float = 0.0
    """Limit of attention's scores, by tanh; 0: none."""


LLAMA = LayerVariant()


def stack_matrices(layers: Sequence[LayerWeights[Any]]) -> None:
    """Stack the matrices of each layer that one product takes, see `stacked`. Needs the memory of one stack more.

    Packed matrices are in one memory already, where they can be.
    """
    for layer in layers:
        for stack in ((layer.query, layer.key, layer.value), (layer.gate, layer.up)):
            if all(isinstance(weight, Tensor) for weight in stack):
                stacked(*stack)


def stacked(*weights: Tensor) -> Tensor:
    """The rows of all weights [n, ...] as one tensor, in whose memory the weights are from then on.

    So another user of a weight, such as transformers' network, shares that memory, and the weight's own is freed.
    Weights that are stacked already are not copied; nor is a single one.
    """
    first = weights[0]
    if len(weights) == 1:
        return first
    sizes = [len(weight) for weight in weights]
    if _are_stacked(weights):
        return first.detach().as_strided((sum(sizes), *first.shape[1:]), first.stride(), first.storage_offset())
    stack = torch.cat([weight.detach() for weight in weights])
    for weight, rows in zip(weights, stack.split(sizes), strict=True):
        weight.data = rows
    return stack


def _are_stacked(weights: Sequence[Tensor]) -> bool:
    """Whether contiguous weights of one kind follow one another in one storage."""
    first, end = weights[0], weights[0].storage_offset()
    for weight in weights:
        shares = weight.untyped_storage()._cdata == first.untyped_storage()._cdata and weight.storage_offset() == end
        alike = weight.is_contiguous() and (weight.dtype, weight.shape[1:]) == (first.dtype, first.shape[1:])
        if not (shares and alike):
            return False
        end += weight.numel()
    return True

"""The numbers of states and of guesses' inputs, and how transformers' layers reach them in a pass."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from paceline.model.attention import lazy_zeros
from paceline.model.rows import GROUP, Row
from paceline.model.states.native_states import NativeConvolution, StatePassSpec, native_scan
from paceline.model.states.recurrences import FUNCTIONS, Convolution, Scan, StateReader
from paceline.model.states.state_cache import StateCache, StatePass

STATE_COPIES = 3
"""Of the states of a pass' rows, in one layer at a time: before and after a token, and a product."""

_current: ContextVar[StateReader | None] = ContextVar("reader", default=None)


@contextmanager
def use_reader(reader: StateReader | None) -> Iterator[None]:
    """Within it, layers of transformers read states by `reader`; None: by their own functions."""
    token = _current.set(reader)
    try:
        yield
    finally:
        _current.reset(token)


def intercept_states(network: nn.Module) -> bool:
    """Let the layers of a network ask for the current reader. Without one they compute what they did before. Returns
    whether any could."""
    found = False
    for module in {sys.modules[type(each).__module__] for each in network.modules()}:
        for name in FUNCTIONS.keys() & vars(module).keys():
            found, function = True, getattr(module, name)
            if not hasattr(function, "reads_states"):
                setattr(module, name, _intercepted(function, FUNCTIONS[name]))
    return found


def _intercepted(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*given: Any, **named: Any) -> Any:
        reader = _current.get()
        return original(*given, **named) if reader is None else ours(reader, *given, **named)

    function.reads_states = True  # type: ignore[attr-defined]
    return function


class StateShapes:
    """A reader that computes nothing, and notes which states a pass reads. Tensors may be on `meta`."""

    def __init__(self) -> None:
        self.longest = 0
        """Tokens before its own that a convolution reads, at most."""
        self.calls = 0
        self._inputs = self._updates = self._scanned = self._largest = 0
        """Bytes of a token's inputs of convolutions and of updates, and of the states of all scans and the largest."""

    def convolve(self, inputs: Tensor, convolution: Convolution) -> Tensor:
        self.calls += 1
        self.longest = max(self.longest, convolution.taps - 1)
        self._inputs += inputs[0].nbytes
        return convolution.apply(inputs, inputs.new_zeros(len(inputs), convolution.taps - 1, inputs.shape[-1]))

    def scan(self, scan: Scan) -> Tensor:
        self.calls += 1
        state = 4 * math.prod(scan.shape)
        self._updates += scan.inputs()[0].nbytes
        self._scanned, self._largest = self._scanned + state, max(self._largest, state)
        return scan.read(scan.values.new_zeros(len(scan.values), *scan.shape), scan.queries)

    def nbytes(self, states: int, guesses: int) -> int:
        """Of so many states, of the inputs of so many guesses, and of a pass' own states where guesses are its rows."""
        of_state, of_guess = self._scanned + self.longest * self._inputs, self._updates + self._inputs
        return states * of_state + guesses * (of_guess + STATE_COPIES * self._largest)


class StoredStates:
    """The states of a model's layers, one memory for each call of a pass, in the order of the calls."""

    def __init__(self, cache: StateCache) -> None:
        self.cache = cache
        self._memories: list[_Inputs | _States] = []

    def reader(self, rows: Sequence[Row], padded: int) -> PassReader:
        """Of the next pass, `padded` rows long. Raises as `StateCache.paths`."""
        if self.cache.native:
            return PassReader(self.cache, StatePassSpec.of(self.cache, rows, padded), self._memories)
        return PassReader(self.cache, self.cache.paths(rows, padded), self._memories)

    @property
    def nbytes(self) -> int:
        """Of what the passes so far have needed."""
        return sum(each.nbytes for each in self._memories)


class PassReader:
    """One pass. Each layer's call has to come in the order of the passes before."""

    def __init__(self, cache: StateCache, this: StatePass | StatePassSpec, memories: list[_Inputs | _States]) -> None:
        self._cache, self._pass, self._memories = cache, this, memories
        self._calls = 0

    def convolve(self, inputs: Tensor, convolution: Convolution) -> Tensor:
        memory = self._memory(lambda: _Inputs(self._cache, inputs, convolution))
        assert isinstance(memory, _Inputs)
        return memory.convolve(self._pass, inputs, convolution)

    def scan(self, scan: Scan) -> Tensor:
        memory = self._memory(lambda: _States(self._cache, scan))
        assert isinstance(memory, _States)
        return memory.scan(self._pass, scan)

    def _memory(self, make: Callable[[], _Inputs | _States]) -> _Inputs | _States:
        if self._calls == len(self._memories):
            self._memories.append(make())
        self._calls += 1
        return self._memories[self._calls - 1]


class _Inputs:
    """Of a convolution: zeros, the last M inputs of each state, the inputs of guesses, and the rows of this pass."""

    def __init__(self, cache: StateCache, like: Tensor, convolution: Convolution) -> None:
        self._cache = cache
        self._native = NativeConvolution(convolution) if cache.native else None
        rows = cache.first_row + (0 if cache.native else GROUP)
        self._data = lazy_zeros((rows, like.shape[-1]), like.dtype, like.device)

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    def convolve(self, this: StatePass | StatePassSpec, inputs: Tensor, convolution: Convolution) -> Tensor:
        """See `StateReader`."""
        if isinstance(this, StatePassSpec):
            assert self._native is not None
            return self._native(this, self._data, inputs)
        return convolution.apply(inputs, self._window(this, inputs, convolution.taps))

    def _window(self, this: StatePass, inputs: Tensor, taps: int) -> Tensor:
        """The inputs of the `taps` - 1 tokens before each row, [R, taps - 1, C]."""
        cache, rows = self._cache, len(inputs)
        if self._data.shape[0] < cache.first_row + rows:
            kept = self._data[: cache.first_row]
            self._data = torch.cat([kept, inputs.new_zeros(rows, inputs.shape[-1])])
        data = self._data
        data[cache.first_row : cache.first_row + rows] = inputs
        before = data.index_select(0, this.windows[:, cache.window - taps + 1 :].flatten())
        tails = data.index_select(0, this.tails.flatten())
        first = 1 + this.tail_states * cache.window
        data.index_copy_(0, (first.unsqueeze(1) + torch.arange(cache.window, device=data.device)).flatten(), tails)
        data.index_copy_(0, this.entries + cache.first_entry, inputs.index_select(0, this.guesses))
        return before.view(rows, taps - 1, -1)


class _States:
    """Of a scan: the states, float32, and what changes them of guesses."""

    def __init__(self, cache: StateCache, scan: Scan) -> None:
        dtype, device = scan.values.dtype, scan.values.device
        self._states = lazy_zeros((cache.states, *scan.shape), dtype, device)
        self._kept = lazy_zeros((cache.guesses, scan.inputs().shape[1]), dtype, device)

    @property
    def nbytes(self) -> int:
        return self._states.nbytes + self._kept.nbytes

    def scan(self, this: StatePass | StatePassSpec, scan: Scan) -> Tensor:
        """See `StateReader`."""
        inputs = scan.inputs()
        if isinstance(this, StatePassSpec):
            return native_scan(this, scan, self._states, inputs, self._kept)
        self._states.index_fill_(0, this.fresh, 0.0)
        out = self._by_levels(this, scan, inputs)
        self._kept.index_copy_(0, this.entries, inputs.index_select(0, this.guesses))
        return out

    def _by_levels(self, this: StatePass, scan: Scan, inputs: Tensor) -> Tensor:
        state = self._states.index_select(0, this.roots)
        out = torch.zeros_like(scan.values)
        for level in this.levels:
            earlier, now = self._kept.index_select(0, level.guesses), inputs.index_select(0, level.rows)
            state = scan.update(state.index_select(0, level.parents), torch.cat([earlier, now]))
            read = scan.read(state[len(level.guesses) :], scan.queries.index_select(0, level.rows))
            out.index_copy_(0, level.rows, read)
            self._states.index_copy_(0, level.saved_states, state.index_select(0, level.saved))
        return out

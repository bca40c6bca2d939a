"""Linear layers of transformers' modules by native code on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from torch import Tensor, nn

from paceline.model.native.native_library import DTYPES, NativeProduct


class PassRows(NamedTuple):
    """How many rows a pass has, and with padding."""

    layers: tuple[int, int]
    head: tuple[int, int]
    """Of the output matrix."""


_pass_rows: ContextVar[PassRows | None] = ContextVar("pass_rows", default=None)


@contextmanager
def use_pass_rows(rows: PassRows) -> Iterator[None]:
    """Within it, `NativeLinear` multiplies no padding."""
    token = _pass_rows.set(rows)
    try:
        yield
    finally:
        _pass_rows.reset(token)


class NativeLinear:
    """The forward of a linear layer of a network by native code, for inputs of any dimensions.

    The layer keeps its weight's shape and dtype, without numbers: what reads them fails.
    """

    def __init__(self, module: nn.Linear, *, is_head: bool = False) -> None:
        """Takes over the layer. Raises `NativeUnavailableError`."""
        self._product, self._is_head = NativeProduct(module.weight, module.bias), is_head
        module.weight = nn.Parameter(module.weight.to("meta"), requires_grad=False)
        module.forward = self  # type: ignore[method-assign, assignment]

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        count = self._count(x)
        product = self._product(rows[:count])
        out = x.new_empty(*x.shape[:-1], product.shape[1])
        flat = out.view(-1, product.shape[1])
        flat[:count] = product
        flat[count:] = 0.0
        return out

    def _count(self, x: Tensor) -> int:
        """The rows that are no padding: a pass has a batch of one. An expert's rows, of two dimensions, are others."""
        if (this := _pass_rows.get()) is not None:
            count, padded = this.head if self._is_head else this.layers
            if x.shape[:-1] == (1, padded):
                return count
        return x.shape[:-1].numel()


@contextmanager
def called_linear(network: nn.Module) -> Iterator[list[nn.Linear]]:
    """The linear layers that are called within it: the weights of others may be read by their networks."""
    called: dict[nn.Linear, None] = {}
    linear = [module for module in network.modules() if type(module) is nn.Linear]
    modules: list[nn.Linear] = []
    hooks = [each.register_forward_hook(lambda module, *_: called.setdefault(module)) for each in linear]
    try:
        yield modules
    finally:
        for hook in hooks:
            hook.remove()
        modules += called


def take_over(linear: list[nn.Linear], head: nn.Module | None = None) -> None:
    """Let native code multiply in these layers, one after another, so that one has its weight twice. The list is then
    empty. `head`: one whose rows are those of logits. Raises `NativeUnavailableError`."""
    while linear:
        module = linear.pop()
        if module.weight.dtype in DTYPES:
            NativeLinear(module, is_head=module is head)

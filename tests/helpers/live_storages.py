"""The memory of tensors, counted while code runs: on any device, `meta` as well, where storages have sizes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Within it, counts the bytes of all storages that tensors of one device have had since, and those given.

    What one of torch's operators allocates and frees by itself is not seen.
    """

    def __init__(self, device: str, given: Iterable[Tensor] = ()) -> None:
        """`given`: tensors that exist before."""
        super().__init__()
        self.peak = 0
        self._device = device
        self._sizes: dict[StorageWeakRef, int] = {}
        self._see(given)

    @property
    def bytes(self) -> int:
        """Of what is alive now."""
        self._sizes = {storage: size for storage, size in self._sizes.items() if not storage.expired()}
        return sum(self._sizes.values())

    def _see(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor) and value.device.type == self._device:
                storage = value.untyped_storage()
                self._sizes[StorageWeakRef(storage)] = storage.nbytes()
        self.peak = max(self.peak, self.bytes)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._see(tree_leaves(result))
        return result

"""A GGUF file's metadata of its own architecture, such as `qwen2.block_count`.

A fault is a `GgufError` that names the key.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from paceline.gguf.gguf_file import GgufError, GgufFile


class Keys:
    """A file's metadata of its own architecture."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture
        self._read: set[str] = set()

    def count(self, key: str) -> int:
        """A whole number over 0. Raises `GgufError`."""
        return self._positive(key, self.file.need(self._named(key), int))

    def optional_count(self, key: str, default: int | None = None) -> int | None:
        """As `count`; `default` if there is none, or 0."""
        return self.file.get(self._named(key), int) or default

    def counts(self, key: str) -> list[int]:
        """Several whole numbers; empty if there are none."""
        return list(self.file.get(self._named(key), list, []))

    def by_layer(self, key: str, layers: int) -> list[Any]:
        """A value for each layer; empty if there is none. Raises `GgufError` for another number of layers."""
        stored = self.file.get(self._named(key), (int, list), [])
        values: list[Any] = stored if isinstance(stored, list) else [stored] * layers
        if values and len(values) != layers:
            raise self.error(key, f"has {len(values)} layers, and block_count {layers}")
        return values

    def count_of_layers(self, key: str, *, zeros: bool) -> int | None:
        """The count that layers have in common. `zeros`: a layer may also have 0. None: no layer has any.

        Raises `GgufError` if layers differ otherwise.
        """
        values = self.by_layer(key, self.count("block_count"))
        counts = {self._positive(key, value) for value in values if value or not (zeros and value == 0)}
        if len(counts) > 1:
            raise self.error(key, f"differs between layers: {sorted(counts)}")
        return next(iter(counts), None)

    def number(self, key: str) -> float:
        """A number. Raises `GgufError`."""
        return shortest(self.file.need(self._named(key), (float, int)))

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """As `number`; `default` if there is none."""
        value = self.file.get(self._named(key), (float, int))
        return default if value is None else shortest(value)

    def text(self, key: str, default: str) -> str:
        """A word; `default` if there is none."""
        return str(self.file.get(self._named(key), str, default))

    def refuse_others(self, harmless: Mapping[str, Any]) -> None:
        """Raise `GgufError` for a key that was not read: it may change what the model computes.

        `harmless`: the value of a key that changes nothing, None if none does.
        """
        start = f"{self.architecture}."
        for name in sorted(set(self.file.metadata) - self._read):
            key, value = name.removeprefix(start), self.file.metadata[name]
            if name.startswith(start) and (key not in harmless or harmless[key] not in (None, value)):
                raise self.error(key, f"is {value!r}, which is not read here: without it the output would be wrong")

    def error(self, key: str, fault: str) -> GgufError:
        """Of this key."""
        return GgufError(f"{self.file.path}: {self.architecture}.{key} {fault}")

    def has_tensor(self, name: str) -> bool:
        """Whether the file has it."""
        return name in self.file.tensors

    def _named(self, key: str) -> str:
        """The key as the file has it, which is read."""
        name = f"{self.architecture}.{key}"
        self._read.add(name)
        return name

    def _positive(self, key: str, value: int) -> int:
        if isinstance(value, bool) or value <= 0:
            raise self.error(key, f"is {value}, and no positive number")
        return value


def shortest(value: float) -> float:
    """A float32 of a file as the decimal number that was meant: 1e-05, not 9.99999974e-06."""
    try:
        stored = struct.pack("<f", value)
    except OverflowError:  # a float64
        return value
    decimals = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((each for each in decimals if struct.pack("<f", each) == stored), value)

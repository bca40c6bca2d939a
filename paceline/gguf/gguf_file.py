"""A GGUF file: metadata, and tensors that are mapped, not read.

Follows the format's description, versions 2 and 3 (docs/gguf.md of ggml). The header is parsed here, not by the package
`gguf`: its reader makes a numpy view for each string, which takes 12 s for a vocabulary of 150,000 tokens (gguf 0.19),
and one file is opened by gateway, target and draft.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # processes that read metadata alone do not load numpy
    import numpy as np
    import numpy.typing as npt

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
"""Bytes, where `general.alignment` does not say."""
PART = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
MAX_DIMENSIONS = 4

SCALARS: Mapping[int, str] = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i"},
    **{6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"},
}
"""`struct`'s letters of the metadata types."""
STRING, ARRAY = 8, 9


class GgufError(ValueError):
    """A GGUF file that cannot be used; one sentence that names the tensor or the key."""


class BlockType(NamedTuple):
    """How a tensor's numbers are stored: blocks of `size` neighbouring inputs in `bytes` bytes."""

    number: int
    """The file's number of the type."""
    name: str
    size: int
    bytes: int

    @property
    def is_packed(self) -> bool:
        """Whether its numbers are codes with scales, not floats."""
        return self.size > 1


BLOCK_TYPES: Mapping[int, BlockType] = {
    number: BlockType(number, *fields)
    for number, fields in {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        20: ("IQ4_NL", 32, 18),
        23: ("IQ4_XS", 256, 136),
        30: ("BF16", 1, 2),
        39: ("MXFP4", 32, 17),
    }.items()
}
"""By the file's number of the type. Others are refused by name or number."""
UNREAD_TYPES: Mapping[int, str] = {
    **{9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S"},
    **{24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0"},
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file. `shape` as in torch, [out, in] or [n]."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    row_bytes: int
    start: int
    """Of its bytes in `mapped`."""
    mapped: mmap.mmap = field(repr=False)

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def size(self) -> int:
        """In bytes."""
        return self.rows * self.row_bytes

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """uint8 [rows, bytes of a row], mapped."""
        import numpy as np

        return np.frombuffer(self.mapped, np.uint8, self.size, self.start).reshape(self.rows, self.row_bytes)


class GgufFile:
    """One model: a file, or all parts of a split one.

    `metadata` by key: str, int, float, bool, or a list of them.
    """

    def __init__(self, path: Path | str) -> None:
        """`path`: the file, or the first of its parts. Raises `GgufError`."""
        self.path = Path(path)
        self._parts = parts = [_Part(each) for each in part_paths(self.path)]
        self.metadata: Mapping[str, Any] = parts[0].metadata
        self.tensors: Mapping[str, GgufTensor] = {name: t for part in parts for name, t in part.tensors.items()}
        expected = self.metadata.get("split.tensors.count", len(self.tensors))
        if len(self.tensors) != expected:
            raise GgufError(f"{self.path} has {len(self.tensors)} tensors and not split.tensors.count, {expected}")

    @classmethod
    def open(cls, path: Path | str) -> GgufFile:
        """The file at this path, parsed once per process while it does not change. Raises `GgufError`."""
        resolved = Path(path).resolve()
        try:
            status = resolved.stat()
        except OSError as error:
            raise GgufError(f"{path} cannot be read: {error.strerror}") from error
        return _opened(str(resolved), status.st_mtime_ns, status.st_size)

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """A value of the metadata, or `default`. Raises `GgufError` if it is of another kind."""
        value = self.metadata.get(key)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise GgufError(f"{self.path}: {key} is {_brief(value)}, which is of the wrong type")
        return value

    def need(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """As `get`. Raises `GgufError` if there is no such key."""
        value = self.get(key, kind)
        if value is None:
            raise GgufError(f"{self.path} has no {key}: it is incomplete, or no language model")
        return value

    def tensor(self, name: str) -> GgufTensor:
        """Raises `GgufError` if there is no such tensor."""
        if name not in self.tensors:
            raise GgufError(f"{self.path} has no tensor {name}: it is incomplete, or of another kind")
        return self.tensors[name]

    def release_pages(self) -> None:
        """Give the memory of what was read back. The next access reads again, mostly from the page cache."""
        for part in self._parts:
            part.release_pages()

    @cached_property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors.values())


@lru_cache(maxsize=4)
def _opened(path: str, changed_ns: int, size: int) -> GgufFile:
    return GgufFile(path)


def is_gguf(path: Path | str) -> bool:
    """Whether a path names a GGUF file."""
    return Path(path).suffix == SUFFIX


def gguf_in(folder: Path) -> Path | None:
    """The only model in a folder, by its first part; None if there is none. Raises `GgufError` if there are several."""
    if not folder.is_dir():
        return None
    files = sorted(path for path in folder.iterdir() if is_gguf(path) and not path.name.startswith("mmproj"))
    models = [path for path in files if (part := PART.match(path.name)) is None or int(part["number"]) == 1]
    if len(models) > 1:
        raise GgufError(
            f"{folder} has {len(models)} models ({models[0].name}, {models[1].name}, ...): name one of them"
        )
    if files and not models:
        raise GgufError(f"{folder} has {files[0].name}, and not the first part")
    return models[0] if models else None


def part_paths(path: Path) -> Sequence[Path]:
    """All parts of the model that begins at `path`. Raises `GgufError` if one is missing or `path` is a later one."""
    match = PART.match(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    parts = [path.with_name(f"{match['stem']}-{n:05d}-of-{count:05d}{SUFFIX}") for n in range(1, count + 1)]
    if int(match["number"]) != 1:
        raise GgufError(f"{path.name} is a later part: name the first, {parts[0].name}")
    if missing := [part.name for part in parts if not part.is_file()]:
        raise GgufError(f"{path.name} is one of {count} parts, and {missing[0]} is missing")
    return parts


class _Part:
    """One file's header, and views of its tensors."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise GgufError(f"{path} cannot be read: {error}") from error
        self._at = 0
        magic = self._bytes[:4]
        if magic != MAGIC:
            raise GgufError(f"{path} is no GGUF file: it begins with {magic!r}")
        self._at = 4
        version = self._scalar("I")
        if version not in VERSIONS:
            raise GgufError(f"{path} is GGUF of version {version}: versions {VERSIONS} are read, little-endian")
        tensors, keys = self._scalar("Q"), self._scalar("Q")
        self.metadata = {key: self._value(self._scalar("I"), key) for key in (self._string() for _ in range(keys))}
        self.tensors = self._read_tensors(tensors)

    def release_pages(self) -> None:
        self._bytes.madvise(mmap.MADV_DONTNEED)

    def _take(self, size: int) -> bytes:
        start, self._at = self._at, self._at + size
        if size < 0 or self._at > len(self._bytes):
            raise GgufError(f"{self._path} is cut off within its header: download it again")
        return self._bytes[start : self._at]

    def _scalar(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}")))[0]

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8", "surrogateescape")

    def _value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            if kind not in SCALARS:
                raise GgufError(f"{self._path}: {key} has the unknown type {kind}")
            return self._scalar(SCALARS[kind])
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == STRING:
            return self._strings(count)
        if kind in SCALARS:
            letter = SCALARS[kind]
            if count > len(self._bytes):  # before memory for so many is reserved
                raise GgufError(f"{self._path} is cut off within {key}: download it again")
            return list(struct.unpack(f"<{count}{letter}", self._take(count * struct.calcsize(f"<{letter}"))))
        raise GgufError(f"{self._path}: {key} is an array of the type {kind}, which is not read")

    def _strings(self, count: int) -> list[str]:
        """Many short strings: without a call each."""
        strings, data, at, end = [], self._bytes, self._at, len(self._bytes)
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > end:
                break
            start = at + 8
            at = start + unpack(data, at)[0]
            strings.append(data[start:at].decode("utf-8", "surrogateescape"))
        if at > end or len(strings) < count:
            raise GgufError(f"{self._path} is cut off within its header: download it again")
        self._at = at
        return strings

    def _read_tensors(self, count: int) -> dict[str, GgufTensor]:
        infos = [self._tensor_info() for _ in range(count)]
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise GgufError(f"{self._path}: general.alignment is {alignment!r}, and not a positive number")
        start = math.ceil(self._at / alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                raise GgufError(f"{self._path} has the tensor {name} twice")
            tensors[name] = self._mapped(name, shape, kind, start + offset)
        return tensors

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._string(), self._scalar("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise GgufError(f"{self._path}: the tensor {name} has {dimensions} dimensions")
        sizes = [self._scalar("Q") for _ in range(dimensions)]
        return name, tuple(reversed(sizes)), self._scalar("I"), self._scalar("Q")

    def _mapped(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
        if kind not in BLOCK_TYPES:
            raise GgufError(
                f"{self._path}: the tensor {name} is of the type {UNREAD_TYPES.get(kind, kind)}, not read here"
            )
        block = BLOCK_TYPES[kind]
        width, rows = shape[-1], math.prod(shape[:-1])
        if width % block.size:
            raise GgufError(
                f"{self._path}: the tensor {name} has rows of {width}, no multiple of {block.size} ({block.name})"
            )
        row_bytes = width // block.size * block.bytes
        if start + rows * row_bytes > len(self._bytes):
            raise GgufError(f"{self._path} is cut off within the tensor {name}: download it again")
        return GgufTensor(name, block, shape, row_bytes, start, self._bytes)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:36]}..."

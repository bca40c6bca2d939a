"""The size and the shape of the product, read from its syntax trees: what `make house` prints.

A room is a folder directly below `paceline` or `services`, or a file beside these folders. The gateway is one room, and
a house of its own with rooms of the same kind. An arrow is an import from one room to another, wherever in a file it
stands. A circle is a set of rooms that import one another, by detours too.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

PRODUCT = ("paceline", "services")
GENERATED = "paceline/v1"
GATEWAY = "services/gateway"
LONG_FUNCTION, SMALL_FILE = 40, 50  # lines
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}

Arrows = Mapping[str, set[str]]


class Source(NamedTuple):
    """A Python file: its path below the root, its text, and its syntax tree."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    def code_lines(self) -> int:
        """Lines that are neither blank nor comment nor docstring; a text beside a constant or a field is one, too."""
        found: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in NO_CODE:
                found.update(range(token.start[0], token.end[0] + 1))
        for node in ast.walk(self.tree):
            if _is_text(node):
                found.difference_update(range(node.lineno, node.end_lineno + 1))
        return len(found)

    def imported(self) -> Iterator[tuple[str, ...]]:
        """The parts of every imported name; of `from a import b`, a and b."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{each.name}" for each in node.names]
            else:
                continue
            yield from (tuple(name.replace("paceline_services", "services").split(".")) for name in names)

    def is_small(self) -> bool:
        only_text = self.path.name == "__init__.py" and all(map(_is_text, self.tree.body))
        return self.lines <= SMALL_FILE and not only_text


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def read(root: Path, *folders: str) -> list[Source]:
    """All Python files below these folders, but for generated ones."""
    paths = [path.relative_to(root) for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    texts = {path: (root / path).read_text(encoding="utf-8") for path in paths if not path.is_relative_to(GENERATED)}
    return [Source(path, text, ast.parse(text)) for path, text in texts.items()]


def figures(root: Path) -> dict[str, object]:
    """The line of `make house`, for the checkout in `root`."""
    sources = read(root, *PRODUCT)
    product, gateway = arrows(sources, PRODUCT), arrows(sources, [GATEWAY])
    all_circles = [(house, circle) for house in (product, gateway) for circle in circles(house)]
    lines = sum(source.lines for source in sources)
    return {
        "rooms": len(product),
        "gateway_rooms": len(gateway),
        "gateway_arrows": sum(map(len, gateway.values())),
        "longest_chain": longest_chain(product),
        "imports_up": sum(len(house[room] & circle) for house, circle in all_circles for room in circle),
        "circles": len(all_circles),
        "deepest_bases": deepest_bases(sources),
        "classes": sum(isinstance(node, ast.ClassDef) for source in sources for node in ast.walk(source.tree)),
        "long_functions": sorted(long_functions(sources)),
        "small_files": sum(source.is_small() for source in sources),
        "product_lines": lines,
        "test_lines": sum(source.lines for source in read(root, "tests")),
        "code_share": round(sum(source.code_lines() for source in sources) / max(lines, 1), 3),
    }


def arrows(sources: Sequence[Source], houses: Sequence[str]) -> Arrows:
    """Which rooms each room of these houses imports."""
    rooms = {source.path: _room(source.path.with_suffix("").parts, houses) for source in sources}
    found: dict[str, set[str]] = {room: set() for room in rooms.values() if room}
    for source in sources:
        if room := rooms[source.path]:
            found[room] |= {_room(name, houses) for name in source.imported()} & found.keys() - {room}
    return found


def _room(parts: tuple[str, ...], houses: Sequence[str]) -> str:
    """The room of a file, or of what an import names; "" outside these houses and for a house's own `__init__.py`."""
    for house in houses:
        depth = len(house.split("/"))
        if parts[depth:] not in ((), ("__init__",)) and "/".join(parts[:depth]) == house:
            return "/".join(parts[: depth + 1])
    return ""


def _reachable(house: Arrows, start: str) -> set[str]:
    found: set[str] = set()
    coming = [start]
    while coming:
        new = house[coming.pop()] - found
        found |= new
        coming += new
    return found


def circles(house: Arrows) -> set[frozenset[str]]:
    reachable = {room: _reachable(house, room) for room in house}
    return {
        frozenset(other for other in found if room in reachable[other])
        for room, found in reachable.items()
        if room in found
    }


def longest_chain(house: Arrows) -> int:
    """Rooms on the longest path of arrows. A circle is one step of a path."""
    joined = {room: circle for circle in circles(house) for room in circle}
    floors: dict[str, int] = {}

    def floor(room: str) -> int:
        if room not in floors:
            circle = joined.get(room, frozenset({room}))
            below = set().union(*(house[each] for each in circle)) - circle
            floors[room] = 1 + max(map(floor, below), default=0)
        return floors[room]

    return max(map(floor, house), default=0)


def deepest_bases(sources: Sequence[Source]) -> int:
    """Classes of ours on the longest way from a class to its first base; a library's are not counted."""
    bases: dict[str, set[str]] = {}
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, set()).update(map(_base_name, node.bases))

    def depth(name: str) -> int:
        return 1 + max((depth(base) for base in bases[name] & bases.keys() - {name}), default=0)

    return max(map(depth, bases), default=0)


def _base_name(base: ast.expr) -> str:
    """`Base` of `Base`, `module.Base` and `Base[T]`."""
    return ast.unparse(base).partition("[")[0].rpartition(".")[2]


def long_functions(sources: Sequence[Source]) -> Iterator[str]:
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > LONG_FUNCTION:
                    yield f"{source.path}: {node.name} ({lines})"

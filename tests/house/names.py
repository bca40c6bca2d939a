"""Names in the product: which words they may not use, which stand twice, and where documents say that they are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from tests.house.figures import PRODUCT, read

ROOT = Path(__file__).resolve().parents[2]
DENIED = frozenset(
    (
        *("answers", "beside", "blows", "brings", "cacheless", "callers", "credit", "entrance", "follower", "growing"),
        *("guard", "habits", "haste", "hear", "heard", "hearsay", "intake", "lane", "law", "laws", "lend", "lent"),
        *("meeting", "news", "orders", "outlook", "place", "replies", "room", "said", "say", "stay", "submission"),
        *("submissions", "tally", "tell", "told", "trial", "walk", "whoever", "wish", "witness", "worth"),
    )
)
"""Words of the first build's private language: docs/glossary.md has the field's."""
PUBLIC = frozenset({"beside", "answers", "beside_s"})
"""Keys that users write or read: of configurations and of benchmarks' last lines."""


def modules() -> Iterator[tuple[Path, ast.Module]]:
    """Every Python file of the product and of the lab, parsed."""
    yield from ((source.path, source.tree) for source in read(ROOT, *PRODUCT, "paceline_lab"))


def repeated_class_names() -> dict[str, list[Path]]:
    """Public classes of the same name, and where they are."""
    classes = ((node.name, path) for path, tree in modules() for node in tree.body if isinstance(node, ast.ClassDef))
    return _repeated((name, path) for name, path in classes if not name.startswith("_"))


def _repeated(named: Iterable[tuple[str, Path]]) -> dict[str, list[Path]]:
    places: dict[str, list[Path]] = {}
    for name, path in named:
        places.setdefault(name, []).append(path)
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def denied_names() -> list[str]:
    """Every name that our code gives and that has a denied word in it, as `path:line name`."""
    found = []
    for path, tree in modules():
        found += [f"{path}: file" for word in words(path.stem) if word in DENIED]
        given = {(name, line) for name, line in given_names(tree) if name not in PUBLIC}
        found += [f"{path}:{line} {name}" for name, line in sorted(given) if DENIED & set(words(name))]
    return found


def misplaced_names(table: Iterable[str]) -> Iterator[str]:
    """Functions and classes that a row of a Markdown table names in code, but which none of the row's files has.

    A row's last cell has files, by the ends of their paths, and functions; or files alone, and the cell before it the
    functions.
    """
    sources = read(ROOT, *PRODUCT)
    for row in table:
        *_, functions, last_cell = (re.findall(r"`([^`]+)`", cell) for cell in row.split(" | "))
        ends = [name for name in last_cell if name.endswith(".py")]
        named = functions if ends == last_cell else last_cell
        texts = {end: [source.text for source in sources if f"/{source.path}".endswith(f"/{end}")] for end in ends}
        yield from (f"no file {end}" for end, found in texts.items() if not found)
        code = "\n".join(chain.from_iterable(texts.values()))
        for name in named:
            last = name.rpartition(".")[2]
            if name not in ends and last.isidentifier() and not re.search(rf"(def|class) {last}\b", code):
                yield f"{name} is not in {', '.join(ends)}"


def words(name: str) -> list[str]:
    """`hidden_states_sent` and `HiddenStatesSent` are three words."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def given_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno

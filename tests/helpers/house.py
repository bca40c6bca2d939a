"""What the house is made of: product lines by room, and the words that its names may not use. `make lines`."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("paceline", "services")
"""What is installed. Generated stubs and the demo family's weights are no lines of ours."""
SOURCES = (".py", ".hpp", ".cpp")
SERVICE_FILES = {"__init__.py", "__main__.py", "server.py"}
"""File names that several folders may have."""
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


def files(*folders: str) -> list[Path]:
    """Tracked source files below these folders, without generated ones."""
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [Path(line) for line in listed.stdout.splitlines()]
    return [path for path in paths if path.suffix in SOURCES and not path.match("paceline/v1/*")]


def lines() -> dict[str, int]:
    """Product lines by room: a folder of `paceline` or `services`, or the files beside them."""
    counts: Counter[str] = Counter()
    for path in files(*PRODUCT):
        room = "/".join(path.parts[:2]) if len(path.parts) > 2 else path.parts[0]
        counts[room] += len((ROOT / path).read_text(encoding="utf-8").splitlines())
    return dict(sorted(counts.items()))


def modules() -> Iterator[tuple[Path, ast.Module]]:
    """Every Python file of the product and of the lab, parsed."""
    for path in files(*PRODUCT, "paceline_lab"):
        if path.suffix == ".py":
            yield path, ast.parse((ROOT / path).read_text(encoding="utf-8"))


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
    paths = [path for path in files(*PRODUCT) if path.suffix == ".py"]
    for row in table:
        *_, functions, last_cell = (re.findall(r"`([^`]+)`", cell) for cell in row.split(" | "))
        ends = [name for name in last_cell if name.endswith(".py")]
        named = functions if ends == last_cell else last_cell
        texts = {end: [(ROOT / path).read_text() for path in paths if f"/{path}".endswith(f"/{end}")] for end in ends}
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


if __name__ == "__main__":
    rooms = lines()
    for room, count in rooms.items():
        print(f"{count:7,}  {room}")
    tests = sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in files("tests"))
    print(json.dumps({"product_lines": sum(rooms.values()), "test_lines": tests}))

"""Documented names of the standard library: name, signature, first paragraph and source of everything public."""

import ast
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from paceline_lab.training.family.stdlib_corpus import module_name, read_source, source_files

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

COMPILED_MODULES = {
    "builtins": "builtins",
    "_collections": "collections",
    "_csv": "csv",
    "_functools": "functools",
    "_io": "io",
    "_operator": "operator",
    "_random": "random",
    "_socket": "socket",
    "_struct": "struct",
    "_thread": "_thread",
    "array": "array",
    "atexit": "atexit",
    "binascii": "binascii",
    "cmath": "cmath",
    "errno": "errno",
    "gc": "gc",
    "itertools": "itertools",
    "marshal": "marshal",
    "math": "math",
    "posix": "os",
    "select": "select",
    "sys": "sys",
    "time": "time",
    "unicodedata": "unicodedata",
    "zlib": "zlib",
}
"""Modules written in C whose import has no side effects, and the public module of their names."""

PUBLIC_NAMES = {"posixpath": "os.path", "_collections_abc": "collections.abc"}
"""Python files that users know by another name."""

LONGEST_SUMMARY = 600
LONGEST_SOURCE = 1200
"""Limits in characters; longer text counts as missing."""


@dataclass(frozen=True)
class DocumentedName:
    """A documented object. `signature` and `source` are empty where unknown; only modules have `members`."""

    name: str
    module: str
    signature: str
    summary: str
    source: str = ""
    members: tuple[str, ...] = ()
    is_method: bool = False


def documented() -> list[DocumentedName]:
    """Every public module, class, function and method with a docstring, sources first; one entry per name."""
    found: dict[str, DocumentedName] = {}
    for path in source_files():
        for entry in _file_entries(path):
            found.setdefault(entry.name, entry)
    for module, public in COMPILED_MODULES.items():
        for entry in _compiled_entries(importlib.import_module(module), public):
            found.setdefault(entry.name, entry)
    return list(found.values())


def first_paragraph(doc: str | None) -> str:
    """The first paragraph of a docstring, or an empty string if it is missing or too long for an answer."""
    paragraph = inspect.cleandoc(doc or "").strip().split("\n\n")[0].strip()
    return paragraph if len(paragraph) <= LONGEST_SUMMARY else ""


# Reading Python sources


def _file_entries(path: Path) -> Iterator[DocumentedName]:
    module = module_name(path)
    module = PUBLIC_NAMES.get(module, module)
    if any(part.startswith("_") for part in module.split(".")):
        return
    text = read_source(path)
    tree = ast.parse(text)
    exported = _exported_names(path)
    if summary := first_paragraph(ast.get_docstring(tree)):
        members = tuple(node.name for node in _public_definitions(tree.body))
        yield DocumentedName(module, module, "", summary, members=members)
    for node in _public_definitions(tree.body):
        owner = module.rpartition(".")[0] if node.name in exported else module
        yield from _definition_entries(node, owner, text.splitlines())


def _definition_entries(
    node: Definition, owner: str, lines: Sequence[str], *, is_method: bool = False
) -> Iterator[DocumentedName]:
    name = f"{owner}.{node.name}"
    module = owner.rpartition(".")[0] if is_method else owner
    if summary := first_paragraph(ast.get_docstring(node)):
        source = "" if isinstance(node, ast.ClassDef) else _source(node, lines)
        yield DocumentedName(name, module, _signature(name, node), summary, source, is_method=is_method)
    if isinstance(node, ast.ClassDef):
        for child in _public_definitions(node.body):
            if not isinstance(child, ast.ClassDef):
                yield from _definition_entries(child, name, lines, is_method=True)


def _public_definitions(body: Iterable[ast.stmt]) -> list[Definition]:
    return [node for node in body if isinstance(node, Definition) and not node.name.startswith("_")]


def _exported_names(path: Path) -> frozenset[str]:
    """Names of a submodule that its package imports by `from .submodule import ...`."""
    package = path.parent / "__init__.py"
    if path.name == "__init__.py" or not package.exists():
        return frozenset()
    names = _imports(package).get(path.stem, frozenset())
    return frozenset(_public_list(path)) if "*" in names else names


@cache
def _imports(package: Path) -> dict[str, frozenset[str]]:
    """Names that a package's `__init__.py` imports, by the last part of their module's name."""
    names: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(read_source(package))):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = node.module.rpartition(".")[2]
            names.setdefault(module, set()).update(alias.name for alias in node.names)
    return {module: frozenset(found) for module, found in names.items()}


def _public_list(path: Path) -> list[str]:
    """The strings of a file's `__all__` assignments."""
    assignments = [node for node in ast.parse(read_source(path)).body if isinstance(node, ast.Assign)]
    lists = [node.value for node in assignments if "__all__" in map(ast.unparse, node.targets)]
    constants = (item for value in lists for item in ast.walk(value) if isinstance(item, ast.Constant))
    return [item.value for item in constants if isinstance(item.value, str)]


def _signature(name: str, node: Definition) -> str:
    if isinstance(node, ast.ClassDef):
        makers = [child for child in node.body if isinstance(child, ast.FunctionDef) and child.name == "__init__"]
        return f"class {name}({_arguments(makers[0]) if makers else ''})"
    prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{prefix}{name}({_arguments(node)})"


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    text = ast.unparse(node.args)
    for receiver in ("self", "cls"):
        if text == receiver or text.startswith(f"{receiver}, "):
            return text[len(receiver) :].removeprefix(", ")
    return text


def _source(node: Definition, lines: Sequence[str]) -> str:
    source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return inspect.cleandoc("\n" + source) if len(source) <= LONGEST_SOURCE else ""


# Compiled modules


def _compiled_entries(module: ModuleType, public: str) -> Iterator[DocumentedName]:
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or isinstance(value, ModuleType) or not callable(value):
            continue
        qualified = name if public == "builtins" else f"{public}.{name}"
        yield from _object_entry(value, qualified, public)
        if isinstance(value, type) and not issubclass(value, BaseException):
            for method, function in sorted(vars(value).items()):
                if not method.startswith("_") and callable(function):
                    yield from _object_entry(function, f"{qualified}.{method}", public, is_method=True)


def _object_entry(
    value: Callable[..., object], name: str, module: str, *, is_method: bool = False
) -> Iterator[DocumentedName]:
    doc = inspect.getdoc(value) or ""
    call, _, rest = doc.partition("\n")
    if not _is_call(call, name):
        call, rest = "", doc
    if summary := first_paragraph(rest.strip() or call):
        yield DocumentedName(name, module, _compiled_signature(value, name) or call, summary, is_method=is_method)


def _is_call(line: str, name: str) -> bool:
    """Whether a docstring's first line is a signature, as in `max(iterable, *[, default=obj]) -> value`."""
    return line.startswith(name.rpartition(".")[2] + "(")


def _compiled_signature(value: Callable[..., object], name: str) -> str:
    try:
        arguments = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    return name + arguments.replace("(self, /, ", "(").replace("(self, /)", "()")

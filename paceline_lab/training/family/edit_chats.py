"""Chats about small edits of code: most of an answer is a copy of the code in the question.

The functions come from the training text or from the held-out files. Each edit can be checked without understanding the
code: a name, a parameter, a comment, a copy.
"""

import ast
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from textwrap import dedent

from paceline_lab.training.family.docstring_chats import Chat

LINES = range(5, 22)
LONGEST = 800
"""Most characters of a function."""

NEW_NAMES = (
    "amount batch buffer bundle chunk client column counter cursor delta detail digest draft element entry extent "
    "factor field figure flavor folder frame gauge glyph handle harbor header index intake kernel label layer ledger "
    "limit marker matter member metric mirror module needle notice number object offset option origin packet page part "
    "payload pivot pointer portion prefix quantity quota range reading record region remark report result sample scale "
    "segment sequence series signal source span stage static subject symbol table ticket token total trace unit value "
    "vector volume weight window wrapper yield_ zone"
)
COMMENTS = (
    "checked by hand",
    "keep in step with the documentation",
    "moved here from the old module",
    "not safe to call twice",
    "see the tests for examples",
    "slow for large inputs",
)

Edit = tuple[str, str]
"""The instruction, and the edited code."""


def edits(sources: Iterable[str], count: int, seed: int) -> list[Chat]:
    """`count` chats about functions of these sources, or as many as they allow."""
    rng = random.Random(seed)
    functions = [function for source in sources for function in _functions(source)]
    rng.shuffle(functions)
    found = (chat for code in functions * 4 if (chat := _chat(code, rng)))
    return [chat for chat, _ in zip(found, range(count), strict=False)]


def _functions(source: str) -> Iterator[str]:
    """Functions and methods of a suitable size, dedented."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            code = dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if code.count("\n") in LINES and len(code) <= LONGEST and "```" not in code and _stands_alone(code):
                yield code


def _stands_alone(code: str) -> bool:
    """Not if a string in it reaches the left margin, so that it could not be moved there."""
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return code.isascii() and code.startswith("def ")


def _chat(code: str, rng: random.Random) -> Chat | None:
    edit = rng.choice(EDITS)(code, rng)
    if edit is None:
        return None
    asked, changed = edit
    return [
        {"role": "user", "content": f"{asked}\n\n```python\n{code}\n```"},
        {"role": "assistant", "content": f"```python\n{changed}\n```"},
    ]


def _renamed(code: str, rng: random.Random) -> Edit | None:
    """Rename a parameter or variable."""
    names = _variables(code)
    if not names:
        return None
    old, new = rng.choice(names), _unused(code, rng)
    asked = rng.choice(
        ("Rename `{old}` to `{new}`:", "Rename `{old}` to `{new}` in this code:", "Call `{old}` `{new}`:")
    )
    return asked.format(old=old, new=new), re.sub(rf"\b{old}\b", new, code)


def _variables(code: str) -> Sequence[str]:
    """Parameters and variables that occur more than once and whose name has one meaning: it is no attribute, keyword of
    another function, global, function, or part of a string literal."""
    nodes = list(ast.walk(ast.parse(code)))
    used = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    others = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    others |= {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg is not None}
    others |= {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    others |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return sorted(n for n in own - others - {"self", "cls", "_"} if used[n] > 1 and not _spells_strings(n, code))


def _spells_strings(name: str, code: str) -> bool:
    """Whether the name occurs as a string prefix, an escape or a conversion: `b"`, `\\n`, `%s`, `!r`."""
    return re.search(rf"""[\\%!]{name}\b|\b{name}['"]""", code) is not None


def _unused(code: str, rng: random.Random) -> str:
    """A new name that does not occur in the code."""
    return rng.choice([name for name in NEW_NAMES.split() if not re.search(rf"\b{name}\b", code)])


def _with_parameter(code: str, rng: random.Random) -> Edit | None:
    """Add a last parameter."""
    header, rest = code.split("\n", 1)
    if not header.endswith("):") or "*" in header:
        return None
    parameter = f"{_unused(code, rng)}={rng.choice(('None', '0', '1', 'True', 'False'))}"
    joint = "" if header.endswith("():") else ", "
    return f"Add the parameter `{parameter}`:", f"{header[:-2]}{joint}{parameter}):\n{rest}"


def _with_comment(code: str, rng: random.Random) -> Edit:
    comment = rng.choice(COMMENTS)
    return f"Add the comment `{comment}` above the function:", f"# {comment}\n{code}"


def _with_prefix(code: str, rng: random.Random) -> Edit | None:
    """Rename a function that does not call itself."""
    name = code[len("def ") :].split("(")[0].rstrip()
    if any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(ast.parse(code))):
        return None
    new = f"{_unused(code, rng)}_{name.strip('_')}"
    return f"Rename the function to `{new}`:", code.replace(f"def {name}", f"def {new}", 1)


def _unchanged(code: str, rng: random.Random) -> Edit:
    return rng.choice(("Repeat this code:", "Copy this code without any change:")), code


EDITS: Sequence[Callable[[str, random.Random], Edit | None]] = (
    _renamed,
    _renamed,
    _with_parameter,
    _with_comment,
    _with_prefix,
    _unchanged,
)

"""GBNF, llama.cpp's grammars, as Lark."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark


def is_lark(text: str) -> bool:
    """Whether a grammar is Lark. GBNF writes `::=` behind a rule's name, and its first rule is `root`."""
    return re.search(r"(?m)^\s*start\s*:(?!:=)", text) is not None


def lark_of(text: str) -> str:
    """The grammar in Lark. Raises errors of many types if it is no GBNF."""
    return str(gbnf_to_lark(_PART.sub(_readable, text)))


def _readable(part: re.Match[str]) -> str:
    """A part of GBNF as llguidance reads it."""
    if part["name"]:
        return f"{part['name']}-rule" if part["name"].lower() == "start" else part["name"]  # Lark's `start` is `root`
    return part[0] if part["comment"] else _ESCAPE.sub(_character, part[0])


def _character(escape: re.Match[str]) -> str:
    """An escape of a code point as its character; ASCII stays escaped, for it may mean something in a class."""
    if not (digits := escape["short"] or escape["long"]):
        return escape[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"{escape[0]} is no character")
    return f"\\x{code:02x}" if code < 0x100 else chr(code)


_PART = re.compile(
    r"""
    (?P<comment>\#[^\r\n]*)
    | "(?:\\.|[^"\\])*"
    | \[(?:\\.|[^\]\\])*\]
    | (?P<name>[\w-]+)
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:u(?P<short>[0-9a-fA-F]{4})|U(?P<long>[0-9a-fA-F]{8})|.)", re.DOTALL)

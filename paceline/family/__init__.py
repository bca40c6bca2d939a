"""The models that ship with the package: a small target that knows the standard library, and its draft."""

from pathlib import Path

NAMES = ("pydoc", "pydoc-draft")
"""The target, and the draft distilled from it; both share one tokenizer."""
HEADS: dict[str, str] = {}
"""By method, heads that were trained for the target."""


def path(name: str) -> Path:
    """The folder of a shipped model, as transformers and tokenizers read it."""
    if name not in (*NAMES, *HEADS.values()):
        raise KeyError(f"no model named {name!r} ships with paceline; there are {', '.join(NAMES)}")
    return Path(__file__).parent / name

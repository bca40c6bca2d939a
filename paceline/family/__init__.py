"""The models that ship with the package: a small target that knows the standard library, its drafts, a smaller target
with states, and a head for a target that others published."""

from collections.abc import Mapping
from pathlib import Path

NAMES = ("pydoc", "pydoc-draft")
"""The target, and the draft distilled from it; both share one tokenizer."""
HEADS = {
    "eagle3": "pydoc-eagle3",
    "eagle": "pydoc-eagle",
    "mtp": "pydoc-mtp",
    "medusa": "pydoc-medusa",
    "mlp_speculator": "pydoc-mlp",
}
"""By method, heads that were trained for the target."""
HYBRID = "pydoc-hybrid"
"""A smaller target whose layers keep states; its checkpoint holds a layer for multi-token prediction."""
PUBLISHED_HEADS: Mapping[str, str] = {"smollm2-135m-instruct": "smollm2-135m-eagle3"}
"""By published model, an eagle3 head that was trained for it."""
SHIPPED = (*NAMES, *HEADS.values(), HYBRID, *PUBLISHED_HEADS.values())


def path(name: str) -> Path:
    """The folder of a shipped model, as transformers and tokenizers read it."""
    if name not in SHIPPED:
        raise KeyError(f"no model named {name!r} ships with paceline; there are {', '.join(SHIPPED)}")
    return Path(__file__).parent / name

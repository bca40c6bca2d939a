"""Labels of targets, each KEY=VALUE, and the labels that a request asks for."""

from __future__ import annotations

import re

LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9./_-]{0,62}=[A-Za-z0-9._-]{0,63}")
MAX_LABELS = 16


def parse_labels(text: str) -> frozenset[str]:
    """The labels in `KEY=VALUE,KEY=VALUE`. Raises ValueError."""
    labels = frozenset(part.strip() for part in text.split(",") if part.strip())
    if len(labels) > MAX_LABELS or not all(map(LABEL.fullmatch, labels)):
        raise ValueError(f"labels have to be KEY=VALUE, separated by commas, and at most {MAX_LABELS}")
    return labels

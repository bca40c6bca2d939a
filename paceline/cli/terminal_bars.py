"""Numbers as bars of characters."""

from __future__ import annotations

from collections.abc import Sequence

EIGHTHS = "▁▂▃▄▅▆▇█"
PARTS = " ▏▎▍▌▋▊▉"


def columns(shares: Sequence[float], width: int = 2) -> str:
    """One vertical bar for each share of 1."""
    return " ".join(_column(share) * width for share in shares)


def bar(value: float, most: float, width: int) -> str:
    """A horizontal bar; `most` is `width` characters long."""
    eighths = round(8 * width * value / most) if most > 0 else 0
    return ("█" * (eighths // 8) + PARTS[eighths % 8]).rstrip()


def _column(share: float) -> str:
    return EIGHTHS[min(7, max(0, round(8 * share) - 1))] if share > 0 else "·"

"""Bar charts as SVG, legible on light and dark pages: no background, and colours of medium brightness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

TEXT = "#7d858f"
"""A grey with contrast to white and to black."""
COLOURS = ("#8a8f98", "#3d8fd1", "#d9730d", "#3fa55b", "#b3689b", "#9a8523", "#d1605e", "#3f9799", "#7f6fd0")
WIDTH, LABELS, NOTES = 720, 130, 170
"""Width of the picture, and of the labels and notes on both sides of the bars."""
BAR, GAP, LINE = 16, 6, 20
"""Heights of a bar, of the gap between bars, and of a line of text."""


@dataclass(frozen=True, slots=True)
class BarPart:
    """A part of a bar; `name` decides its colour."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    parts: Sequence[BarPart]
    note: str
    """Text to the right of the bar."""

    @property
    def value(self) -> float:
        return sum(part.value for part in self.parts)


@dataclass(frozen=True, slots=True)
class Panel:
    """Bars with a common scale: the longest fills the width."""

    title: str
    bars: Sequence[Bar]

    @property
    def height(self) -> int:
        return LINE + GAP + len(self.bars) * (BAR + GAP) + LINE // 2


def draw_chart(title: str, panels: Sequence[Panel], legend: Mapping[str, str]) -> str:
    """An SVG document. `legend`: labels by part name, in the order of the colours."""
    colours = dict(zip(legend, COLOURS, strict=False))
    y, inside = 2 * LINE, []
    for key, line in _placed(legend):
        x, row = line
        inside.append(_rectangle(x, y - 10 + row * LINE, 10, 10, colours[key]))
        inside.append(_text(x + 15, y - 1 + row * LINE, legend[key]))
    y += (1 + max((row for _, (_, row) in _placed(legend)), default=0)) * LINE
    for panel in panels:
        inside += _panel(panel, y, colours)
        y += panel.height
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{TEXT}">'
    )
    titled = [f"<title>{escape(title)}</title>", _text(0, 15, title, bold=True)]
    return "\n".join([head, *titled, *inside, "</svg>"]) + "\n"


def _placed(legend: Mapping[str, str]) -> list[tuple[str, tuple[int, int]]]:
    """By key, the x offset and line of its legend entry, at about seven units per character."""
    placed, x, row = [], 0, 0
    for key, text in legend.items():
        width = 40 + 7 * len(text)
        if x and x + width > WIDTH:
            x, row = 0, row + 1
        placed.append((key, (x, row)))
        x += width
    return placed


def _panel(panel: Panel, y: int, colours: Mapping[str, str]) -> list[str]:
    most = max((bar.value for bar in panel.bars), default=0.0) or 1.0
    scale = (WIDTH - LABELS - NOTES) / most
    inside = [_text(0, y + LINE - 6, panel.title, bold=True)]
    y += LINE + GAP
    for bar in panel.bars:
        x = float(LABELS)
        inside.append(_text(LABELS - 8, y + BAR - 4, bar.label, end=True))
        for part in bar.parts:
            inside.append(_rectangle(x, y, part.value * scale, BAR, colours[part.name]))
            x += part.value * scale
        inside.append(_text(x + 6, y + BAR - 4, bar.note))
        y += BAR + GAP
    return inside


def _rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, *, bold: bool = False, end: bool = False) -> str:
    more = ' font-weight="bold"' * bold + ' text-anchor="end"' * end
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(text)}</text>'

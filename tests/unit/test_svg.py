"""Pictures: legible on light and on dark pages, and as long as what they show."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from paceline_lab.bench.svg_chart import BAR, COLOURS, LABELS, NOTES, TEXT, WIDTH, Bar, BarPart, Panel, draw_chart

SVG = "{http://www.w3.org/2000/svg}"
PAGES = {"white": (255, 255, 255), "dark": (13, 17, 23)}
LEGEND = {"a": "alpha", "b": "beta & more"}
PANELS = [
    Panel("one", [Bar("x", [BarPart("a", 10.0), BarPart("b", 30.0)], "40 <ms>"), Bar("y", [BarPart("a", 20.0)], "20")]),
    Panel("two", [Bar("z", [BarPart("b", 0.5)], "0.5")]),
]


def luminance(red: int, green: int, blue: int) -> float:
    """As the WCAG have it."""
    parts = [value / 255 for value in (red, green, blue)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(colour: str, page: tuple[int, int, int]) -> float:
    own = luminance(*(int(colour[i : i + 2], 16) for i in (1, 3, 5)))
    lighter, darker = sorted((own, luminance(*page)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("colour", [TEXT, *COLOURS])
def test_colours_stand_out_on_every_page(colour: str, page: str) -> None:
    """3 is what the WCAG ask of graphics and of large text."""
    assert contrast(colour, PAGES[page]) > 3


def bars() -> list[ElementTree.Element]:
    drawn = ElementTree.fromstring(draw_chart("title", PANELS, LEGEND))
    return [each for each in drawn.iter(f"{SVG}rect") if float(each.get("height", 0)) == BAR]


def test_bars_are_as_long_as_their_values() -> None:
    widths = [float(each.get("width", 0)) for each in bars()]
    assert widths == pytest.approx([w / 40 * (WIDTH - LABELS - NOTES) for w in (10, 30, 20, 40)], abs=0.1)


def test_parts_follow_one_another() -> None:
    first, second = bars()[:2]
    assert float(second.get("x", 0)) == pytest.approx(float(first.get("x", 0)) + float(first.get("width", 0)), abs=0.1)
    assert first.get("y") == second.get("y")


def test_a_part_has_its_colour_in_the_legend_too() -> None:
    drawn = ElementTree.fromstring(draw_chart("title", PANELS, LEGEND))
    colours = [each.get("fill") for each in drawn.iter(f"{SVG}rect")]
    assert colours == [*COLOURS[:2], COLOURS[0], COLOURS[1], COLOURS[0], COLOURS[1]]


def test_nothing_lies_behind_and_nothing_sticks_out() -> None:
    drawn = ElementTree.fromstring(draw_chart("title", PANELS, LEGEND))
    height = float(drawn.get("height", 0))
    for each in drawn.iter(f"{SVG}rect"):
        assert float(each.get("height", 0)) <= BAR
        assert float(each.get("y", 0)) + float(each.get("height", 0)) <= height
        assert float(each.get("x", 0)) + float(each.get("width", 0)) <= WIDTH


def test_text_is_escaped_and_complete() -> None:
    drawn = ElementTree.fromstring(draw_chart("a < b", PANELS, LEGEND))
    texts = [each.text for each in drawn.iter(f"{SVG}text")]
    assert {"a < b", "one", "two", "x", "y", "z", "40 <ms>", "beta & more"} <= set(texts)


def test_a_legend_that_is_too_long_goes_on_below() -> None:
    legend = {str(i): "a name of some length" for i in range(9)}
    drawn = ElementTree.fromstring(draw_chart("title", [], legend))
    places = [(float(each.get("x", 0)), float(each.get("y", 0))) for each in drawn.iter(f"{SVG}rect")]
    assert len({y for _, y in places}) > 1
    assert len(set(places)) == len(legend)
    assert all(x + 15 + 7 * 21 <= WIDTH for x, _ in places)


def test_nothing_is_drawn_of_nothing() -> None:
    assert "<rect" not in draw_chart("title", [Panel("empty", [])], {})

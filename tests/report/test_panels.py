import re
import xml.etree.ElementTree as ElementTree

import pytest

from wellcond.report.figures import Axis, Series
from wellcond.report.panels import Panel, panels_svg

SVG = "{http://www.w3.org/2000/svg}"


def draw(*panels, **options):
    found = [Panel(x="n", y=Axis(f"panel {index}", log=True), lines=lines) for index, lines in enumerate(panels)]
    return ElementTree.fromstring(panels_svg(found, **{"title": "Cost", **options}))


def texts(root):
    return [element.text for element in root.iter(f"{SVG}text")]


def strokes(root):
    """Colour and dashes of every line of the panels, from left to right."""
    return [path.get("style") for path in root.iter(f"{SVG}path")]


def test_panels_stand_next_to_each_other_with_one_legend():
    lines = [Series("one", [1, 2], [1.0, 2.0]), Series("two", [1, 2], [3.0, 4.0], dashed=True)]
    root = draw(lines, lines)
    assert {"panel 0", "panel 1", "Cost"} <= set(texts(root))
    assert texts(root).count("one") == texts(root).count("two") == 1
    first, second = (group.get("transform") for group in root.findall(f"{SVG}g"))
    shift = float(re.findall(r"[\d.]+", second)[0])
    assert first == "translate(0 0)"
    widths = [float(panel.get("width")) for panel in root.iter(f"{SVG}svg")]
    assert shift >= widths[1]  # the root comes first
    assert widths[0] >= shift + widths[2]


def test_a_line_looks_the_same_in_every_panel_also_where_another_is_missing():
    one, two = Series("one", [1, 2], [1.0, 2.0]), Series("two", [1, 2], [3.0, 4.0], dashed=True)
    first, second, alone = strokes(draw([one, two], [two]))
    assert alone == second != first
    assert "dasharray" in alone


def test_notes_and_points_that_cannot_be_drawn_stand_below_and_none_leaves_the_picture():
    long = "word " * 60
    root = draw([Series("one", [1, 2], [0.0, 2.0])], notes=[long, "short"])
    said = texts(root)
    assert "one: 1 of 2 points are not drawn (1 without a place on a logarithmic axis)." in " ".join(map(str, said))
    assert "short" in said
    wrapped = [text for text in said if text.startswith("word")]
    assert " ".join(wrapped) == long.strip()
    assert len(wrapped) > 1
    _, top, _, height = map(float, root.get("viewBox").split())
    assert all(float(text.get("y")) < top + height for text in root.iter(f"{SVG}text"))


def test_no_panels_are_a_mistake():
    with pytest.raises(ValueError, match="no panels"):
        panels_svg([], title="Cost")

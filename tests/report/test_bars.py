import math
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from wellcond.report.bars import Bar, bar_chart

GROUPS = {
    "CIFAR-10": [Bar(name="both", value=90.0, low=89.0, high=91.0), Bar(name="no sa", value=60.0, mark=68.0)],
    "Tiny": [Bar(name="both", value=45.0), Bar(name="no sa", value=math.nan)],
}
SVG = "{http://www.w3.org/2000/svg}"


def bars(chart):
    root = ElementTree.fromstring(chart.svg)
    found = {}
    for group in root.iter(f"{SVG}g"):
        title, rect = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        if title is not None and rect is not None:
            found[title.text.rpartition(":")[0]] = {key: float(rect.get(key)) for key in ("x", "y", "width", "height")}
    return found


def test_heights_are_in_proportion_and_bars_do_not_overlap():
    found = bars(bar_chart(GROUPS, title="t", y="%"))
    assert list(found) == ["CIFAR-10, both", "CIFAR-10, no sa", "Tiny, both"]
    heights = [found[name]["height"] for name in found]
    assert heights[0] / heights[1] == pytest.approx(90 / 60, rel=0.01)
    assert heights[0] / heights[2] == pytest.approx(90 / 45, rel=0.01)
    ordered = sorted(found.values(), key=lambda bar: bar["x"])
    assert all(a["x"] + a["width"] <= b["x"] for a, b in pairwise(ordered))


def test_what_cannot_be_drawn_is_named_and_kept():
    chart = bar_chart(GROUPS, title="t", y="top-1, %", mark="the paper")
    assert "Tiny, no sa" in chart.notes[0]
    assert chart.csv.splitlines() == [
        'group,bar,"top-1, %",low,high,mark',
        "CIFAR-10,both,90,89,91,",
        "CIFAR-10,no sa,60,-Infinity,Infinity,68",
        "Tiny,both,45,-Infinity,Infinity,",
        "Tiny,no sa,NaN,-Infinity,Infinity,",
    ]
    assert "the paper" in chart.svg
    assert not bar_chart({"a": [Bar(name="b", value=1.0)]}, title="t", y="y").notes


def test_limits_hold_whatever_an_interval_says():
    wide = {"a": [Bar(name="b", value=50.0, low=-400.0, high=600.0)]}
    inside = bars(bar_chart(wide, title="t", y="%", limits=(0.0, 100.0)))["a, b"]
    beyond = bars(bar_chart(wide, title="t", y="%"))["a, b"]
    assert inside["height"] > 4 * beyond["height"]


def test_no_bars_and_two_of_one_name_raise():
    with pytest.raises(ValueError, match="no bars"):
        bar_chart({}, title="t", y="y")
    with pytest.raises(ValueError, match="same name"):
        bar_chart({"a": [Bar(name="b", value=1.0), Bar(name="b", value=2.0)]}, title="t", y="y")

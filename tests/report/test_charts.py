import json
import math
import re
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellcond.report.charts import (
    Axis,
    Shaded,
    altair,
    can_draw,
    grid,
    heat_ends,
    line_chart,
    looks_of,
    plain_lines,
    svg,
    titled,
)
from wellcond.report.colors import COLORS, HEAT, INK_ON, dark_of_light

HOSTILE = ['a, "b"', "</script><script>alert(1)</script>", "line\nbreak", "<b>κ</b>", "=1+1", "7"]


def chart(points, *, names=("a",), title="T", y=None, **more):
    rows = [{"run": name, "step": step, "loss": value} for name in names for step, value in points]
    axes = {"x": Axis("step"), "y": y or Axis("loss")}
    return line_chart(rows, title=title, by="run", looks=looks_of(names), **axes, **more)


def embedded(html):
    """What a figure hands to the script."""
    return [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)]


@given(st.lists(st.floats()), st.booleans(), st.none() | st.floats(0.01, 100))
def test_an_axis_has_room_for_all_that_can_be_drawn(values, log, least):
    axis = Axis("y", log=log, least=least)
    low, high = axis.domain(values)
    assert math.isfinite(low)
    assert math.isfinite(high)
    assert low < high or max(map(abs, filter(axis.drawable, values))) > 1e14  # where a hundredth is no step
    for value in filter(axis.drawable, values):
        assert low <= value * (1 + 1e-9) + 1e-300 or low <= value
        assert value <= high or math.isclose(value, high, rel_tol=1e-9)


def test_noise_does_not_fill_an_axis():
    low, high = Axis("loss").domain([2.301, 2.302])
    assert high - low > 0.2
    assert Axis("log_kappa", least=3.0).domain([6.0, 6.1]) == pytest.approx([4.55, 7.55])
    assert Axis("top1", least=0.5).domain([0.01, 0.02])[0] == 0  # a share is not below 0
    assert Axis("y").domain([]) == [0, 1]
    assert Axis("y", log=True).domain([1.0, 1.0]) == pytest.approx([10**-0.25, 10**0.25])


def test_colours_have_round_steps_and_a_least_span():
    assert heat_ends([6.0, 6.1]) == (6, 10.5)
    assert heat_ends([5.2, math.nan, 15.9, math.inf]) == (5, 18.5)
    assert heat_ends([math.nan])[0] == 0


def test_the_csv_has_every_row_and_the_notes_what_is_not_drawn():
    found = chart([(0, 1.0), (1, math.nan), (2, math.inf), (3, 1e-9)])
    assert found.csv == "run,step,loss\na,0,1\na,1,NaN\na,2,Infinity\na,3,1e-09\n"
    assert found.notes == ["a: 2 of 4 points cannot be drawn on these axes."]
    assert chart([(0, 1.0), (1, 0.0)], y=Axis("loss", log=True)).notes
    with pytest.raises(ValueError, match="'T' has no rows"):
        chart([])


def test_hostile_names_stay_text():
    html = chart([(0, 1.0)], names=HOSTILE, title="</title>").figure()
    assert "<script>alert" not in html
    assert html.count("<script") == html.count("</script>") == 1
    (content,) = embedded(html)
    assert content["parse"] == {"run": "string", "step": "number", "loss": "number"}  # a run may be called 7
    assert "&lt;b&gt;κ&lt;/b&gt;" in html


def test_small_multiples_have_one_legend():
    one, two, alone = (chart([(0, 1.0)], names=names) for names in (("a", "b"), ("a", "b", "c"), ("a",)))
    html = grid(one, two, None, alone)
    assert html.count('class="legend"') == 1
    assert re.findall('data-line="(.)"', html) == ["a", "b", "c"]
    assert grid(one).count('class="legend"') == 1
    assert 'class="legend"' not in grid(alone)


def test_a_band_says_who_lies_there():
    found = chart([(0, 5.0)], band=Shaded(3.0, 9.0, "where others lie"))
    assert "Shaded: where others lie." in found.caption
    assert found.spec["data"] == {"name": "rows"}  # the page fills no other
    low, high = found.spec["layer"][1]["encoding"]["y"]["scale"]["domain"]
    assert low <= 3
    assert high >= 9


def test_a_picture_has_its_title_and_its_names():
    rows = [{"line": name, "n": 2**k, "ms": 10.0**k} for name in ("a", "b") for k in range(5)]
    x, y = Axis("n", log=True, base=2), Axis("ms", log=True)
    drawing = plain_lines(rows, x=x, y=y, by="line", looks=looks_of(["a", "b"]), width=300, height=200)
    text = svg(titled(drawing, "Cost & time", "first note", "second note"))
    for word in ("Cost &amp; time", "first note", "second note", ">a<", ">b<", ">16<"):
        assert word in text


def test_without_altair_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(ValueError, match="altair is not installed: pip install altair vl-convert-python"):
        altair()
    monkeypatch.delitem(sys.modules, "altair")
    assert can_draw()


def luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, two):
    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1])
def test_levels_can_be_told_apart_without_colour_and_written_on(scheme):
    fills = [level[scheme] for level in HEAT]
    order = [luminance(fill) for fill in fills]
    assert order == sorted(order, reverse=scheme == 0)
    for level, fill in enumerate(fills):
        assert contrast(fill, COLORS["ink" if level < INK_ON else "paper"][scheme]) >= 4.5
    assert all(contrast(one, two) >= 1.15 for one, two in pairwise(fills))


def test_each_light_colour_has_one_dark_one():
    assert len(dark_of_light()) == len(COLORS) + len(HEAT)

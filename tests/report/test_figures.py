import csv
import io
import math
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellcond.report.colors import COLORS
from wellcond.report.figures import Axis, Series, line_chart, ordered_colors
from wellcond.report.markup import file_stem, to_csv

SVG = "{http://www.w3.org/2000/svg}"


def draw(*lines, **options):
    return line_chart(lines, **{"title": "A chart", "x": "step", "y": "value", **options})


def paths(chart):
    return re.findall(r'<path d="([^"]*)" class="line"', chart.drawing)


def texts(chart):
    return [element.text for element in ElementTree.fromstring(chart.svg).iter(f"{SVG}text")]


def table(chart):
    return list(csv.reader(io.StringIO(chart.csv)))


def test_a_chart_has_its_lines_names_ticks_and_labels():
    chart = draw(Series("one", [0, 1, 2], [0.0, 1.0, 4.0]), Series("two", [0, 1, 2], [4.0, 1.0, 0.0]))
    assert [len(path.split("L")) for path in paths(chart)] == [3, 3]
    assert {"A chart", "step", "value", "one", "two", "0", "2"} <= set(texts(chart))
    assert table(chart) == [["step", "one", "two"], ["0", "0", "4"], ["1", "1", "1"], ["2", "4", "0"]]
    assert not chart.notes


def test_points_lie_where_the_axes_say():
    """The highest value has the smallest y, and equal steps on a log axis are equal steps in pixels."""
    (path,) = paths(draw(Series("a", [1, 2, 3], [1.0, 10.0, 100.0]), y=Axis("value", log=True)))
    points = [tuple(map(float, point.split(","))) for point in path[1:].split("L")]
    (x1, y1), (x2, y2), (x3, y3) = points
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.11)
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.11)
    assert y1 > y2 > y3


def test_a_reversed_axis_runs_from_large_to_small():
    (path,) = paths(draw(Series("a", [1, 2], [1.0, 2.0]), x=Axis("ε", reverse=True)))
    first, second = (float(point.split(",")[0]) for point in path[1:].split("L"))
    assert first > second


@pytest.mark.parametrize(
    ("values", "log", "pieces", "note"),
    [
        ([1, math.nan, 3, 4], False, [1, 2], "a: 1 of 4 points are not drawn (1 NaN)."),
        ([math.inf, 2, -math.inf, 4], False, [1, 1], "a: 2 of 4 points are not drawn (2 infinite)."),
        ([1, 0, -1, 4], True, [1, 1], "a: 2 of 4 points are not drawn (2 without a place on a logarithmic axis)."),
        ([1, 1e305, 3, 4], False, [1, 2], "a: 1 of 4 points are not drawn (1 too large)."),
        ([math.nan, math.inf, 0, 4], True, [1], "(1 NaN, 1 infinite, 1 without a place on a logarithmic axis)."),
    ],
)
def test_what_cannot_be_drawn_leaves_a_gap_a_note_and_its_number(values, log, pieces, note):
    chart = draw(Series("a", range(4), values), y=Axis("value", log=log))
    (path,) = paths(chart)
    assert [len(piece.split("L")) for piece in path.split("M")[1:]] == pieces
    assert chart.notes[0].endswith(note)
    assert note.split(":")[-1].strip() in chart.__html__()
    assert [float(row[1]) for row in table(chart)[1:]] == pytest.approx(values, nan_ok=True)
    assert "nan" not in path.lower()
    assert "inf" not in path.lower()


def test_a_lone_point_is_a_dot():
    assert "<circle" in draw(Series("a", [1], [2.0])).drawing


def test_nothing_but_nan_is_said_in_the_chart():
    chart = draw(Series("a", [1, 2], [math.nan, math.nan]), Series("b", [1], [math.inf]))
    assert "no value can be drawn" in texts(chart)
    assert len(chart.notes) == 2


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "'A chart' has no series"),
        ([Series("a", [], [])], "the series 'a' of 'A chart' is empty"),
        ([Series("a", [1], [1.0, 2.0])], "1 x values, but 2 y values"),
        ([Series("a", [1], [1.0]), Series("a", [1], [2.0])], "have the same name"),
    ],
)
def test_mistakes_are_named(lines, message):
    with pytest.raises(ValueError, match=message):
        draw(*lines)


@given(
    st.lists(
        st.tuples(st.text(max_size=30), st.lists(st.tuples(st.floats(), st.floats()), min_size=1, max_size=8)),
        min_size=1,
        max_size=12,
        unique_by=lambda item: item[0],
    ),
    st.booleans(),
    st.booleans(),
    st.text(max_size=20),
)
def test_any_series_gives_a_well_formed_drawing_without_nan(items, log_x, log_y, title):
    lines = [Series(name, [x for x, _ in points], [y for _, y in points]) for name, points in items]
    chart = line_chart(lines, title=title, x=Axis("x<", log=log_x), y=Axis('"y"', log=log_y))
    root = ElementTree.fromstring(chart.svg)
    for element in root.iter():
        for key in ("d", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy"):
            assert not re.search("nan|inf|e[+-]", element.get(key, ""))
    assert "var(" not in chart.svg
    ElementTree.fromstring(chart.__html__().replace("&nbsp;", " "))


def test_many_or_long_names_stand_below_the_chart():
    few = draw(*(Series(f"run {i}", [0, 1], [i, i]) for i in range(3)))
    many = draw(*(Series(f"run {i}", [0, 1], [i, i]) for i in range(12)))
    long = draw(*(Series(f"a name that is rather long {i}", [0, 1], [i, i]) for i in range(2)))

    def height(chart):
        return int(re.search(r'height="(\d+)"', chart.drawing)[1])

    assert height(few) < height(long) < height(many)
    assert {f"run {i}" for i in range(12)} <= set(texts(many))


def test_names_at_the_ends_do_not_overlap():
    chart = draw(*(Series(f"run {i}", [0, 1], [i, 1.0]) for i in range(6)), Series("low", [0, 1], [0.0, 0.0]))
    root = ElementTree.fromstring(chart.svg)
    heights = sorted(float(e.get("y")) for e in root.iter(f"{SVG}text") if e.text.startswith(("run", "low")))
    assert min(np.diff(heights)) >= 15.9


def test_series_of_different_x_share_one_table():
    assert to_csv("x", [("a", [2, 1, 1], [5.0, 6.0, 7.0]), ("b, c", [3], [math.inf])]) == (
        'x,a,"b, c"\n1,6,\n1,7,\n2,5,\n3,,Infinity\n'
    )


def test_arrays_are_series_too():
    x = np.arange(5, dtype=np.float32)
    assert len(table(draw(Series("a", x, x**2)))) == 6


def test_names_of_files():
    assert file_stem("log κ against ε, “china”/…") == "log-kappa-against-epsilon-china"
    assert file_stem("…") == "figure"


def test_ordered_colours_are_limited():
    assert ordered_colors(2) == ["r1", "r2"]
    with pytest.raises(ValueError, match="draw fewer series"):
        ordered_colors(9)


def luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1])
@pytest.mark.parametrize("name", sorted(COLORS.keys() - {"paper", "panel", "rule"}))
def test_colours_are_readable(name, scheme):
    wanted = 4.5 if name in ("ink", "muted", "accent") else 3.0
    for background in ("paper", "panel"):
        assert contrast(COLORS[name][scheme], COLORS[background][scheme]) >= wanted


def test_lines_without_names_leave_their_room_to_the_plot():
    lines = [Series(name, [512, 2048, 8192], [1.0, 2.0, 3.0]) for name in ("one", "two")]
    named, bare = (draw(*lines, x=Axis("n", log=True, base=2), named=named) for named in (True, False))
    assert {"one", "two"} <= set(texts(named))
    assert not {"one", "two"} & set(texts(bare))
    ends = [max(float(point.split(",")[0]) for point in paths(chart)[0][1:].split("L")) for chart in (named, bare)]
    assert ends[1] > ends[0]
    assert {"512", "2048", "8192"} <= set(texts(bare))

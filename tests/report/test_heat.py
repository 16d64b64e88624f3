import csv
import io
import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellcond.report.colors import HEAT, HEAT_LEVELS
from wellcond.report.heat import NOTHING, Reading, bounds_of, heat_map

SVG = "{http://www.w3.org/2000/svg}"


def draw(*frames, rows=("blocks.0", "blocks.1"), columns=("sa", "+sa"), steps=None, **options):
    steps = range(len(frames)) if steps is None else steps
    return heat_map(frames, steps, rows=rows, columns=columns, title="T", value="log κ", **options)


def cells(chart):
    """(class, text) of every cell, read from the file."""
    groups = [g for g in ElementTree.fromstring(chart.svg).iter(f"{SVG}g") if g.get("class").startswith("cell ")]
    return [(g.get("class").split()[1], g.find(f"{SVG}text").text) for g in groups]


def test_cells_are_coloured_from_low_to_high_and_carry_their_number():
    chart = draw([Reading(4.0), Reading(8.04), Reading(12.0), Reading(16.0)])
    assert cells(chart) == [("h0", "4.0"), ("h3", "8.0"), ("h6", "12.0"), ("h8", "16.0")]


def test_what_is_no_plain_number_is_marked():
    chart = draw(
        [
            Reading(15.9, "ceiling", capped=64),
            Reading(9.0, "ok", capped=1),
            Reading(math.nan, "non_finite"),
            Reading(math.nan, "zero"),
            NOTHING,
            Reading(3.0, "non_finite"),
            Reading(math.inf, "ceiling"),
            Reading(5.0),
        ],
        rows=[f"blocks.{i}" for i in range(4)],
    )
    assert [text for _, text in cells(chart)] == ["≥15.9", "≥9.0", "NaN", "0", "–", "!3.0", "inf", "5.0"]
    assert [kind for kind, _ in cells(chart)] == ["h8", "h4", "bad", "bad", "none", "h0", "bad", "h1"]


def test_frames_share_one_scale_and_the_last_is_drawn():
    first, last = [Reading(v) for v in (0.0, 1.0, 2.0, 3.0)], [Reading(v) for v in (3.0, 6.0, 9.0, 9.0)]
    chart = draw(first, last)
    moving = re.search(r'data-cells="([^"]*)"', chart.drawing)[1].split(";")
    frames = [[tuple(cell.split(" ")) for cell in frame.split(",")] for frame in moving]
    assert frames[-1] == cells(chart)
    assert frames[0] == [("h0", "0.0"), ("h1", "1.0"), ("h2", "2.0"), ("h3", "3.0")]
    assert "data-cells" not in draw(last).drawing


def test_rows_above_the_blocks_have_one_wide_cell():
    chart = draw([Reading(8.6), *[Reading(5.0)] * 4], wide=["tokens"])
    widths = [float(rect.get("width")) for rect in ElementTree.fromstring(chart.svg).iter(f"{SVG}rect")][1:6]
    assert widths[0] > 1.9 * widths[1]
    assert cells(chart)[0] == ("h8", "8.6")


def test_the_csv_holds_what_was_measured_at_every_step():
    frame = [Reading(15.9, "ceiling", capped=3, samples=64), NOTHING, Reading(math.nan, "non_finite"), Reading(1.0)]
    table = list(csv.reader(io.StringIO(draw(frame, frame, steps=(0, 100)).csv)))
    assert table[:3] == [
        ["step", "block", "site", "log κ", "status", "capped", "samples"],
        ["0", "blocks.0", "sa", "15.9", "ceiling", "3", "64"],
        ["0", "blocks.1", "sa", "NaN", "non_finite", "0", "0"],
    ]
    assert [line[0] for line in table[1:]] == ["0"] * 3 + ["100"] * 3


@given(st.lists(st.tuples(st.none() | st.floats(), st.sampled_from(["ok", "ceiling", "zero"])), min_size=4, max_size=4))
def test_any_numbers_give_a_well_formed_drawing(items):
    chart = draw([Reading(*item) for item in items], rows=["<b>&", "x" * 90])
    root = ElementTree.fromstring(chart.svg)
    for element in root.iter():
        for key in ("x", "y", "width", "height"):
            assert not re.search("nan|inf", element.get(key, ""))
    for kind, _ in cells(chart):
        assert kind in {"none", "bad", *(f"h{level}" for level in range(HEAT_LEVELS))}
    ElementTree.fromstring(chart.__html__())


def test_a_long_name_keeps_its_end():
    chart = draw([Reading(1.0)] * 2, rows=["model.encoder.layers.encoder_layer_11"])
    texts = [element.text for element in ElementTree.fromstring(chart.svg).iter(f"{SVG}text")]
    assert any(t.startswith("…") and t.endswith("encoder_layer_11") for t in texts)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="has 4 cells, but a frame has 3"):
        draw([NOTHING] * 3)
    with pytest.raises(ValueError, match="no cells, or not one frame"):
        draw()
    with pytest.raises(ValueError, match="no cells, or not one frame"):
        draw([NOTHING] * 4, steps=(1, 2))


def test_bounds_pass_over_what_is_not_finite():
    assert bounds_of([[NOTHING, Reading(math.nan)], [Reading(2.0), Reading(math.inf), Reading(5.0)]]) == (2.0, 5.0)
    assert bounds_of([[NOTHING]]) == (0.0, 1.0)


def luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1])
def test_levels_can_be_told_apart_without_colour_and_written_on(scheme):
    fills = [luminance(HEAT[f"h{level}"][scheme]) for level in range(HEAT_LEVELS)]
    assert fills == sorted(fills, reverse=scheme == 0)
    for level, fill in enumerate(fills):
        light, dark = sorted((fill, luminance(HEAT[f"k{level}"][scheme])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5
    for one, two in pairwise(fills):
        light, dark = sorted((one, two), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 1.15

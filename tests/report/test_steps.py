import csv
import io
import json
import math
import re
from html import unescape

from hypothesis import given
from hypothesis import strategies as st

from wellcond.report import Axis
from wellcond.report.steps import SteppedLine, slider, stepped_lines, thin


@given(st.lists(st.floats(0, 1), min_size=1, max_size=300), st.integers(3, 50))
def test_thinning_keeps_the_ends_the_order_and_the_worst(weights, most):
    steps = [10 * i for i in range(len(weights))]
    kept = thin(steps, most=most, weight=lambda step: weights[step // 10])
    assert len(kept) == min(most, len(steps))
    assert kept == sorted(set(kept))
    assert {steps[0], steps[-1]} <= set(kept) <= set(steps)
    assert max(weights[step // 10] for step in kept) == max(weights)


def test_a_slider_needs_two_steps():
    assert slider([5]) is None
    written = slider([0, 10, 2000])
    assert json.loads(unescape(re.search(r'data-steps="([^"]*)"', written)[1])) == [0, 10, 2000]
    assert 'max="2" value="2"' in written
    assert "<output>2,000</output>" in written
    assert " hidden" in written  # until a script is there to move it


def chart(*lines, steps=(0, 1)):
    places = [(i, f"blocks.{i}") for i in range(len(lines[0].frames[0]))]
    options = {"places": places, "title": "T", "x": Axis("block", whole=True), "y": "log κ"}
    return stepped_lines(lines, steps, **options)


def test_the_last_step_is_drawn_and_the_axes_have_room_for_all():
    drawn = chart(
        SteppedLine(name="sa", frames=[[1.0, 9.0, 2.0], [3.0, math.nan, math.nan]]),
        SteppedLine(name="mlp", frames=[[1.0, None, 2.0], [3.0, None, math.nan]]),
    )
    scales = json.loads(unescape(re.search(r'data-scales="([^"]*)"', drawn.drawing)[1]))
    assert scales["x"]["values"] == [0, 2]
    low, high = scales["y"]["values"]
    assert low <= 1
    assert high >= 9
    moving = json.loads(unescape(re.search(r'data-moving="([^"]*)"', drawn.drawing)[1]))
    assert moving["frames"] == [[[1, 9, 2], [1, None, 2]], [[3, "NaN", "NaN"], [3, None, "NaN"]]]
    assert drawn.notes == (
        "sa: 2 of 3 points are not drawn (2 NaN).",
        "mlp: 1 of 2 points are not drawn (1 NaN).",
    )


def test_the_csv_has_every_step_and_tells_nan_from_nothing():
    drawn = chart(SteppedLine(name="sa", frames=[[1.0, None], [math.nan, 4.0]]), steps=(0, 50))
    assert list(csv.reader(io.StringIO(drawn.csv))) == [
        ["step", "block", "name", "sa"],
        ["0", "0", "blocks.0", "1"],
        ["0", "1", "blocks.1", ""],
        ["50", "0", "blocks.0", "NaN"],
        ["50", "1", "blocks.1", "4"],
    ]


def test_a_line_without_any_value_is_still_named():
    drawn = chart(
        SteppedLine(name="gone", frames=[[None, None]]), SteppedLine(name="there", frames=[[1.0, 2.0]]), steps=(0,)
    )
    assert ">gone<" in drawn.svg

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellcond.report.axes import Scale, drawable, format_number

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(NUMBERS, min_size=1, max_size=20), st.booleans())
def test_every_drawable_value_lies_within_the_axis(values, log):
    scale = Scale.fit(values, log=log, start=300, end=20, padding=0.04)
    for value in values:
        if drawable(value, log):
            assert 20 - 1e-6 <= scale(value) <= 300 + 1e-6


@given(st.lists(NUMBERS, min_size=1, max_size=20), st.booleans())
def test_ticks_lie_within_the_axis_and_are_told_apart(values, log):
    scale = Scale.fit(values, log=log, start=0, end=100)
    ticks = scale.ticks()
    assert len(ticks) <= 12
    assert all(-1e-6 <= scale(value) <= 100 + 1e-6 for value, _ in ticks)


def test_ticks_are_round():
    def labels(*ends, **options):
        return [label for _, label in Scale.fit(ends, start=0, end=100, log=False, **options).ticks()]

    assert labels(0, 1) == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    assert labels(1, 196) == ["50", "100", "150"]
    assert labels(-3, 3) == ["−3", "−2", "−1", "0", "1", "2", "3"]
    assert labels(0, 0.1) == ["0.00", "0.02", "0.04", "0.06", "0.08", "0.10"]
    assert labels(0, 0.15)[:2] == ["0.000", "0.025"]
    assert labels(0, 3e6)[-1] == "3.00·10⁶"


def test_log_ticks_are_powers_of_ten():
    def labels(*ends):
        return [label for _, label in Scale.fit(ends, start=0, end=100, log=True).ticks()]

    assert labels(3e-4, 1) == ["10⁻³", "10⁻²", "10⁻¹", "1"]
    assert labels(1, 1000) == ["1", "10", "100", "1000"]
    assert labels(1e-12, 1e12) == ["10⁻¹⁰", "10⁻⁵", "1", "10⁵", "10¹⁰"]
    assert labels(2, 60) == ["2", "5", "10", "20", "50"]
    assert labels(2e5, 6e5) == ["2·10⁵", "5·10⁵"]


def test_log_ticks_are_powers_of_another_base():
    def ticks(*ends):
        return Scale.fit(ends, start=0, end=100, log=True).ticks(base=2)

    assert ticks(512, 131_072) == [(512, "2⁹"), (2048, "2¹¹"), (8192, "2¹³"), (32_768, "2¹⁵"), (131_072, "2¹⁷")]
    assert ticks(256, 512) == [(256, "256"), (512, "512")]
    assert ticks(0.2, 1.5) == [(0.25, "2⁻²"), (0.5, "2⁻¹"), (1, "2⁰")]
    assert Scale.fit([0, 10], start=0, end=100, log=False).ticks(base=2)[1] == (2, "2")


@given(st.lists(NUMBERS, min_size=1, max_size=20), st.sampled_from([2, 3, 10]))
def test_powers_of_any_base_lie_within_the_axis(values, base):
    scale = Scale.fit(values, log=True, start=0, end=100)
    ticks = scale.ticks(base=base)
    assert len(ticks) <= 12
    assert all(-1e-6 <= scale(value) <= 100 + 1e-6 for value, _ in ticks)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "ends", [(1e-320, 2e-320), (-1e250, 1e250), (1e-250, 1e250), (1.0, 1 + 1e-16), (1e16, 1e16 + 2)]
)
def test_extreme_ranges_have_a_place_and_ticks(ends, log):
    scale = Scale.fit(ends, log=log, start=0, end=100)
    assert all(0 <= scale(end) <= 100 for end in ends if drawable(end, log))
    assert len(scale.ticks()) <= 12


def test_a_single_value_lies_in_the_middle():
    for value in (5.0, 0.0, -2.0):
        assert Scale.fit([value, math.nan], log=False, start=0, end=100)(value) == pytest.approx(50)
    assert Scale.fit([5.0, 0.0, -1.0], log=True, start=0, end=100)(5.0) == pytest.approx(50)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0541, "0.0541"),
        (3566.88, "3,567"),
        (12.345, "12.3"),
        (-2.5, "−2.50"),
        (1.234e7, "1.23·10⁷"),
        (4.2e-7, "4.20·10⁻⁷"),
        (0.0, "0"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (math.nan, "NaN"),
    ],
)
def test_numbers_for_a_reader(value, text):
    assert format_number(value) == text

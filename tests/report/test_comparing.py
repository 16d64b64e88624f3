import base64
import csv
import io
import math
import re

import pytest

from wellcond.report.comparing import Difference, compare, differences, largest_rise, share_at_ceiling, summary
from wellcond.report.readings import Readings


@pytest.fixture
def runs(probe_rows):
    """The second run is worse by one and has lost a number; the third is better, and lacks a site."""
    worse = probe_rows(blocks=3, shift=1.0)
    lost = next(r for r in worse if r["name"] == "log_kappa" and (r["index"], r["site"]) == (1, "mlp"))
    lost |= {"value": math.nan, "status": "non_finite"}
    better = probe_rows(blocks=3, shift=-0.5, sites=("sa", "+sa", "mlp"))
    return [Readings.of(n, rows) for n, rows in (("a", probe_rows(blocks=3)), ("b", worse), ("c", better))]


def test_differences_come_worst_first(runs):
    found = compare(runs)
    assert len(found) == 12 + 9
    assert (found[0].run, found[0].block, found[0].site, found[0].change) == ("b", "blocks.1", "mlp", math.inf)
    assert [d.change for d in found[1:]] == sorted((d.change for d in found[1:]), reverse=True)
    assert {d.run for d in found[1:12]} == {"b"}
    assert all(d.change == pytest.approx(1.0) for d in found[1:12])
    assert all(d.change == pytest.approx(-0.5) for d in found[12:])


def test_the_table_is_short_and_its_file_is_whole(runs):
    table, link = differences(runs)
    assert table.count("<tr>") - 1 == 20
    assert "the first 20 of 21" in table
    assert "NaN now" in table
    text = base64.b64decode(re.search(r'base64,([^"]+)"', link)[1]).decode()
    header, *lines = csv.reader(io.StringIO(text))
    assert header == ["run", "block", "site", "log_kappa of a", "log_kappa", "change", "change is"]
    assert len(lines) == 21
    assert [line[-1] for line in lines] == ["no number", *["exact"] * 20]
    for _, _, _, first, other, change, _ in lines[1:]:
        assert float(change) == pytest.approx(float(other) - float(first), abs=1e-6)


@pytest.fixture
def capped(probe_rows):
    """Four places in both runs: exact in both, beyond the ceiling in the first, in the other, in both."""

    def run(name, values, beyond):
        rows = probe_rows(blocks=4, sites=("sa",), brief=True)
        for r in rows:
            if r["name"] == "log_kappa":
                r |= {"value": values[r["index"]], "status": "ceiling" if r["index"] in beyond else "ok"}
        return Readings.of(name, rows)

    return [run("a", (4.0, 15.0, 5.0, 15.0), {1, 3}), run("b", (6.0, 9.0, 15.5, 15.84), {2, 3})]


def test_a_change_from_or_to_a_lower_bound_is_one_and_between_two_nobody_knows(capped):
    found = compare(capped)
    assert [(d.block, d.sense, str(d)) for d in found] == [
        ("blocks.2", "at least", "≥ +10.50"),
        ("blocks.0", "exact", "+2.00"),
        ("blocks.1", "at most", "≤ −6.00"),
        ("blocks.3", "not known", "not known"),
    ]
    table, link = differences(capped)
    assert "+0.84" not in table
    assert "≥ 15.00" in table
    assert "≥ 15.84" in table
    assert "the change is not known: at 1 of 4 places" in table
    text = base64.b64decode(re.search(r'base64,([^"]+)"', link)[1]).decode()
    assert [line.split(",")[-2:] for line in text.splitlines()[-2:]] == [["-6", "at most"], ["NaN", "not known"]]


def test_the_largest_rise_is_one_that_is_known(capped):
    rise, certain = largest_rise(compare(capped))
    assert (rise.block, certain) == ("blocks.2", False)  # blocks.3 may have risen more
    exact = [d._replace(first_bound=False, other_bound=False) for d in compare(capped)]
    assert largest_rise(exact) == (exact[0], True)
    at_most = Difference("b", "blocks.9", "sa", 15.0, 15.9, True, False)
    assert largest_rise([at_most]) is None  # nobody knows whether it rose at all
    small = Difference("b", "blocks.8", "sa", 1.0, 1.5)
    assert largest_rise([at_most, small]) == (small, False)
    assert largest_rise([at_most._replace(other=15.1), small]) == (small, True)


def test_the_mean_of_lower_bounds_is_one(capped):
    html = summary(capped, {})
    assert "≥ 9.75" in html
    assert "≥ 11.59" in html
    assert "≥: a lower bound, because" in html
    for run, least in zip(capped, ((4.0, False), (6.0, False)), strict=True):
        mean = run.mean_over_blocks(0, "sa")
        assert (mean.least, mean.most[1], mean.left_out) == (least, True, 0)


def test_a_count_tells_what_a_status_hides(probe_rows):
    rows = probe_rows(blocks=1, sites=("sa",), shift=2.5)
    assert Readings.of("a", rows).lower_bound(0, "blocks.0", "sa")
    hidden = [{**r, "status": "non_finite"} for r in rows]
    assert Readings.of("a", hidden).lower_bound(0, "blocks.0", "sa")
    seen = [{**r, "status": "ok", "value": 0.0 if r["name"] == "capped" else r["value"]} for r in rows]
    assert not Readings.of("a", seen).lower_bound(0, "blocks.0", "sa")
    assert not Readings.of("a", seen).capped_sites


def test_runs_with_nothing_in_common_say_so(probe_rows):
    other = [{**r, "block": f"layers.{r['index']}"} for r in probe_rows(blocks=2)]
    (said,) = differences([Readings.of("a", probe_rows(blocks=2)), Readings.of("b", other)])
    assert "nothing to compare" in said


def test_the_summary_has_a_line_for_each_run(runs):
    html = summary(runs, {"a": "vit <tiny>"})
    assert html.count("<tr>") == 1 + 3
    assert "vit &lt;tiny&gt;" in html
    assert f"{runs[0].mean(0, 'sa'):.2f}" in html
    assert "! " in html  # of the run that lost a number
    assert ">–<" in html  # of the run without +mlp


def test_samples_at_the_ceiling_are_counted(probe_rows):
    rows = probe_rows(blocks=3, shift=3.0)
    capped = sum(r["value"] for r in rows if r["name"] == "capped")
    assert capped > 0
    share, counted = share_at_ceiling(Readings.of("a", rows), 0)
    assert counted == f"{capped:.0f} of 768 matrices"
    assert share == f"{100 * capped / 768:.1f} %"

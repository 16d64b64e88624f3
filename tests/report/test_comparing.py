import base64
import csv
import io
import math
import re

import pytest

from wellcond.report.comparing import compare, differences, share_at_ceiling, summary
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
    assert header == ["run", "block", "site", "log_kappa of a", "log_kappa", "change"]
    assert len(lines) == 21
    for _, _, _, first, other, change in lines[1:]:
        assert float(change) == pytest.approx(float(other) - float(first), abs=1e-6)


def test_runs_with_nothing_in_common_say_so(probe_rows):
    other = [{**r, "block": f"layers.{r['index']}"} for r in probe_rows(blocks=2)]
    (said,) = differences([Readings.of("a", probe_rows(blocks=2)), Readings.of("b", other)])
    assert "nothing can be compared" in said


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

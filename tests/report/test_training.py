import csv
import io
import math

import pytest

from wellcond.report.readings import Readings
from wellcond.report.training import DRAWN_MOST, over_training


def table(chart):
    header, *rows = csv.reader(io.StringIO(chart.csv))
    return header, [[float(cell) if cell else None for cell in row] for row in rows]


def test_one_run_has_a_line_per_site_and_one_per_bad_block(probe_rows):
    run = Readings.of("a", probe_rows(steps=(0, 10, 20)))
    sites, blocks, loss = over_training([run], losses={"a": [(0, 2.0), (5, 1.0)]})
    header, rows = table(sites)
    assert header == ["step", "sa", "+sa", "mlp", "+mlp"]
    for step, *values in rows:
        assert values == pytest.approx([run.mean(int(step), site) for site in run.sites])
    header, _ = table(blocks)
    last = sorted(run.blocks, key=lambda b: run.value("log_kappa", 20, b.name, "sa"), reverse=True)[:5]
    assert set(header[1:]) == {block.name for block in last}
    assert table(loss)[1] == [[0, 2], [5, 1]]


def test_several_runs_have_a_chart_per_site(probe_rows):
    runs = [Readings.of(n, probe_rows(steps=s)) for n, s in (("a", (0, 10)), ("b", (0, 20)))]
    charts = over_training(runs, losses={})
    assert [chart.title.rpartition(", ")[2] for chart in charts] == ["sa", "+sa", "mlp", "+mlp"]
    header, rows = table(charts[0])
    assert header == ["step", "a", "b"]
    assert [row[0] for row in rows] == [0, 10, 20]
    assert rows[1][2] is None


def test_one_step_has_nothing_over_training(probe_rows):
    assert over_training([Readings.of("a", probe_rows())], losses={}) == []


def test_many_steps_are_thinned_to_the_worst_and_the_csv_keeps_all(probe_rows):
    rows = probe_rows(steps=range(1000), blocks=2, sites=("sa", "+sa"))
    spike = [r for r in rows if (r["step"], r["site"], r["name"]) == (503, "+sa", "log_kappa")]
    for r in spike:
        r["value"] = 14.5
    chart = over_training([Readings.of("a", rows)], losses={})[0]
    assert f"Of 1,000 steps {DRAWN_MOST} are drawn" in chart.caption
    assert "the CSV has all" in chart.caption
    assert len(table(chart)[1]) == 1000
    paths = chart.drawing.split('<path d="')[1:]
    assert [path.split('"')[0].count("L") + 1 for path in paths] == [DRAWN_MOST] * 2
    top = min(float(point.split(",")[1]) for point in paths[1].split('"')[0][1:].split("L"))
    calm = [float(point.split(",")[1]) for point in paths[1].split('"')[0][1:].split("L")]
    assert top < sorted(calm)[1] - 50  # the one bad step of a thousand stands out


def test_nan_leaves_a_gap_and_a_note(probe_rows):
    rows = probe_rows(steps=(0, 1, 2), blocks=2)
    bad = next(r for r in rows if r["step"] == 1 and r["name"] == "log_kappa" and r["site"] == "sa")
    bad |= {"value": math.nan, "status": "non_finite"}
    chart = over_training([Readings.of("a", rows)], losses={})[0]
    assert chart.notes == ("sa: 1 of 3 points are not drawn (1 NaN).",)

import csv
import html
import io
import json
import math
import re

import pytest

from wellcond.records import TrainRow, ValidationRow
from wellcond.report.readings import Readings
from wellcond.report.training import CSV_MOST, DRAWN_MOST, Shown, kappa_charts, training_charts


def table(chart):
    header, *rows = csv.reader(io.StringIO(chart.csv))
    return header, [[float(cell) if cell else None for cell in row] for row in rows]


def test_one_run_has_a_line_per_site_and_one_per_bad_block(probe_rows):
    run = Readings.of("a", probe_rows(steps=(0, 10, 20)))
    sites, blocks = kappa_charts([run], last=20)
    header, rows = table(sites)
    assert header == ["step", "sa", "+sa", "mlp", "+mlp"]
    for step, *values in rows:
        assert values == pytest.approx([run.mean(int(step), site) for site in run.sites])
    header, _ = table(blocks)
    last = sorted(run.blocks, key=lambda b: run.value("log_kappa", 20, b.name, "sa"), reverse=True)[:5]
    assert set(header[1:]) == {block.name for block in last}


def test_several_runs_have_a_chart_per_site(probe_rows):
    runs = [Readings.of(n, probe_rows(steps=s)) for n, s in (("a", (0, 10)), ("b", (0, 20)))]
    charts = kappa_charts(runs, last=20)
    assert [chart.title.rpartition(", ")[2] for chart in charts] == ["sa", "+sa", "mlp", "+mlp"]
    header, rows = table(charts[0])
    assert header == ["step", "a", "b"]
    assert [row[0] for row in rows] == [0, 10, 20]
    assert rows[1][2] is None


def test_one_step_has_nothing_over_training(probe_rows):
    assert kappa_charts([Readings.of("a", probe_rows())], last=0) == []


def test_many_steps_are_thinned_to_the_worst_and_the_csv_keeps_all(probe_rows):
    rows = probe_rows(steps=range(1000), blocks=2, sites=("sa", "+sa"))
    spike = [r for r in rows if (r["step"], r["site"], r["name"]) == (503, "+sa", "log_kappa")]
    for r in spike:
        r["value"] = 14.5
    chart = kappa_charts([Readings.of("a", rows)], last=1000)[0]
    assert f"Of 1,000 points {DRAWN_MOST} are drawn" in chart.caption
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
    chart = kappa_charts([Readings.of("a", rows)], last=1000)[0]
    assert chart.notes == ("sa: 1 of 3 points are not drawn (1 NaN).",)


# ---- what metrics.jsonl has


def run_of(name, losses, validations=()):
    return Shown(
        name=name,
        train=[TrainRow(step=step, loss=loss) for step, loss in losses],
        validation=[ValidationRow(step=step, metrics=metrics) for step, metrics in validations],
    )


def test_training_and_validation_have_charts_of_their_own():
    run = run_of("a", [(10, 2.0), (20, 1.0)], [(15, {"loss": 9.0, "top1": 0.5, "mark": -3.0})])
    charts = {chart.title: table(chart) for chart in training_charts([run], last=20)}
    assert charts == {
        "Training loss": (["step", "a"], [[10, 2], [20, 1]]),
        "Validation loss": (["step", "a"], [[15, 9]]),
        "Accuracy": (["step", "top-1"], [[15, 0.5]]),
        "Validation mark": (["step", "a"], [[15, -3]]),
    }


def test_charts_of_several_runs_have_a_line_per_run():
    runs = [run_of("a", [(10, 2.0)]), run_of("b", [(10, 3.0), (20, 1.0)], [(20, {"loss": 5.0})])]
    training, validation = training_charts(runs, last=20)
    assert table(training) == (["step", "a", "b"], [[10, 2, 3], [20, None, 1]])
    assert table(validation) == (["step", "b"], [[20, 5]])
    assert "Measured in b alone" in validation.caption


def test_all_charts_go_from_0_to_the_last_step(probe_rows):
    runs = [run_of("a", [(10, 2.0), (20, 1.0)], [(15, {"loss": 9.0, "score": -9.0})])]
    for chart in (
        *training_charts(runs, last=50),
        *kappa_charts([Readings.of("a", probe_rows(steps=(5, 9)))], last=50),
    ):
        scales = json.loads(html.unescape(re.search('data-scales="(.*?)"', chart.drawing)[1]))
        assert scales["x"]["values"] == [0, 50]
        low, high = scales["y"]["values"]
        assert high < 0 or low > 0, "an end of the axis has brought a value of its own"


def test_of_many_points_the_highest_is_drawn_and_all_are_in_the_csv():
    (chart,) = training_charts([run_of("a", [(s, 50.0 if s == 777 else 1.0) for s in range(1, 2001)])], last=2000)
    assert f"Of 2,000 points {DRAWN_MOST} are drawn" in chart.caption
    assert len(table(chart)[1]) == 2000
    assert [777, 50] in table(chart)[1]
    (chart,) = training_charts([run_of("a", [(s, 1.0) for s in range(CSV_MOST + 10)])], last=CSV_MOST)
    assert len(table(chart)[1]) == CSV_MOST


def test_a_run_that_ends_early_is_named_below():
    """Beside the chart, the line from its end to its name would look like data."""
    ends = [(0, 2.0), (90, 1.0)]
    for last, below in ((100, False), (50, True)):
        (chart,) = training_charts([run_of("a", ends), run_of("b", [(0, 3.0), (last - 10, 2.0)])], last=100)
        assert ("opacity:.6" not in chart.drawing) is below
        assert ">b</text>" in chart.drawing

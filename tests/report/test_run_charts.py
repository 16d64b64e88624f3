import math

import pytest

from wellcond.records import TrainRow, ValidationRow
from wellcond.report.readings import Readings
from wellcond.report.run_charts import (
    POINTS_MOST,
    Shown,
    attention,
    by_block,
    heat_maps,
    kappa_charts,
    shown_steps,
    spectra,
    thin,
    training_charts,
)


def run_of(name, losses, validations=()):
    return Shown(
        name=name,
        train=[TrainRow(step=step, loss=loss) for step, loss in losses],
        validation=[ValidationRow(step=step, metrics=metrics) for step, metrics in validations],
    )


def points(chart, line):
    """(x, y) of one line."""
    x, y = chart.axes
    return [(row[x.field], row[y.field]) for row in chart.rows if row[chart.by] == line]


def test_thinning_keeps_the_ends_and_the_worst():
    assert thin(range(5), most=5, weight=lambda i: 0) == [0, 1, 2, 3, 4]
    kept = thin(range(1000), most=10, weight=lambda i: i == 503)
    assert len(kept) == 10
    assert {0, 503, 999} <= set(kept)


def test_the_slider_stops_at_few_steps_of_long_runs(probe_rows):
    run = Readings.of("a", probe_rows(steps=range(1000), blocks=2, brief=True))
    assert len(shown_steps([run])) == 100
    assert shown_steps([Readings.of("a", probe_rows(steps=(3, 7)))]) == [3, 7]


def test_heat_maps_share_their_colours_and_show_the_latest_measurement(probe_rows):
    runs = [Readings.of("a", probe_rows(steps=(0, 10), blocks=3)), Readings.of("b", probe_rows(steps=(5,), shift=2.0))]
    steps = shown_steps(runs)
    assert steps == [0, 5, 10]
    one, two = heat_maps(runs, steps)
    scales = [chart.spec["layer"][0]["encoding"]["color"]["condition"]["scale"] for chart in (one, two)]
    assert scales[0] == scales[1]
    assert [row["log_kappa"] for row in one.rows if row["step"] == 5] == [
        row["log_kappa"] for row in one.rows if row["step"] == 0
    ]
    assert {row["step"] for row in two.rows} == {5, 10}
    lines = by_block(runs, steps)
    assert [chart.title for chart in lines] == [f"log κ by block, {site}" for site in ("sa", "+sa", "mlp", "+mlp")]
    for chart in lines:
        assert list(chart.looks) == ["a", "b"]
        assert chart.axes[1].ends == lines[0].axes[1].ends  # levels can be compared


def test_training_and_validation_have_charts_of_their_own():
    run = run_of("a", [(10, 2.0), (20, 1.0)], [(15, {"loss": 9.0, "top1": 0.5, "mark -": -3.0})])
    charts = {chart.title: points(chart, "a") for chart in training_charts([run], last=20)}
    assert charts == {
        "Training loss": [(10, 2), (20, 1)],
        "Validation loss": [(15, 9)],
        "Top-1 accuracy": [(15, 0.5)],
        "Validation mark -": [(15, -3)],
    }


def test_charts_of_several_runs_have_a_line_per_run():
    runs = [run_of("a", [(10, 2.0)]), run_of("b", [(10, 3.0), (20, 1.0)], [(20, {"loss": 5.0})])]
    training, validation = training_charts(runs, last=20)
    assert points(training, "b") == [(10, 3), (20, 1)]
    assert list(validation.looks) == ["b"]
    assert validation.looks["b"] == training.looks["b"]
    assert "Measured only in b" in validation.caption


def test_all_charts_go_from_0_to_the_last_step(probe_rows):
    runs = [run_of("a", [(10, 2.0), (20, 1.0)], [(15, {"loss": 9.0, "score": -9.0})])]
    readings = [Readings.of("a", probe_rows(steps=(5, 9)))]
    for chart in (*training_charts(runs, last=50), *kappa_charts(readings, last=50)):
        assert chart.axes[0].ends == (0, 50)


def test_of_many_points_the_highest_are_shown():
    (chart,) = training_charts([run_of("a", [(s, 50.0 if s == 777 else 1.0) for s in range(1, 2001)])], last=2000)
    assert f"{POINTS_MOST} of 2,000 points are shown" in chart.caption
    assert len(chart.rows) == POINTS_MOST
    assert (777, 50) in points(chart, "a")


def test_one_run_has_a_line_per_site_and_one_per_bad_block(probe_rows):
    run = Readings.of("a", probe_rows(steps=(0, 10, 20), outside=("embed",)))
    sites, blocks = kappa_charts([run], last=20)
    assert list(sites.looks) == ["sa", "+sa", "mlp", "+mlp", "embed"]
    for site in run.sites:
        assert points(sites, site) == [(step, pytest.approx(run.mean(step, site))) for step in run.steps]
    last = sorted(run.blocks, key=lambda b: run.value("log_kappa", 20, b.name, "sa"), reverse=True)[:5]
    assert set(blocks.looks) == {block.name for block in last}
    assert kappa_charts([Readings.of("a", probe_rows())], last=0) == []


def test_several_runs_have_a_chart_per_site(probe_rows):
    runs = [Readings.of(n, probe_rows(steps=s)) for n, s in (("a", (0, 10)), ("b", (0, 20)))]
    charts = kappa_charts(runs, last=20)
    assert [chart.title.rpartition(", ")[2] for chart in charts] == ["sa", "+sa", "mlp", "+mlp"]
    assert [step for step, _ in points(charts[0], "b")] == [0, 20]


def test_spectra_are_of_the_same_few_blocks_with_the_worst(probe_rows):
    run = Readings.of("a", probe_rows(steps=(0, 5), sigma=(0, 8, 16, 31)))
    charts = spectra([run])
    assert [chart.title for chart in charts] == [f"Spectrum at {site}" for site in ("sa", "+sa", "mlp", "+mlp")]
    worst = max(run.blocks, key=lambda b: run.value("log_kappa", 5, b.name, "sa"))
    for chart in charts:
        assert {"blocks.0", "blocks.11", worst.name} <= set(chart.looks) == set(charts[0].looks)
        assert len(chart.looks) <= 5
    line = points(charts[0], "blocks.11")
    assert [i for i, _ in line] == [1, 9, 17, 32]
    assert -math.log(line[-1][1]) == pytest.approx(run.value("log_kappa", 5, "blocks.11", "sa"), rel=1e-6)


def test_spectra_of_several_runs_share_one_block(probe_rows):
    runs = [
        Readings.of("a", probe_rows(blocks=3, sigma=(0, 7))),
        Readings.of("b", probe_rows(blocks=3, sigma=(0, 7), shift=1.0, sites=("sa",))),
        Readings.of("none", probe_rows(blocks=3)),
    ]
    charts = spectra(runs)
    assert list(charts[0].looks) == ["a", "b"]
    assert list(charts[1].looks) == ["a"]
    assert charts[0].title.startswith("Spectrum at sa, blocks.")


def test_what_comes_before_the_first_block_has_its_own_spectrum(probe_rows):
    rows = [r for r in probe_rows(blocks=1, outside=("tokens",)) if r["site"] == "tokens"]
    rows += [{**rows[0], "name": f"sigma.{i}", "value": 0.1**i} for i in range(3)]
    (chart,) = spectra([Readings.of("a", rows)])
    assert chart.title == "Spectrum at tokens"
    assert [value for _, value in points(chart, "a")] == pytest.approx([1, 0.1, 0.01])


def test_attention_by_block(probe_rows):
    runs = [Readings.of("a", probe_rows(blocks=4, attention=True)), Readings.of("b", probe_rows(blocks=4))]
    entropy, logit = attention(runs)
    assert list(entropy.looks) == ["a"]
    wanted = [(i, runs[0].value("largest_logit", 0, f"blocks.{i}", "sa")) for i in range(4)]
    assert points(logit, "a") == wanted
    assert spectra(runs) == attention(runs[1:]) == []

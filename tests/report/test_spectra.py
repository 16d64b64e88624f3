import csv
import io
import math

import pytest

from wellcond.report.readings import Readings
from wellcond.report.spectra import attention, spectra


def table(chart):
    header, *rows = csv.reader(io.StringIO(chart.csv))
    return header, rows


def test_a_spectrum_per_site_of_a_few_blocks_with_the_worst(probe_rows):
    run = Readings.of("a", probe_rows(steps=(0, 5), sigma=(0, 8, 16, 31)))
    charts = spectra([run])
    assert [chart.title for chart in charts] == [f"Spectrum at {site}" for site in ("sa", "+sa", "mlp", "+mlp")]
    header, rows = table(charts[0])
    worst = max(run.blocks, key=lambda b: run.value("log_kappa", 5, b.name, "sa"))
    assert {"blocks.0", "blocks.11", worst.name} <= set(header)
    assert len(header) <= 6
    assert [row[0] for row in rows] == ["1", "9", "17", "32"]
    assert -math.log(float(rows[-1][header.index("blocks.11")])) == pytest.approx(
        run.value("log_kappa", 5, "blocks.11", "sa"), rel=1e-6
    )


def test_several_runs_share_one_block(probe_rows):
    runs = [
        Readings.of("a", probe_rows(blocks=3, sigma=(0, 7))),
        Readings.of("b", probe_rows(blocks=3, sigma=(0, 7), shift=1.0, sites=("sa",))),
        Readings.of("none", probe_rows(blocks=3)),
    ]
    charts = spectra(runs)
    assert table(charts[0])[0] == ["i, from the largest", "a", "b"]
    assert table(charts[1])[0] == ["i, from the largest", "a"]
    assert charts[0].title.startswith("Spectrum at sa, blocks.")


def test_what_comes_before_the_first_block_has_its_own(probe_rows):
    rows = [r for r in probe_rows(blocks=1, outside=("tokens",)) if r["site"] == "tokens"]
    rows += [{**rows[0], "name": f"sigma.{i}", "value": 0.1**i} for i in range(3)]
    (chart,) = spectra([Readings.of("a", rows)])
    assert chart.title == "Spectrum at tokens"
    assert [float(row[1]) for row in table(chart)[1]] == pytest.approx([1, 0.1, 0.01])


def test_nothing_measured_nothing_drawn(probe_rows):
    run = Readings.of("a", probe_rows())
    assert spectra([run]) == []
    assert attention([run]) == []


def test_attention_by_block(probe_rows):
    runs = [Readings.of("a", probe_rows(blocks=4, attention=True)), Readings.of("b", probe_rows(blocks=4))]
    entropy, logit = attention(runs)
    assert table(entropy)[0] == ["block", "a"]
    assert [float(row[1]) for row in table(logit)[1]] == pytest.approx(
        [runs[0].value("largest_logit", 0, f"blocks.{i}", "sa") for i in range(4)]
    )

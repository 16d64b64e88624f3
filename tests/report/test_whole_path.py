"""A training, its folder, its page in a real browser: the numbers on the page are those in the files."""

import csv
import io
import json
import math
import re
import statistics
import urllib.request

import pytest
from typer.testing import CliRunner

from wellcond import cli
from wellcond.records import read_json, read_rows

SETTINGS = (
    "model_kwargs=img_size=8,patch_size=4,depth=2,embed_dim=16,num_heads=2", "batch_size=256", "epochs=4",
    "log_every=2", "warmup_epochs=0",
)  # fmt: skip
EVENT = {"step": 7, "split": "event", "event": "going on with other <data>"}
PIXEL = 0.1  # to which a drawing is written


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of four validations with a probe, and the same without one; each with an event that its page has to tell.

    The rows are read as the file has them, by the names that a line of JSON bears: not by the reader that the page has.
    """
    found = {}
    for name, more in (("probed", ["probe_every=3", "probe_samples=8"]), ("plain", [])):
        folder = tmp_path_factory.mktemp(name)
        words = [word for text in (*SETTINGS, *more) for word in ("--set", text)]
        for event in (False, True):  # the second time nothing is left to train, and the page is written again
            if event:
                with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
                    file.write(json.dumps(EVENT) + "\n")
            done = CliRunner().invoke(cli.app, ["train", "digits", "--output", str(folder), "--device", "cpu", *words])
            assert done.exit_code == 0, done.output
        found[name] = folder
    return found


def points_of(rows, split, name):
    return [(row["step"], row[name]) for row in rows if row["split"] == split]


def downloaded(page, chart):
    """The columns of a chart's CSV, by name: (x, y) of each."""
    link = page.locator(f"figure#{chart} a[download$='.csv']").get_attribute("href")
    with urllib.request.urlopen(link) as file:
        header, *lines = csv.reader(io.TextIOWrapper(file, encoding="utf-8"))
    return {
        name: [(float(line[0]), float(line[i])) for line in lines if line[i]] for i, name in enumerate(header) if i > 0
    }


def drawn(page, chart):
    """What a chart's lines show, one list of (x, y) each, read off their pixels; and the size of a pixel's tenth."""
    svg = page.locator(f"figure#{chart} svg")
    scales = json.loads(svg.get_attribute("data-scales"))

    def value(axis, pixel):
        (low, high), (start, end) = scales[axis]["values"], scales[axis]["pixels"]
        part = (pixel - start) / (end - start)
        return low * (high / low) ** part if scales[axis]["log"] else low + part * (high - low)

    paths = svg.locator("path.line").evaluate_all("paths => paths.map(path => path.getAttribute('d'))")
    pixels = [[tuple(map(float, point.split(","))) for point in re.findall(r"[-\d.]+,[-\d.]+", d)] for d in paths]
    room = [PIXEL * abs((s["values"][1] - s["values"][0]) / (s["pixels"][1] - s["pixels"][0])) for s in scales.values()]
    return [[(value("x", a), value("y", b)) for a, b in line] for line in pixels], room


def assert_drawn(page, chart, *lines):
    """The chart has these lines, point by point, and no others."""
    found, (wide, high) = drawn(page, chart)
    assert [len(line) for line in found] == [len(line) for line in lines]
    for seen, line in zip(found, lines, strict=True):
        assert [x for x, _ in seen] == pytest.approx([x for x, _ in line], abs=wide)
        assert [y for _, y in seen] == pytest.approx([y for _, y in line], abs=high)


@pytest.mark.parametrize("name", ["probed", "plain"])
def test_losses_are_those_of_their_own_rows(visit, trained, name):
    folder = trained[name]
    page, rows = visit(folder / "report.html"), read_rows(folder / "metrics.jsonl")
    training, validation = points_of(rows, "train", "loss"), points_of(rows, "val", "loss")
    assert (len(training), len(validation)) == (10, 4)
    for chart, points in (
        ("training-loss", training),
        ("validation-loss", validation),
        ("learning-rate", points_of(rows, "train", "lr")),
        ("gradient-norm", points_of(rows, "train", "gradient_norm")),
    ):
        (column,) = downloaded(page, chart).values()
        assert column == [pytest.approx(point, rel=1e-8) for point in points]
        if chart != "gradient-norm":  # which is logarithmic: a pixel is not everywhere of one size
            assert_drawn(page, chart, points)
    accuracies = {label: points_of(rows, "val", field) for label, field in (("top-1", "top1"), ("top-5", "top5"))}
    found = downloaded(page, "accuracy")
    assert found == {label: [pytest.approx(p, rel=1e-8) for p in points] for label, points in accuracies.items()}
    assert_drawn(page, "accuracy", *accuracies.values())

    names, values = (page.locator(f".tiles {part}").all_inner_texts() for part in ("dt", "dd:not(.small)"))
    tiles = dict(zip(names, values, strict=True))
    assert tiles["steps"] == "20"
    assert float(tiles["training loss"]) == pytest.approx(training[-1][1], rel=1e-3)
    assert float(tiles["validation loss"]) == pytest.approx(validation[-1][1], rel=1e-3)
    assert tiles["top-1"] == f"{accuracies['top-1'][-1][1]:.1%}"
    assert page.get_by_role("listitem").first.inner_text() == "Step 7: going on with other <data>"
    assert page.title() == f"Training of {read_json(folder / 'config.json')['config']['model']}"


def test_condition_numbers_are_those_of_the_probe(visit, trained):
    page, rows = visit(trained["probed"] / "report.html"), read_rows(trained["probed"] / "probe.jsonl")
    kappas = [row for row in rows if row["name"] == "log_kappa"]
    steps, sites = sorted({row["step"] for row in kappas}), ["sa", "+sa", "mlp", "+mlp"]
    assert steps[:3] == [0, 3, 6]

    def mean(step, site):
        return statistics.fmean(row["value"] for row in kappas if (row["step"], row["site"]) == (step, site))

    lines = {site: [(step, mean(step, site)) for step in steps] for site in sites}
    found = downloaded(page, "log-kappa-over-training-by-site")
    assert found == {site: [pytest.approx(point, rel=1e-8) for point in points] for site, points in lines.items()}
    assert_drawn(page, "log-kappa-over-training-by-site", *lines.values())
    for position, step in enumerate(steps):
        page.locator(".stepper input").evaluate(
            "(input, value) => { input.value = value; input.dispatchEvent(new Event('input')); }", position
        )
        cells = page.locator("#log-kappa-by-block-and-site g.cell text").all_text_contents()
        at = [row for row in kappas if row["step"] == step]
        values = [next(r for r in at if (r["index"], r["site"]) == (i, site)) for i in range(2) for site in sites]
        assert [float(cell.lstrip("≥")) for cell in cells] == pytest.approx([r["value"] for r in values], abs=0.051)
    assert not any(math.isnan(row["value"]) for row in kappas)


def test_two_runs_are_compared_by_their_losses(visit, trained, tmp_path):
    done = CliRunner().invoke(cli.app, ["report", *map(str, trained.values()), "--output", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    page = visit(tmp_path / "page.html")
    for chart, split in (("training-loss", "train"), ("validation-loss", "val")):
        lines = [points_of(read_rows(folder / "metrics.jsonl"), split, "loss") for folder in trained.values()]
        found = downloaded(page, chart)
        assert list(found) == [folder.name for folder in trained.values()]
        assert list(found.values()) == [[pytest.approx(p, rel=1e-8) for p in line] for line in lines]
        assert_drawn(page, chart, *lines)

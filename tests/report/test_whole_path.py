"""A training, its folder, its page in a real browser: the numbers on the page are those in the files."""

import json
import math
import re
import statistics

import pytest
from typer.testing import CliRunner

from wellcond import cli
from wellcond.records import read_json, read_rows

SETTINGS = (
    "model_kwargs=img_size=8,patch_size=4,depth=2,embed_dim=16,num_heads=2", "batch_size=256", "epochs=4",
    "log_every=2", "warmup_epochs=0",
)  # fmt: skip
EVENT = {"step": 7, "split": "event", "event": "going on with other <data>"}


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


READ = """(id) => {
  const { result: { view }, rows, figure } = charts.find((chart) => chart.figure.id === id);
  const paths = [...figure.querySelectorAll(".mark-line.role-mark path")].map((path) => path.getAttribute("d"));
  const pixels = paths.map((d) => [...d.matchAll(/([-\\d.]+),([-\\d.]+)/g)].map((m) => [Number(m[1]), Number(m[2])]));
  const [x, y] = ["x", "y"].map((name) => view.scale(name));
  return { rows, drawn: pixels.map((line) => line.map(([a, b]) => [x.invert(a), y.invert(b)])) };
}"""


def assert_shown(page, chart, **lines):
    """The chart has these lines, point by point and no others, in its rows (that is, its CSV) and in its pixels."""
    found = page.evaluate(READ, chart)
    by, x, y = list(found["rows"][0])
    rows = {name: [(row[x], row[y]) for row in found["rows"] if row[by] == name] for name in lines}
    assert sum(map(len, rows.values())) == len(found["rows"])
    assert rows == {name: [pytest.approx(point, rel=1e-8) for point in points] for name, points in lines.items()}
    assert len(found["drawn"]) == len(lines)
    for seen, points in zip(found["drawn"], lines.values(), strict=True):
        assert seen == [pytest.approx(point, rel=1e-2, abs=1e-2) for point in points]


@pytest.mark.parametrize("name", ["probed", "plain"])
def test_losses_are_those_of_their_own_rows(visit, trained, name):
    folder = trained[name]
    page, rows = visit(folder / "report.html"), read_rows(folder / "metrics.jsonl")
    training, validation = points_of(rows, "train", "loss"), points_of(rows, "val", "loss")
    assert (len(training), len(validation)) == (10, 4)
    accuracies = {label: points_of(rows, "val", field) for label, field in (("top-1", "top1"), ("top-5", "top5"))}
    for chart, points in {
        "training-loss": training,
        "validation-loss": validation,
        "learning-rate": points_of(rows, "train", "lr"),
        "gradient-norm": points_of(rows, "train", "gradient_norm"),
        "top-1-accuracy": accuracies["top-1"],
        "top-5-accuracy": accuracies["top-5"],
    }.items():
        assert_shown(page, chart, **{folder.name: points})

    names, values = (page.locator(f".tiles {part}").all_inner_texts() for part in ("dt", "dd:not(.small)"))
    tiles = dict(zip(names, values, strict=True))
    assert tiles["steps"] == "20"
    assert float(tiles["training loss"]) == pytest.approx(training[-1][1], rel=1e-3)
    assert float(tiles["validation loss"]) == pytest.approx(validation[-1][1], rel=1e-3)
    assert tiles["top-1"] == f"{accuracies['top-1'][-1][1]:.1%}"
    assert (
        page.locator("aside", has_text="What happened").locator("li").first.inner_text()
        == "Step 7: going on with other <data>"
    )
    assert page.title().endswith(f"Training of {read_json(folder / 'config.json')['config']['model']}")


def test_condition_numbers_are_those_of_the_probe(visit, trained):
    page, rows = visit(trained["probed"] / "report.html"), read_rows(trained["probed"] / "probe.jsonl")
    kappas = [row for row in rows if row["name"] == "log_kappa"]
    steps, sites = sorted({row["step"] for row in kappas}), ["sa", "+sa", "mlp", "+mlp"]
    assert steps[:3] == [0, 3, 6]

    def mean(step, site):
        return statistics.fmean(row["value"] for row in kappas if (row["step"], row["site"]) == (step, site))

    lines = {site: [(step, mean(step, site)) for step in steps] for site in sites}
    assert_shown(page, "log-kappa-over-training-by-site", **lines)
    page.locator(".stepper input").focus()
    page.keyboard.press("Home")
    for step in steps:
        page.evaluate("Promise.all(charts.map((chart) => chart.result.view.runAsync())).then(() => null)")
        cells = page.locator("#log-kappa-by-block-and-site .mark-text.role-mark text").all_text_contents()
        at = [row for row in kappas if row["step"] == step]
        values = [next(r for r in at if (r["index"], r["site"]) == (i, site)) for i in range(2) for site in sites]
        assert [float(cell.lstrip("≥")) for cell in cells] == pytest.approx([r["value"] for r in values], abs=0.051)
        page.keyboard.press("ArrowRight")
    worst = max((row for row in kappas if row["step"] == steps[-1]), key=lambda row: row["value"])
    title = page.locator("h1").inner_text()
    assert title.startswith(f"Block {worst['index']}'s")
    assert float(re.search(r"[\d.]+$", title)[0]) == pytest.approx(worst["value"], abs=0.051)
    assert not any(math.isnan(row["value"]) for row in kappas)


def test_two_runs_are_compared_by_their_losses(visit, trained, tmp_path):
    done = CliRunner().invoke(cli.app, ["report", *map(str, trained.values()), "--output", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    page = visit(tmp_path / "page.html")
    for chart, split in (("training-loss", "train"), ("validation-loss", "val")):
        lines = [points_of(read_rows(folder / "metrics.jsonl"), split, "loss") for folder in trained.values()]
        assert_shown(page, chart, **dict(zip([folder.name for folder in trained.values()], lines, strict=True)))

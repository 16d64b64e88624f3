"""The page of runs in a real browser: its slider moves, its files are what is seen, and it fits a phone."""

import csv
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from wellcond.records import TrainRow
from wellcond.report import conditioning_page
from wellcond.report.run_page import run_page
from wellcond.report.training import Shown

PHONE = {"width": 375, "height": 700}
SVG = "{http://www.w3.org/2000/svg}"
STEPS = (0, 100, 250, 1000)
CELLS = "[...document.querySelectorAll('#log-kappa-by-block-and-site g.cell text')].map(text => text.textContent)"
PATHS = "[...document.querySelectorAll('#log-kappa-by-block path.line')].map(path => path.getAttribute('d'))"


@pytest.fixture(scope="module")
def rows(probe_rows):
    """Four steps; the last block fails at the last step, so that one frame has NaN and the others have not."""
    rows = probe_rows(steps=STEPS, blocks=5, sigma=(0, 3, 9), attention=True, outside=("tokens",))
    for r in rows:
        if r["name"] == "log_kappa" and (r["step"], r["index"]) == (1000, 4):
            r |= {"value": math.nan, "status": "non_finite"}
    return rows


@pytest.fixture(scope="module")
def one_run(rows, tmp_path_factory):
    train = [TrainRow(step=0, loss=2.0), TrainRow(step=1000, loss=0.5)]
    page = run_page([Shown(name="a", train=train, probe=rows)])
    return page.write(tmp_path_factory.mktemp("one") / "report.html")


@pytest.fixture(scope="module")
def two_runs(rows, probe_rows, tmp_path_factory):
    names = ["a", 'b <i>"x"</i> with a rather long name, to see that it fits']
    page = conditioning_page({names[0]: rows, names[1]: probe_rows(steps=(0, 500), blocks=5, shift=5.0)})
    return page.write(tmp_path_factory.mktemp("two") / "report.html")


@pytest.fixture(scope="module")
def large_model(probe_rows, tmp_path_factory):
    """48 blocks with long names, one step."""
    sites = ("in", "sa", "+sa", "mlp", "+mlp")
    rows = [{**r, "block": f"model.encoder.layers.{r['block']}"} for r in probe_rows(blocks=48, sites=sites)]
    return conditioning_page({"a": rows}).write(tmp_path_factory.mktemp("large") / "report.html")


def texts_at(rows, step):
    """What the heat map has to show, from the rows themselves."""
    found = []
    for r in rows:
        if r["step"] == step and r["name"] == "log_kappa":
            mark = "≥" if r["status"] == "ceiling" else ""
            found.append("NaN" if math.isnan(r["value"]) else f"{mark}{r['value']:.1f}")
    return found


def move(page, position):
    page.locator(".stepper input").evaluate(
        "(input, value) => { input.value = value; input.dispatchEvent(new Event('input')); }", position
    )


def test_the_slider_shows_every_step_and_comes_back(visit, one_run, rows):
    page = visit(one_run)
    drawn = page.evaluate(PATHS)
    for position in (3, 0, 2, 1, 3):
        move(page, position)
        assert page.evaluate(CELLS) == texts_at(rows, STEPS[position])
        assert page.locator(".stepper output").inner_text() == f"{STEPS[position]:,}"
    for before, after in zip(drawn, page.evaluate(PATHS), strict=True):
        assert re.findall("[A-Z]", before) == re.findall("[A-Z]", after)
        numbers = ([float(number) for number in re.findall(r"[\d.]+", path)] for path in (before, after))
        assert next(numbers) == pytest.approx(next(numbers), abs=0.11)  # the script has three decimals of each value


def test_the_script_draws_lines_as_python_does(visit, one_run, rows, tmp_path):
    """Each step, moved to by the slider, has the points of a page that knows this step alone, on one common scale."""
    page = visit(one_run)
    scales = page.evaluate("JSON.parse(document.querySelector('#log-kappa-by-block svg').dataset.scales)")

    def pixel(scale, value):
        (low, high), (start, end) = scale["values"], scale["pixels"]
        return start + (value - low) / (high - low) * (end - start)

    for position, step in enumerate(STEPS):
        move(page, position)
        for site, path in zip(("sa", "+sa", "mlp", "+mlp"), page.evaluate(PATHS), strict=True):
            points = [tuple(map(float, point.split(","))) for point in re.split("[ML]", path)[1:]]
            values = [r for r in rows if (r["step"], r["site"], r["name"]) == (step, site, "log_kappa")]
            values = [r for r in values if math.isfinite(r["value"])]
            assert len(points) == len(values)
            for (x, y), r in zip(points, values, strict=True):
                assert x == pytest.approx(pixel(scales["x"], r["index"]), abs=0.11)
                assert y == pytest.approx(pixel(scales["y"], r["value"]), abs=0.11)
        dots = page.locator("#log-kappa-by-block circle").count()
        assert dots == sum(path.count("L") + path.count("M") for path in page.evaluate(PATHS))


def test_the_slider_answers_to_keys(visit, one_run, rows):
    page = visit(one_run)
    page.locator(".stepper input").focus()
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(CELLS) == texts_at(rows, 250)
    page.keyboard.press("Home")
    assert page.evaluate(CELLS) == texts_at(rows, 0)


def test_values_read_off_follow_the_slider(visit, one_run, rows):
    page = visit(one_run)
    figure = page.locator("#log-kappa-by-block")
    for position in (0, 3):
        move(page, position)
        figure.locator("svg").focus()
        page.keyboard.press("ArrowRight")
        value = next(
            r["value"]
            for r in rows
            if (r["step"], r["index"], r["site"], r["name"]) == (STEPS[position], 0, "sa", "log_kappa")
        )
        text = figure.locator(".reading").inner_text()
        assert text.startswith("block 0\n")
        assert float(re.search(r"^sa: (.*)$", text, re.MULTILINE)[1]) == pytest.approx(value, abs=0.01)
        page.keyboard.press("Escape")


def test_warnings_about_gaps_belong_to_the_last_step(visit, one_run):
    page = visit(one_run)
    gap = page.locator("#log-kappa-by-block .gap").first
    assert gap.is_visible()
    move(page, 0)
    assert not gap.is_visible()
    move(page, 3)
    assert gap.is_visible()


def test_without_script_the_last_step_stands_there(visit, one_run, rows):
    page = visit(one_run, script=False)
    assert not page.locator(".stepper").is_visible()
    assert not page.get_by_text("Move the slider").is_visible()
    assert page.locator("#log-kappa-by-block-and-site g.cell text").all_text_contents() == texts_at(rows, 1000)


@pytest.mark.parametrize("figure", ["log-kappa-by-block", "log-kappa-by-block-and-site"])
def test_a_downloaded_figure_is_the_step_that_is_seen(visit, one_run, rows, tmp_path, figure):
    page = visit(one_run)
    move(page, 1)
    with page.expect_download() as download:
        page.locator(f"#{figure} a", has_text="SVG").click()
    assert download.value.suggested_filename == f"{figure}-step-100.svg"
    download.value.save_as(tmp_path / "figure.svg")
    root = ElementTree.parse(tmp_path / "figure.svg").getroot()
    assert root.find(f"{SVG}title").text.endswith(", step 100")
    if figure.endswith("site"):
        cells = [g.find(f"{SVG}text").text for g in root.iter(f"{SVG}g") if g.get("class", "").startswith("cell")]
        assert cells == texts_at(rows, 100)
    else:
        assert [path.get("d") for path in root.iter(f"{SVG}path")] == page.evaluate(PATHS)
    assert "var(" not in (tmp_path / "figure.svg").read_text(encoding="utf-8")
    visit(tmp_path / "figure.svg")


def test_the_csv_of_the_heat_map_has_every_row(visit, one_run, rows, tmp_path):
    page = visit(one_run)
    with page.expect_download() as download:
        page.locator("#log-kappa-by-block-and-site a", has_text="CSV").click()
    download.value.save_as(tmp_path / "figure.csv")
    with open(tmp_path / "figure.csv", encoding="utf-8", newline="") as file:
        found = {(int(r["step"]), r["block"], r["site"]): (r["log κ"], r["status"]) for r in csv.DictReader(file)}
    wanted = [r for r in rows if r["name"] == "log_kappa"]
    assert len(found) == len(wanted)
    for r in wanted:
        value, status = found[r["step"], r["block"] if r["index"] >= 0 else "", r["site"]]
        assert float(value) == pytest.approx(r["value"], nan_ok=True)
        assert status == r["status"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("which", ["one_run", "two_runs", "large_model"])
def test_nothing_is_wider_than_a_phone(visit, request, which, scheme):
    page = visit(request.getfixturevalue(which), viewport=PHONE, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    spilling = """() => [...document.querySelectorAll("main *")].filter((element) => {
      if (element.closest(".scroll, .reading")) return false;
      const box = element.getBoundingClientRect();
      return box.width && (box.right > innerWidth + 1 || box.left < -1);
    }).map((element) => element.outerHTML.slice(0, 100))"""
    assert page.evaluate(spilling) == []


def test_heat_colours_follow_the_scheme(visit, one_run):
    fills = (
        "[...document.querySelectorAll('g.cell:not(.none):not(.bad) rect')].map(cell => getComputedStyle(cell).fill)"
    )
    light, dark = (visit(one_run, scheme=scheme).evaluate(fills) for scheme in ("light", "dark"))
    assert len(light) == len(dark) > 10
    assert all(one != two for one, two in zip(light, dark, strict=True))


def test_numbers_fit_their_cells(visit, one_run, large_model):
    spill = """() => [...document.querySelectorAll("g.cell")].filter((cell) => {
      const [box, text] = ["rect", "text"].map((name) => cell.querySelector(name).getBoundingClientRect());
      return text.left < box.left || text.right > box.right;
    }).length"""
    for path in (one_run, large_model):
        assert visit(path).evaluate(spill) == 0


def test_runs_move_together(visit, two_runs):
    """The second run was measured at 0 and 500: at 250 it shows step 0, and at 1000 step 500."""
    page = visit(two_runs)
    maps = "[...document.querySelectorAll('figure')].filter(f => f.id.startsWith('log-kappa-by-block-and-site'))"
    second = f"[...{maps}[1].querySelectorAll('g.cell text')].map(text => text.textContent)"
    seen = []
    for position in range(5):  # 0, 100, 250, 500, 1000
        move(page, position)
        seen.append(page.evaluate(second))
    assert seen[0] == seen[1] == seen[2] != seen[3] == seen[4]

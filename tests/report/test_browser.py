"""Pages in a real browser, used: they open from a file, ask for nothing and complain of nothing; their charts zoom,
toggle, slide, highlight and download; light, dark, on a phone, by keys."""

import csv
import io
import json
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from wellcond.demo import demo
from wellcond.records import TrainRow, ValidationRow
from wellcond.report import Page, conditioning_page, grid, section
from wellcond.report.charts import Axis, line_chart, looks_of
from wellcond.report.reference import Band
from wellcond.report.run_charts import Shown
from wellcond.report.run_page import run_page

PHONE = {"width": 375, "height": 700}
STEPS = (0, 100, 250, 1000)
HOSTILE = ['a, "b"', "</script><script>alert(1)</script>", "line\nbreak", "<b>κ</b>", "=1+1", "7"]
MAP = "log-kappa-by-block-and-site"
VIEW = "window.view = (id) => charts.find((chart) => chart.figure.id === id).result.view; null"


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
    train = [TrainRow(step=step, loss=2.0 - step / 1000) for step in range(0, 1001, 50)]
    validation = [ValidationRow(step=1000, metrics={"loss": 1.5, "top1": 0.5})]
    reference = {"trained ViTs": {site: Band(8.0, 9.0, 10.0) for site in ("sa", "+sa", "mlp", "+mlp")}}
    page = run_page([Shown(name="a", train=train, validation=validation, probe=rows)], reference=reference)
    return page.write(tmp_path_factory.mktemp("one") / "report.html")


@pytest.fixture(scope="module")
def two_runs(rows, probe_rows, tmp_path_factory):
    names = ["a", 'b <i>"x"</i> with a rather long name, to see that it fits']
    page = conditioning_page({names[0]: rows, names[1]: probe_rows(steps=(0, 500), blocks=5, shift=5.0)})
    return page.write(tmp_path_factory.mktemp("two") / "report.html")


@pytest.fixture(scope="module")
def large_model(probe_rows, tmp_path_factory):
    """300 blocks with long names, one step."""
    rows = [{**r, "block": f"model.encoder.layers.{r['block']}"} for r in probe_rows(blocks=300, brief=True)]
    return conditioning_page({"a": rows}).write(tmp_path_factory.mktemp("large") / "report.html")


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory):
    """Names and values chosen to break markup, script and CSV."""
    values = [
        [1.0, math.nan, 3.0],
        [0.0, -1.0, 5.0],
        [math.inf, 2.0, 1.0],
        [1e-300, 1.0, 1e300],
        [2.0] * 3,
        [math.nan] * 3,
    ]
    rows = [
        {"run": name, "x": x, "y": y}
        for name, ys in zip(HOSTILE, values, strict=True)
        for x, y in enumerate(ys)
    ]  # fmt: skip
    page = Page("A <hostile> page & more")
    chart = line_chart(
        rows, title="</title>", x=Axis("x", 'x "y"'), y=Axis("y", "<y>", log=True), by="run", looks=looks_of(HOSTILE)
    )
    page.add(section("Charts", grid(chart)))
    return page.write(tmp_path_factory.mktemp("hostile") / "page.html")


@pytest.fixture(scope="module")
def demo_page(tmp_path_factory):
    quick = ["epochs=1", "model_kwargs=img_size=8,patch_size=4,depth=1,embed_dim=16,num_heads=2", "batch_size=256"]
    return demo.run(tmp_path_factory.mktemp("demo"), settings=quick)


def texts_at(rows, step):
    """What the heat map has to show, from the rows themselves."""
    found = []
    for r in rows:
        if r["step"] == step and r["name"] == "log_kappa" and r["index"] >= 0:
            mark = "≥" if r["status"] == "ceiling" else ""
            found.append("NaN" if math.isnan(r["value"]) else f"{mark}{r['value']:.1f}")
    return found


def cells(page, figure=MAP):
    settle(page)
    return page.locator(f"#{figure} .mark-text.role-mark text").all_text_contents()


def settle(page):
    page.evaluate("Promise.all(charts.map((chart) => chart.result.view.runAsync())).then(() => null)")


def ends(page, figure, axis="x"):
    settle(page)
    return page.evaluate(f"view('{figure}').scale('{axis}').domain()")


def boxes(page, selector):
    """left, top, right and bottom of all such elements."""
    found = page.locator(selector).evaluate_all("(all) => all.map((one) => one.getBoundingClientRect().toJSON())")
    return [tuple(box[side] for side in ("left", "top", "right", "bottom")) for box in found]


@pytest.fixture(scope="module")
def tabs(visit_once, request):
    """Pages that are opened once and used by all, each with a word for its views."""
    found = {}

    def tab(which):
        if which not in found:
            found[which] = visit_once(request.getfixturevalue(which))
            found[which].evaluate(VIEW)
        return found[which]

    return tab


def test_zoom_by_buttons_keys_wheel_and_drag(tabs):
    page = tabs("one_run")
    figure = page.locator("#training-loss")
    figure.scroll_into_view_if_needed()
    assert ends(page, "training-loss") == [0, 1000]
    figure.get_by_role("button", name="Zoom in").click()
    assert ends(page, "training-loss") == pytest.approx([150, 850])
    figure.locator(".drawing").focus()
    page.keyboard.press("ArrowRight")
    assert ends(page, "training-loss") == pytest.approx([290, 990])
    page.keyboard.press("0")
    assert ends(page, "training-loss") == [0, 1000]
    box = figure.locator("svg").bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 100)
    before = page.evaluate("scrollY")
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    low, high = ends(page, "training-loss")
    assert 0 < low < high < 1000
    assert page.evaluate("scrollY") == before
    page.mouse.down()
    page.mouse.move(box["x"] + 260, box["y"] + 100, steps=3)
    page.mouse.up()
    moved = ends(page, "training-loss")
    assert moved[0] < low
    assert moved[1] - moved[0] == pytest.approx(high - low)
    page.mouse.wheel(0, 50)  # without a key the page scrolls, and the chart does not zoom
    assert ends(page, "training-loss") == pytest.approx(moved)
    figure.get_by_role("button", name="Show all").click()
    assert ends(page, "training-loss") == [0, 1000]


def test_lines_by_block_have_a_band_behind_them(tabs):
    page = tabs("one_run")
    settle(page)
    for mark in ("line", "rect"):
        drawn = page.locator(f"#by-block-and-site .grid figure .mark-{mark} path")
        drawn.nth(3).wait_for(state="attached")
        assert drawn.count() == 4
    assert (
        "90 % of the blocks of trained ViTs" in page.locator("#by-block-and-site .grid figcaption").first.inner_text()
    )
    assert ends(page, "log-kappa-by-block-sa", "y")[0] > 0  # a band of its own scale would begin at 0, without a grid
    assert page.locator("#log-kappa-by-block-sa .role-axis-grid line").count() > 2


def test_lines_are_hidden_and_shown_in_all_small_multiples(tabs):
    page = tabs("two_runs")
    figures = "[...document.querySelectorAll('#by-block-and-site .multiples:last-of-type figure')]"
    count = f"{figures}.map((figure) => figure.querySelectorAll('.mark-line path').length)"
    settle(page)
    for _ in range(
        100
    ):  # a busy machine may draw later; the page lets nobody evaluate a string, so no wait_for_function
        if page.evaluate(count) == [2] * 4:
            break
        page.wait_for_timeout(50)
    assert page.evaluate(count) == [2] * 4
    button = page.locator("#by-block-and-site .legend button").nth(1)
    button.focus()
    page.keyboard.press("Enter")
    settle(page)
    assert button.get_attribute("aria-pressed") == "false"
    assert page.evaluate(count) == [1] * 4
    button.click()
    settle(page)
    assert page.evaluate(count) == [2] * 4


def test_the_slider_shows_every_step_by_pointer_and_by_keys(tabs, rows):
    page = tabs("one_run")
    slider = page.locator(".stepper input")
    slider.focus()
    page.keyboard.press("End")
    assert sorted(cells(page)) == sorted(texts_at(rows, 1000))
    slider.focus()
    for key, step in (("ArrowLeft", 250), ("Home", 0), ("ArrowRight", 100)):
        page.keyboard.press(key)
        assert sorted(cells(page)) == sorted(texts_at(rows, step))
        assert page.locator(".stepper output").inner_text() == f"{step:,}"
        drawn = page.evaluate("view('log-kappa-by-block-sa').scale('x').domain()")
        assert len(drawn) == 2


def test_each_run_shows_its_latest_measurement(tabs):
    """The second run was measured at 0 and 500: at 250 it shows step 0, and at 1000 step 500."""
    page = tabs("two_runs")
    second = page.evaluate(f"[...document.querySelectorAll('figure[id^={MAP}]')][1].id")
    slider, seen = page.locator(".stepper input"), []
    slider.focus()
    page.keyboard.press("Home")
    for _ in range(5):  # 0, 100, 250, 500, 1000
        seen.append(cells(page, second))
        page.keyboard.press("ArrowRight")
    assert seen[0] == seen[1] == seen[2] != seen[3] == seen[4]


def test_a_block_is_highlighted_in_all_charts(tabs):
    page = tabs("one_run")
    said = "charts.filter((chart) => chart.params.has('block')).map((chart) => chart.result.view.signal('block'))"
    figure = page.locator(f"#{MAP}")
    figure.scroll_into_view_if_needed()
    figure.locator(".mark-rect path").nth(4 * 2).hover(force=True)  # the third block
    assert set(page.evaluate(said)) == {"blocks.2"}
    assert len(page.evaluate(said)) > 8
    assert "blocks.2" in page.locator("#vg-tooltip-element").inner_text()
    page.mouse.move(1, 1)
    assert set(page.evaluate(said)) == {""}
    page.locator("tr[data-block]").first.focus()
    assert set(page.evaluate(said)) == {"blocks.4"}


def download(page, figure, what, folder):
    with page.expect_download() as found:
        page.locator(f"#{figure}").get_by_role("button", name=what).click()
    path = folder / found.value.suggested_filename
    found.value.save_as(path)
    return path


def test_charts_download_as_they_are_seen(tabs, visit, rows, tmp_path):
    page = tabs("one_run")
    page.locator(".stepper input").focus()
    page.keyboard.press("Home")
    picture = download(page, MAP, "Save as SVG", tmp_path)
    assert picture.name == f"{MAP}-step-0.svg"
    text = picture.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert "log κ by block and site, step 0" in text
    for number in texts_at(rows, 0):
        assert f">{number}<" in text
    assert 'fill="white"' in text
    visit(picture)
    legend = download(page, "log-kappa-over-training-by-site", "Save as SVG", tmp_path).read_text(encoding="utf-8")
    assert all(f">{site}<" in legend for site in ("sa", "+sa", "mlp", "+mlp"))
    image = download(page, "training-loss", "Save as PNG", tmp_path)
    assert image.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    table = list(csv.DictReader(io.StringIO(download(page, MAP, "Save the numbers", tmp_path).read_text("utf-8"))))
    wanted = [r for r in rows if r["name"] == "log_kappa" and r["index"] >= 0]
    assert len(table) == len(wanted)
    found = {(int(r["step"]), r["block"], r["site"]): (r["log_kappa"], r["status"]) for r in table}
    for r in wanted:
        value, status = found[r["step"], r["block"], r["site"]]
        assert float(value) == pytest.approx(r["value"], nan_ok=True)
        assert status == r["status"]


def test_a_card_is_copied_with_the_finding_whatever_the_slider_says(tabs, rows):
    page = tabs("one_run")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator(".stepper input").focus()
    page.keyboard.press("Home")
    page.evaluate("""() => {
      const old = picture;
      picture = async (...given) => (window.seen = await old(...given));
    }""")
    page.get_by_role("button", name="Copy title").click()
    page.get_by_text("Copied as a picture.").wait_for()
    kinds = page.evaluate("navigator.clipboard.read().then((items) => items.flatMap((item) => item.types))")
    assert kinds == ["image/png"]
    card = page.evaluate("seen.toSVG()")
    assert page.locator("h1").inner_text().split(",")[0] in card
    assert ">NaN<" not in card  # it is of the step at which the page opens, the last without NaN
    shown = [r["value"] for r in rows if r["step"] == 250 and r["name"] == "log_kappa" and r["index"] >= 0]
    assert all(f"{value:.1f}<" in card for value in shown)


def test_numbers_are_there_to_be_read(tabs, rows):
    page = tabs("one_run")
    page.locator(".stepper input").focus()
    page.keyboard.press("End")
    figure = page.locator(f"#{MAP}")
    figure.locator("summary").focus()
    page.keyboard.press("Enter")
    figure.locator("td").first.wait_for()
    at_last = [r for r in rows if r["name"] == "log_kappa" and r["index"] >= 0 and r["step"] == 1000]
    assert figure.locator(".numbers tr").count() == 1 + len(at_last)
    for drawing in page.locator("figure.chart .vega").all():
        assert drawing.get_attribute("role") == "graphics-document"
        assert len(drawing.get_attribute("aria-label")) > 10


@pytest.mark.parametrize(
    ("which", "scheme"),
    [
        ("one_run", "dark"),
        ("two_runs", "light"),
        ("large_model", "dark"),
        ("demo_page", "dark"),
        ("hostile_page", "light"),
    ],
)
def test_nothing_is_wider_than_a_phone(visit, request, which, scheme):
    page = visit(request.getfixturevalue(which), viewport=PHONE, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    spilling = """() => [...document.querySelectorAll("main *:not(svg *)")].filter((element) => {
      if (element.closest(".scroll, nav, pre")) return false;
      const box = element.getBoundingClientRect();
      return box.width && (box.right > innerWidth + 1 || box.left < -1);
    }).map((element) => element.outerHTML.slice(0, 100))"""
    assert page.evaluate(spilling) == []


def test_the_finding_and_the_heat_map_are_above_the_fold_of_a_phone(visit, one_run):
    page = visit(one_run, viewport=PHONE)
    cells = boxes(page, f"#{MAP} .mark-rect path")
    assert len(cells) >= 5 * 4
    assert max(bottom for _, _, _, bottom in cells) <= PHONE["height"]
    rows = {top: right for _, top, right, _ in boxes(page, ".tiles > div")}
    assert len(rows) > 2
    assert set(map(round, rows.values())) == {PHONE["width"] - 16}  # no row of tiles ends with an empty cell


def test_a_page_stays_small(one_run, two_runs, large_model, demo_page):
    assert max(path.stat().st_size for path in (one_run, two_runs, large_model, demo_page)) < 2e6


def test_colours_follow_the_scheme(tabs):
    colors = """() => [getComputedStyle(document.body).backgroundColor,
      ...[...document.querySelectorAll("figure .mark-line path")].map((path) => path.getAttribute("stroke")),
      ...[...document.querySelectorAll("figure .mark-rect path")].map((path) => path.getAttribute("fill"))
        .filter((fill) => fill && fill !== "transparent"),
      ...[...document.querySelectorAll("figure .role-axis-label text")].map((text) => text.getAttribute("fill"))]"""
    page, seen = tabs("one_run"), {}
    for scheme in ("light", "dark"):  # also where the reader changes it while the page is open
        page.emulate_media(color_scheme=scheme)
        page.wait_for_selector(f"html[data-drawn={scheme}]")
        seen[scheme] = page.evaluate(colors)
    light, dark = seen.values()
    assert len(light) == len(dark) > 40
    assert all(one != two for one, two in zip(light, dark, strict=True))
    saved = page.evaluate("picture(charts[0]).then((view) => view.toSVG())")
    assert 'fill="white"' in saved  # on paper, also from the dark
    page.emulate_media(color_scheme="light")
    page.wait_for_selector("html[data-drawn=light]")


def test_hostile_names_stay_text(tabs, tmp_path):
    page = tabs("hostile_page")
    assert page.title() == "A <hostile> page & more"
    assert page.locator(".legend button").all_inner_texts() == [name.replace("\n", " ") for name in HOSTILE]
    figure = page.locator("figure.chart")
    figure.locator("summary").click()
    figure.locator("td").first.wait_for()
    seen = figure.locator("td:first-child").all_text_contents()
    assert seen == [name for name in HOSTILE for _ in range(3)]
    page.locator(".legend button").nth(1).click()
    text = download(page, figure.get_attribute("id"), "Save as SVG", tmp_path).read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    saved = download(page, figure.get_attribute("id"), "Save the numbers", tmp_path)
    names = [row["run"] for row in csv.DictReader(io.StringIO(saved.read_bytes().decode(), newline=""))]
    assert names == seen


def test_without_script_words_and_tables_are_complete(visit, one_run):
    page = visit(one_run, script=False)
    assert page.get_by_text("The charts need JavaScript").is_visible()
    assert not page.locator(".stepper").is_visible()
    assert not page.get_by_text("Numbers", exact=True).first.is_visible()
    assert page.locator("td", has_text="blocks.4").first.is_visible()
    assert page.locator("figure.chart:visible, .legend:visible").count() == 0  # no empty boxes
    assert page.get_by_role("heading", name="Terms").is_visible()
    assert not page.locator("#attention h2").is_visible()  # which has nothing but charts


def test_the_policy_allows_our_scripts_alone(tabs):
    page = tabs("one_run")
    policy = page.locator("meta[http-equiv]").get_attribute("content")
    assert policy.startswith("default-src 'none'")
    scripts = re.search("script-src ([^;]+)", policy)[1].split()
    assert len(scripts) == 2
    assert all(source.startswith("'sha256-") for source in scripts)
    shared = {m.get_attribute("property"): m.get_attribute("content") for m in page.locator("meta[property]").all()}
    assert shared["og:title"] == page.locator("h1").inner_text()
    assert json.dumps(shared["og:description"]) == json.dumps(page.locator(".lead").inner_text())


def test_a_photograph_and_its_spectrum_follow_the_slider(tabs):
    page = tabs("demo_page")
    shown = page.locator(".photos img:visible")
    assert "ε = 0.95" in shown.first.get_attribute("alt")
    page.locator(".stepper input").first.focus()
    page.keyboard.press("Home")
    settle(page)
    assert shown.count() == 2
    assert all("ε = 0.5," in image.get_attribute("alt") for image in shown.all())
    assert shown.first.evaluate("image => image.complete && image.naturalWidth") == 224
    told = page.locator(".told:visible").inner_text()
    page.locator("#spectrum-of-china summary").click()
    page.locator("#spectrum-of-china td").first.wait_for()
    table = [row.split("\t") for row in page.locator("#spectrum-of-china tr").all_inner_texts()[1:]]
    smallest = {line: float([row for row in table if row[0] == line][-1][3]) for line in ("as they are", "SVD")}
    assert smallest["SVD"] == pytest.approx(smallest["as they are"] ** 0.5, rel=1e-3)
    assert f"κ = {1 / smallest['SVD']:,.0f} by SVD" in told


def test_the_evidence_can_be_read_on_a_phone_and_toggled(visit, demo_page):
    page = visit(demo_page, viewport=PHONE)
    figure = page.locator("#larger-evidence-statement-by-statement")
    dots, texts = (f"#{figure.get_attribute('id')} .mark-{mark}" for mark in ("symbol path", "text text"))
    before = len(boxes(page, dots))
    assert before > 5
    assert len(boxes(page, texts)) > 2 * before  # each has its statement and its number
    [(start, _, end, _)] = boxes(page, f"#{figure.get_attribute('id')}")
    assert all(start <= left <= right <= end for left, _, right, _ in boxes(page, f"{dots}, {texts}"))
    figure.get_by_role("button", name="undecided").click()
    settle(page)
    assert 0 < len(boxes(page, dots)) < before
